"""Measurement of passports: a model and its source over the same text, and their speeds in turns."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from os import cpu_count
from pathlib import Path
from statistics import median

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from quire.bench import quality
from quire.bench.drive import drive
from quire.bench.workload import Length, random_items, requests_of
from quire.compress.evaluation.passport import Answers, Evaluation, Passport, Quality, Rates, Speed
from quire.compress.recipes.parser import Recipe
from quire.compress.tracking.journal import code_digest
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, ModelError
from quire.core.files import sampled_digest
from quire.core.machine import cache_folder, processor
from quire.core.progress import counting_bar
from quire.core.version import VERSION
from quire.engine.llm import LLM
from quire.model.describe import ModelFacts, describe
from quire.model.disk.tokenizer import tokenizer_folder
from quire.model.net.hidden_taps import Taps
from quire.speculate.train.target import Target
from quire.store.hub import hub_of
from quire.text.tokenizer import Tokenizer

MAX_LOGIT_BYTES = 2 << 30
"""Bytes of the source's logits that lie on the disk between the passes; of longer texts every so many windows."""
MAX_WINDOW_LOGITS = 1 << 26
"""Numbers of a window's logits at most: 256 MiB, of which a pass holds a few copies."""
MAX_WINDOW = 1023
"""Tokens of a window at most."""
ROWS = 64
"""Rows whose distributions are held in f64 at a time."""
PROMPT, ANSWER = 512, 64
"""Tokens of a prompt that is timed, and of an answer."""
_SEEDS = count()
"""Of prompts; none is used twice in a process."""


@dataclass(frozen=True)
class Window:
    """A window of a text: `ids`, of which those from `first` on are scored. `kept`: whether its distributions are
    compared."""

    ids: list[int]
    first: int
    kept: bool


@dataclass
class ComparisonSums:
    """Sums over tokens of two passes. nll: negative log-likelihoods in nats, of source and model."""

    nll: list[float] = field(default_factory=lambda: [0.0, 0.0])
    tokens: int = 0
    kl: float = 0.0
    same: int = 0
    compared: int = 0


def passport_of(
    made: EngineConfig,
    source: EngineConfig,
    texts: Mapping[str, str] | None = None,
    limit: int = 0,
    rounds: int = 5,
    recipe: Recipe | None = None,
    digests: Mapping[str, str] | None = None,
    also: Sequence[str] = (),
) -> Passport:
    """Measure the model `made` beside `source`, each as its options say that it is served.

    `texts` by name; None = the modules that the folder's heldout.json names. `limit`: texts and questions at most, 0 =
    all. `rounds` of timing, 0 = none; both models are in memory then. `also`: quantizations at load in which the model
    is timed as well. `recipe` and `digests` of what it was made with are written into the passport. `ConfigError` where
    the two have other vocabularies, or there is no text.
    """
    models = [describe(c.model.model, c.model.load_format, hub_of(c.model)) for c in (source, made)]
    folders = [facts.folder for facts in models]
    if texts is None:
        texts = _heldout(folders)
        texts = dict(list(texts.items())[: limit or None])
    with tempfile.TemporaryDirectory(prefix="passport-", dir=_scratch()) as scratch:
        found, window = compare(made, source, models, texts, Path(scratch))
    size = sum(len(text.encode()) for text in texts.values())
    formats = [made, *(replace(made, model=replace(made.model, quantization=name)) for name in also)]
    answers, speed, form = _serve_both(formats if rounds else formats[:1], source, folders, limit, rounds)
    before, after = (
        Quality(
            perplexity=math.exp(nll / found.tokens),
            bits_per_byte=nll / math.log(2) / size,
            size_bytes=facts.bytes_on_disk,
            exact_answers=right,
        )
        for nll, facts, right in zip(found.nll, models, answers, strict=True)
    )
    text_digest = hashlib.blake2b(msgspec.json.encode(sorted(texts.items())), digest_size=16).hexdigest()
    known = {"source": sampled_digest(folders[0]), "model": sampled_digest(folders[1]), "code": code_digest()}
    if recipe is not None:
        known["recipe"] = recipe.digest
    return Passport(
        model=made.model.model or folders[1].name,
        source=source.model.model or folders[0].name,
        kl=found.kl / found.compared,
        top1=found.same / found.compared,
        of_source=before,
        speed=speed,
        evaluation=Evaluation(
            texts=len(texts), tokens=found.tokens, kl_tokens=found.compared, bytes=size, window=window,
            digest=text_digest, format=form,
        ),
        recipe=None if recipe is None else msgspec.to_builtins(recipe),
        digests=known | dict(digests or {}),
        machine={"processor": processor(), "cores": cpu_count(), "device": made.device.device},
        date=datetime.now(UTC).date().isoformat(),
        version=VERSION,
        **msgspec.structs.asdict(after),
    )  # fmt: skip


def compare(
    made: EngineConfig,
    source: EngineConfig,
    models: Sequence[ModelFacts],
    texts: Mapping[str, str],
    scratch: Path,
) -> tuple[ComparisonSums, int]:
    """Score `texts` with the source and then with the model, one in memory at a time: (sums, tokens of a window).

    `models`: facts of source and model. Windows are those of `quality.perplexity`, of no more tokens than both have
    positions for. What is needed of the source's logits lies in the folder `scratch` meanwhile.
    """
    specs = [facts.spec for facts in models]
    vocab = specs[0].vocab_size
    if vocab != specs[1].vocab_size:
        raise ConfigError(
            f"{models[1].folder} has {specs[1].vocab_size:,} tokens and its source {vocab:,}: KL needs one vocabulary",
            param="against",
        )
    asked = (
        config.model.max_model_len or spec.max_position for config, spec in zip((source, made), specs, strict=True)
    )
    window = min(MAX_WINDOW, max(2, MAX_WINDOW_LOGITS // vocab), *(length - 1 for length in asked))
    jobs = _windows(made, source, models, texts, window)
    found = ComparisonSums()

    def keep(i: int, logits: Tensor) -> None:
        _add_likelihood(found, 0, jobs[i], logits)
        if jobs[i].kept:
            logits.numpy().tofile(scratch / str(i))

    def meet(i: int, logits: Tensor) -> None:
        found.tokens += len(logits)
        _add_likelihood(found, 1, jobs[i], logits)
        if jobs[i].kept:
            path = scratch / str(i)
            before = torch.from_file(str(path), shared=False, size=logits.numel()).view_as(logits)
            _add_divergence(found, before, logits)
            path.unlink()

    _score_windows(source, jobs, window, keep)
    _score_windows(made, jobs, window, meet)
    return found, window


def _windows(
    made: EngineConfig, source: EngineConfig, models: Sequence[ModelFacts], texts: Mapping[str, str], window: int
) -> list[Window]:
    """Cut all texts into windows; those that are compared are spread evenly over them, within `MAX_LOGIT_BYTES`."""
    before, after = (
        Tokenizer.from_folder(tokenizer_folder(config.model, facts.folder))
        for config, facts in zip((source, made), models, strict=True)
    )
    cut: list[tuple[list[int], int]] = []
    for name, text in texts.items():
        ids = before.encode(text, add_special_tokens=False)
        if ids != after.encode(text, add_special_tokens=False):
            raise ConfigError(f"{name}: the two models have other tokens for it: KL needs one vocabulary")
        cut += [(ids[w.start : w.stop], w.scored - w.start) for w in quality.windows(len(ids), window)]
    if not cut:
        raise ConfigError("there is no text to score: two tokens are needed at least")
    held = 4 * models[0].spec.vocab_size * sum(len(ids) - first for ids, first in cut)
    every = -(-held // MAX_LOGIT_BYTES)
    return [Window(ids, first, i % every == 0) for i, (ids, first) in enumerate(cut)]


def _score_windows(
    config: EngineConfig, jobs: Sequence[Window], window: int, see: Callable[[int, Tensor], None]
) -> None:
    """Call `see` with the logits [n, V] f32 of each window: the rows that predict its scored tokens."""
    target = Target(config, window, lambda spec: Taps(every=True))
    with counting_bar(len(jobs), target.model.name) as done:
        for i, job in enumerate(jobs):
            logits = target.read(job.ids)[1][job.first - 1 : -1]
            if not bool(logits.isfinite().all()):
                raise ModelError(f"{target.model.name}: its logits are no numbers for a text that is scored")
            see(i, logits)
            done()


def _add_likelihood(found: ComparisonSums, which: int, job: Window, logits: Tensor) -> None:
    wanted = torch.tensor(job.ids[job.first :])[:, None]
    for at in range(0, len(logits), ROWS):
        rows = logits[at : at + ROWS].double().log_softmax(-1)
        found.nll[which] -= float(rows.gather(1, wanted[at : at + ROWS]).sum())


def _add_divergence(found: ComparisonSums, before: Tensor, after: Tensor) -> None:
    """Add KL(before || after) and the agreement of rows of logits [n, V] each."""
    for at in range(0, len(before), ROWS):
        p, q = (rows[at : at + ROWS].double().log_softmax(-1) for rows in (before, after))
        found.kl += float((p.exp() * (p - q)).sum())
    found.same += int((before.argmax(-1) == after.argmax(-1)).sum())
    found.compared += len(before)


def _serve_both(
    formats: Sequence[EngineConfig], source: EngineConfig, folders: Sequence[Path], limit: int, rounds: int
) -> tuple[list[Answers | None], tuple[Speed, ...], str]:
    """Return (exact answers of source and model, speeds in all `formats`, how the model is served first)."""
    holder = next((f for f in reversed(folders) if (f / "questions.jsonl").is_file()), None)
    questions = [] if holder is None else quality.read_questions(holder)
    if limit:
        questions = questions[:: max(1, len(questions) // limit)][:limit]
    with LLM.from_config(source) as before:
        answers, speeds, forms = [_answers(before, questions)], list[Speed](), list[str]()
        for config in formats:
            with LLM.from_config(config) as after:
                forms.append(_format(after))
                if len(forms) == 1:
                    answers.append(_answers(after, questions))
                if rounds:
                    speeds.append(speed_of(after, before, rounds))
    return answers, tuple(speeds), forms[0]


def _answers(llm: LLM, questions: Sequence[quality.Question]) -> Answers | None:
    if not questions:
        return None
    found = quality.exact_answers(llm, questions)
    return Answers(found["right"], found["total"])


def speed_of(made: LLM, source: LLM, rounds: int) -> Speed:
    """Time batches of 1 and 16 and a prompt of both models, in turns; a round before the first warms up."""
    measured: list[tuple[Rates, Rates]] = []
    for turn in range(rounds + 1):
        # Prompts that an engine has seen are in its prefix cache: a second speed_of read them 100 times too fast.
        seed = next(_SEEDS)
        pair = _rates(made, seed), _rates(source, seed)
        measured += [pair] * (turn > 0)
    after, before = zip(*measured, strict=True)
    names = Rates.__struct_fields__
    ratios = [Rates(**{name: getattr(a, name) / getattr(b, name) for name in names}) for a, b in measured]
    return Speed(
        format=_format(made),
        source_format=_format(source),
        rounds=rounds,
        tokens_per_second=_medians(after),
        source_tokens_per_second=_medians(before),
        ratio=_medians(ratios),
        weight_bytes=made.info.weight_bytes,
        source_weight_bytes=source.info.weight_bytes,
    )


def _medians(rates: Sequence[Rates]) -> Rates:
    return Rates(**{name: median(getattr(r, name) for r in rates) for name in Rates.__struct_fields__})


def _rates(llm: LLM, seed: int) -> Rates:
    """Measure the rates of one round with prompts of `seed`.

    Streams are timed from a prompt of 16 tokens to the last of their answer's.
    """
    engine, info = llm.engine, llm.info
    prompt = min(PROMPT, info.max_model_len // 2)
    more = min(ANSWER, info.max_model_len // 4)

    def tokens_a_second(batch: int, length: int, answer: int) -> float:
        items = random_items(
            batch, Length(length, length), Length(answer, answer), vocab_size=info.vocab_size,
            seed=10_000 * seed + 100 * batch + answer,
        )  # fmt: skip
        _, seconds = drive(engine, requests_of(items, info, f"{seed}-{batch}-{answer}"))
        return batch * (length if answer == 1 else answer) / seconds

    few = min(16, prompt)
    return Rates(
        batch_1=tokens_a_second(1, few, more),
        batch_16=tokens_a_second(16, few, more),
        prefill=tokens_a_second(1, prompt, 1),
    )


def _format(llm: LLM) -> str:
    info = llm.info
    kv = "" if info.kv_cache_dtype == info.dtype else f", KV {info.kv_cache_dtype}"
    return f"{info.dtype}, quantization {info.quantization}{kv}, {info.isa or info.backend}, {info.threads} threads"


def _heldout(folders: Sequence[Path]) -> dict[str, str]:
    holder = next((f for f in reversed(folders) if (f / "heldout.json").is_file()), None)
    if holder is None:
        raise ConfigError(f"{folders[1]} names no held-out text; give texts to score with --text FILE", param="text")
    return quality.heldout_texts(holder)


def _scratch() -> Path:
    """Return where logits lie between the passes: the caches' folder, as /tmp may be memory."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
