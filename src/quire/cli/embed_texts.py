"""`quire embed`: vectors of the texts of a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.cli.flags import ENGINE, option_command, to_engine
from quire.cli.model_names import with_default
from quire.cli.params import INTEGER, PATH, argument, option, quiet_option
from quire.core.errors import BadRequest, ConfigError

if TYPE_CHECKING:
    from quire.cli.embed_files import Batch, Matrix
    from quire.engine.llm import LLM
    from quire.features.pooling.edge_embedding import PoolingParams


STANDARD_INPUT = Path("-")


@option_command(
    "embed",
    ENGINE,
    argument(
        "input_file",
        metavar="FILE",
        type=PATH,
        help="Texts, one a line, or JSON objects (see --field); - is standard input.",
    ),
    option(
        "--output-file",
        "-o",
        type=PATH,
        required=True,
        help="File of vectors: .parquet or .jsonl (with the texts), or .npy. Vectors that a run which was cut off has "
        "made are kept in a folder beside it, and the same command goes on from there.",
    ),
    option("--field", type=str, help="Field of a .jsonl file that has the text. [text]"),
    option("--prompt-name", type=str, help="Task whose prompt of the model's files stands before texts, as query."),
    option("--dimensions", type=click.IntRange(min=1), help="Only the first numbers of vectors, normalized again."),
    option(
        "--normalize/--no-normalize",
        default=None,
        help="Whether vectors are divided by their lengths; as the model's files say if not given.",
    ),
    option("--truncate", is_flag=True, help="Use the beginning of texts that are too long, instead of refusing them."),
    option("--batch-size", type=INTEGER, default=10_000, help="Texts that are in memory at one time."),
    quiet_option(),
)
def embed(
    options: dict[str, Any],
    input_file: Path,
    output_file: Path,
    field: str | None,
    truncate: bool,
    batch_size: int,
    **asked: Any,
) -> None:
    """Write the vectors of a file of texts. Run it again to go on where it was cut off."""
    from quire.cli.embed_files import Parts, batches_of, shown, standard_input, texts_of, write

    config = to_engine(with_default(options))
    _check(input_file, output_file, batch_size)
    if input_file == STANDARD_INPUT:
        input_file = click.get_current_context().with_resource(standard_input())
    named = field or ("text" if input_file.suffix == ".jsonl" else "")
    total = sum(1 for _ in texts_of(input_file, named))
    if not total:
        raise ConfigError(f"{shown(input_file)} has no texts")
    from quire.cli.generate import open_llm
    from quire.core.files import sampled_digest
    from quire.core.progress import stage
    from quire.features.pooling.edge_embedding import PoolingParams
    from quire.features.pooling.edge_sparse import check_dense

    params = PoolingParams(**asked)
    with open_llm(config) as llm:
        pooling = llm.info.pooling
        params.validate(pooling)
        if pooling.labels:
            raise BadRequest("this model classifies, and makes no vectors; use LLM.classify or quire serve")
        check_dense(pooling)
        how = json.dumps([sampled_digest(Path(llm.info.folder)), {k: str(v) for k, v in sorted(options.items())}, asked,
                          truncate])  # fmt: skip
        parts, before = Parts(output_file, how), 0

        def made() -> Iterator[tuple[Sequence[str], Matrix]]:
            nonlocal before
            for batch in batches_of(input_file, named, batch_size):
                vectors, there = parts.vectors(batch, lambda each: _vectors(llm, each, params, truncate, input_file))
                before += len(vectors) if there else 0
                at.advance(len(vectors))
                yield batch[1], vectors

        width = params.dimensions or pooling.cut or pooling.width
        with stage("texts", total) as at:
            try:
                write(output_file, total, width, made())
            except BaseException:
                kept = any(parts.folder.iterdir())
                if kept:
                    print(f"vectors so far are in {parts.folder}; the same command goes on", file=sys.stderr)
                else:
                    parts.remove()
                raise
        parts.remove()
    earlier = f", {before:,} of them from an earlier run" if before else ""
    print(f"{total:,} vectors of {width:,} numbers are in {output_file}{earlier}")


def _check(source: Path, target: Path, batch_size: int) -> None:
    """`ConfigError` for files that cannot be, before minutes of loading."""
    from quire.cli.embed_files import SUFFIXES, pyarrow

    if source != STANDARD_INPUT and not source.is_file():
        raise ConfigError(f"{source}: no such file", param="input_file")
    if target.suffix not in SUFFIXES:
        raise ConfigError(f"--output-file {target}: must end with {', '.join(SUFFIXES)}", param="output_file")
    if not target.parent.is_dir():
        raise ConfigError(f"--output-file {target}: there is no folder {target.parent}", param="output_file")
    if batch_size < 1:
        raise ConfigError(f"--batch-size {batch_size}: must be at least 1", param="batch_size")
    if target.suffix == ".parquet":
        pyarrow()


def _vectors(llm: LLM, batch: Batch, params: PoolingParams, truncate: bool, source: Path) -> Matrix:
    """Vectors of the texts of a batch; `BadRequest` with the line of a text that cannot be read."""
    import numpy as np

    from quire.cli.embed_files import shown
    from quire.features.pooling.edge_embedding import task_prompt
    from quire.text.shortening import shortened

    first, texts = batch
    tokenizer, limit = llm.get_tokenizer(), llm.info.max_model_len
    task, prompts = task_prompt(llm.info.pooling, params.prompt_name), []
    for number, text in enumerate(texts, first):
        ids = tokenizer.encode(task + text)
        if not ids:
            raise BadRequest(f"{shown(source)}: line {number} has no tokens, and so no vector")
        if len(ids) > limit and not truncate:
            raise BadRequest(
                f"{shown(source)}: line {number} has {len(ids)} tokens, but this model reads {limit}; give --truncate"
            )
        prompts.append({"prompt_token_ids": shortened(tokenizer, task + text, ids, limit, False)})
    found = llm.encode(prompts, params)
    return np.stack([each.outputs.data for each in found]).astype(np.float32)
