"""Structured outputs: decode steps of a batch whose rows follow a JSON schema, beside the same batch without.

    python -m benchmarks.engine.structured_outputs --vocab 32000 128256 --batch 32

A llama-1b shape with random weights, and a byte-level vocabulary of the words and parts of words of Python's own
library. Batches without a grammar, with one for half of the rows and for all take turns in one engine; a round is timed
over its steps in which all rows decode. Bar: all rows with a grammar lose at most 3 % of the tokens a second.
`--parts` also times what a row costs by itself: mask, taking a token, searching a completion.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from quire.bench.suite.foreign.shapes import SHAPES
from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.structured import StructuredOutputsParams
from quire.engine.engine import Engine
from quire.engine.requests import with_grammar
from quire.engine.start import start_engine
from quire.features.structured_output.edge_grammar_compiler import GrammarCompiler
from quire.text.structured.guide import GrammarGuide
from quire.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 200},
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "minutes": {"type": "integer", "minimum": 1}},
                "required": ["text", "minutes"],
                "additionalProperties": False,
            },
            "minItems": 3,
        },
        "level": {"enum": ["easy", "medium", "hard"]},
    },
    "required": ["title", "steps", "level"],
    "additionalProperties": False,
}
END = 2


def words(count: int) -> list[str]:
    """The `count` likeliest words and beginnings of words of Python's library, with and without a space before them."""
    found: collections.Counter[str] = collections.Counter()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for word in re.findall(r" ?\w+|\s+|[^\w\s]{1,3}", path.read_text(errors="ignore")):
            for size in range(2, min(len(word), 16) + 1):
                found[word[:size]] += 1
    return [word for word, _ in found.most_common(count)]


def write_model(vocab: int, folder: Path) -> str:
    """A folder for `load_format="dummy"`."""
    facts = SHAPES["llama-1b"] | {"vocab_size": vocab, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(facts))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = ["".join(part for part, _ in level.pre_tokenize_str(word)) for word in words(2 * vocab)]
    known = dict.fromkeys(["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *spelled])
    table = {token: i for i, token in enumerate(list(known)[:vocab])}
    backend = Backend(models.BPE(table, [], unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = level, decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


def requests(engine: Engine, tokenizer: Tokenizer, batch: int, guided: int, name: str) -> list[Request]:
    """As many requests as `batch`, of which `guided` have the grammar; all have room for more tokens than a round."""
    shape = StructuredOutputsParams(json=SCHEMA)
    made = []
    for i in range(batch):
        prompt = tuple((j * 7919 + i) % 31000 + 5 for j in range(32))
        params = SamplingParams(max_tokens=700, structured_outputs=shape if i < guided else None)
        eos = (END,) if i < guided else ()
        request = Request(id=f"{name}-{i}", prompt=prompt, params=params, seed=i, arrival=0.0, eos_token_ids=eos)
        made.append(with_grammar(engine.model.spec.vocab_size, tokenizer, request))
    return made


def round_of(engine: Engine, asked: list[Request], steps: int) -> list[float]:
    """Seconds of each of `steps` steps in which every request decodes."""
    for request in asked:
        engine.submit(request)
    found: list[float] = []
    while len(found) < steps:
        begin = time.perf_counter()
        outputs = engine.step()
        took = time.perf_counter() - begin
        if sum(len(output.tokens) for output in outputs) == len(asked) == engine.step_tokens:
            found.append(took)
        assert all(output.error is None for output in outputs), outputs
        if not engine.has_work:
            raise RuntimeError("the answers are too short for this many steps")
    for request in asked:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()
    return found


def parts(engine: Engine, asked: Request, tokens: int) -> dict[str, float]:
    """Median microseconds of a mask, of taking a token and of the search for a completion, for one row."""
    guiding = GrammarCompiler(engine.config.model, str(engine.model.folder), engine.model.spec.vocab_size)
    grammar = guiding._grammar(asked.grammar)
    guide = GrammarGuide(grammar, asked.params.max_tokens or 0, (END,), asked.completion)
    draw, vocab = np.random.default_rng(0), engine.model.spec.vocab_size
    bits = np.empty((vocab + 1 + 31) // 32, np.int32)
    said: list[int] = []
    clocks = collections.defaultdict[str, list[float]](list)

    def timed(name: str, call: Any, *given: Any) -> Any:
        begin = time.perf_counter()
        result = call(*given)
        clocks[name].append((time.perf_counter() - begin) * 1e6)
        return result

    search = guide._searched
    guide._searched = lambda: timed("search", search)  # type: ignore[method-assign]
    while len(said) < tokens and not guide.complete(len(said)):
        guide.follow(said, 0)
        timed("mask", guide.mask, bits)
        may = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab])
        token = int(draw.choice(may))
        if token != END and timed("take", guide.takes, token):
            said.append(token)
    counts = {f"{name}s": float(len(values)) for name, values in clocks.items()}
    return {name: statistics.median(values) for name, values in clocks.items()} | counts


def measure(args: argparse.Namespace, vocab: int) -> None:
    """Measure and print for one vocabulary."""
    with tempfile.TemporaryDirectory() as made:
        model = write_model(vocab, Path(made))
        options = {"quantization": "int4", "max_model_len": 1024, "max_num_seqs": args.batch}
        engine = start_engine(flat_config(model=model, load_format="dummy", enable_prefix_caching=False, **options))
        tokenizer = Tokenizer.from_folder(model)
        kinds = {"none": 0, "half": args.batch // 2, "all": args.batch}
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(args.rounds + 1):
            for kind, guided in kinds.items():
                found = round_of(engine, requests(engine, tokenizer, args.batch, guided, f"{kind}{turn}"), args.steps)
                if turn:  # the first compiles, and records steps
                    seconds[kind].append(statistics.median(found))
        plain = seconds["none"]
        for kind, rows in seconds.items():
            ratio = statistics.median(p / r for p, r in zip(plain, rows, strict=True))
            step = statistics.median(rows) * 1e3
            print(f"vocabulary {vocab}, batch {args.batch}, grammars: {kind:4s} step {step:7.2f} ms, "
                  f"tokens/s against none {ratio:.3f}", flush=True)  # fmt: skip
        if args.parts:
            asked = requests(engine, tokenizer, 1, 1, "parts")[0]
            print(
                f"vocabulary {vocab}, us: {json.dumps({k: round(v, 1) for k, v in parts(engine, asked, 300).items()})}"
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 128256])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--parts", action="store_true")
    args = parser.parse_args()
    for vocab in args.vocab:
        measure(args, vocab)


if __name__ == "__main__":
    main()
