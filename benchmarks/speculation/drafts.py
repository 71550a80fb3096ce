"""Speculation: tokens a second beside plain decoding of the same engine, in turns.

    python -m benchmarks.speculation.drafts ...

    coupling                   how often two models draw the same token, beside the most possible
    chain                      8 bits, chains of 7 of which each token is right with probability 0.8
    self                       int4 drafts for bf16, right as often as on the embedded model
    lookup                     prompt look-up on a task that quotes its prompt, embedded model
    large-batches --tokens 24  16 and 64 sequences with the cost model on, large shape
    look                       microseconds that looking for a draft takes, a sequence and step
    kept                       drafts kept under sampling beside 1 - TV, embedded model

Random weights have no text to guess, so `chain` and `self` draft what plain decoding gave, each token with the given
probability (--synthetic-acceptance); passes of the draft model run all the same. Outputs equal those of plain decoding.
What draft methods and trained heads gain on the embedded model: `quire bench suite benchmarks/suites/speculation.toml`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from benchmarks.common.results import RESULTS, ROOT, parser_of
from quire.bench.quality import heldout_texts
from quire.bench.suite.foreign.shapes import SHAPES, write_config
from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.plan import ChunkResult, StepPlan
from quire.core.request import Request
from quire.core.sequence import Sequence, Status
from quire.core.speculation import Speculation
from quire.engine.engine import Engine
from quire.engine.start import start_engine
from quire.speculate.ngram import NGram
from quire.speculate.proposer import Proposer
from quire.speculate.suffix import SuffixDecoding
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

PYDOC = ROOT / "src" / "quire" / "assets" / "pydoc"


@dataclass
class Told:
    """Drafts of what is known to come, each token with probability `rate`; `inner` drafts as well, and is overruled."""

    rate: float
    inner: Proposer | None = None
    known: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    weight_bytes: int = 0
    longest: int = sys.maxsize

    @property
    def seconds(self) -> float:
        """Of `inner`."""
        return 0.0 if self.inner is None else self.inner.seconds

    @property
    def passes(self) -> bool:
        """As the method it stands for."""
        return self.inner is not None and self.inner.passes

    def propose(self, seqs: GenericSequence[Sequence], limits: GenericSequence[int]) -> None:
        """The next tokens of the plain run, or others."""
        if self.inner is not None:
            self.inner.propose(seqs, limits)
        for seq, limit in zip(seqs, limits, strict=True):
            says = self.known.get((seq.request.id, seq.index), [])[len(seq.output) :][:limit]
            seq.draft.tokens = [token if self.rng.random() < self.rate else token ^ 1 for token in says]

    def ready(self, seq: Sequence) -> bool:
        """As `inner` is."""
        return self.inner is None or self.inner.ready(seq)

    def computed(self, plan: StepPlan, follow: bool, results: GenericSequence[ChunkResult] = ()) -> None:
        """As `inner` does."""
        if self.inner is not None:
            self.inner.computed(plan, follow, results)


def engine_of(folder: Path | str, asked: dict[str, Any] | None, **options: Any) -> Engine:
    """An engine that speculates as asked; None = not at all."""
    more = {} if asked is None else {"speculative_config": json.dumps(asked)}
    return start_engine(flat_config(**({"model": str(folder), "max_num_seqs": 64} | options | more)))


def requests_of(prompts: GenericSequence[GenericSequence[int]], tokens: int, **params: Any) -> list[Request]:
    """Requests that run to their limit."""
    asked = SamplingParams(max_tokens=tokens, ignore_eos=True, **({"temperature": 0.0} | params))
    return [Request(id=f"r{i}", prompt=tuple(p), params=asked, seed=i, arrival=0.0) for i, p in enumerate(prompts)]


def decode(engine: Engine, requests: list[Request]) -> tuple[dict[tuple[str, int], list[int]], float, int]:
    """What came out; seconds a token and steps, once every prompt is computed.

    Where not all requests run at once: as long as some wait, for then the batch is always full.
    """
    out: dict[tuple[str, int], list[int]] = {(r.id, 0): [] for r in requests}
    for request in requests:
        engine.submit(request)
    at_once = len(requests) <= engine.config.scheduler.max_num_seqs
    begin, end, steps, made = 0.0, 0.0, 0, 0
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            out[output.request_id, output.index] += output.tokens
            made += len(output.tokens) if begin and not end else 0
        steps += begin > 0
        if not begin and (not at_once or all(out.values())):
            begin = time.perf_counter()
        if not at_once and not end and not len(engine.scheduler.waiting):
            end = time.perf_counter()
    return out, ((end or time.perf_counter()) - begin) / made, steps


def compare(
    plain: Engine, drafting: Engine, requests: list[Request], rounds: int, told: Told | None = None
) -> dict[str, Any]:
    """Both in turns; the ratio is of medians of tokens a second while decoding."""
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    want, _, plain_steps = decode(plain, requests)
    if told is not None:
        told.known = want
    got, _, steps = decode(drafting, requests)
    assert got == want and decode(drafting, requests)[0] == want, "speculation changed what came out"
    totals = drafting.speculator.totals if drafting.speculator is not None else None
    for _ in range(rounds):
        for name, engine in (("off", plain), ("on", drafting)):
            seconds[name].append(decode(engine, requests)[1])
    rates = {name: 1 / statistics.median(times) for name, times in seconds.items()}
    return {
        "off_tokens_per_s": rates["off"], "on_tokens_per_s": rates["on"], "ratio": rates["on"] / rates["off"],
        "tokens_per_step": plain_steps / steps,
        "acceptance": totals.accepted / max(1, totals.tokens) if totals is not None else None,
        "rounds": [min(a / b for a, b in zip(seconds["off"], seconds["on"], strict=True)),
                   max(a / b for a, b in zip(seconds["off"], seconds["on"], strict=True))],
    }  # fmt: skip


def texts(count: int, length: int) -> list[list[int]]:
    """Beginnings of modules that the embedded model was not trained on."""
    tokenizer = Tokenizer.from_folder(PYDOC)
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in heldout_texts(PYDOC).values()]
    cut = [row[at : at + length] for row in rows for at in range(0, len(row) - length, length)]
    return cut[:: max(1, len(cut) // count)][:count]


def noise(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Made-up prompts."""
    rng = random.Random(1)
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for _ in range(count)]


def folder_of(args: argparse.Namespace) -> Path:
    return write_config(args.shape, args.work.absolute() / args.shape)


def tell(engine: Engine, rate: float) -> Told:
    """Put `Told` before the engine's proposer."""
    assert engine.speculator is not None
    inner = engine.speculator.proposer
    told = Told(rate, inner if inner.passes else None)
    engine.speculator.proposer = told
    return told


def chain(args: argparse.Namespace) -> dict[str, Any]:
    """Free drafts of 7: what verification alone allows."""
    options = {"load_format": "dummy", "max_model_len": 1024, "quantization": "int8", "group_size": args.group_size}
    asked = {"method": "ngram", "num_speculative_tokens": 7, "adaptive": False}
    plain, drafting = engine_of(folder_of(args), None, **options), engine_of(folder_of(args), asked, **options)
    told = tell(drafting, args.synthetic_acceptance)
    requests = requests_of(noise(1, 64, SHAPES[args.shape]["vocab_size"]), args.tokens)
    return compare(plain, drafting, requests, args.rounds, told)


def accepted_by_the_embedded_model(tokens: int) -> float:
    """The share of guesses by int4 that bf16 keeps, of those whose predecessors were kept."""
    asked = {"method": "self", "quantization": "int4", "num_speculative_tokens": tokens, "adaptive": False}
    engine = engine_of(PYDOC, asked)
    decode(engine, requests_of(texts(16, 64), 128))
    assert engine.speculator is not None
    totals = engine.speculator.totals
    tried = totals.drafts + sum(totals.accepted_per_pos[:-1])
    return totals.accepted / tried


def self_drafts(args: argparse.Namespace) -> dict[str, Any]:
    """int4 passes drafted and paid for; kept as often as the embedded model's."""
    options = {"load_format": "dummy", "max_model_len": 1024, "dtype": "bfloat16"}
    asked = {"method": "self", "quantization": "int4", "adaptive": True, "num_speculative_tokens": args.drafts}
    rate = accepted_by_the_embedded_model(args.drafts)
    plain, drafting = engine_of(folder_of(args), None, **options), engine_of(folder_of(args), asked, **options)
    told = tell(drafting, rate)
    requests = requests_of(noise(1, 64, SHAPES[args.shape]["vocab_size"]), args.tokens)
    return compare(plain, drafting, requests, args.rounds, told) | {"rate": rate}


def asked_again(count: int) -> list[list[int]]:
    """Conversations in which a question was answered, then another, and the first is asked once more."""
    lines = (PYDOC / "questions.jsonl").read_text().splitlines()
    rows = sorted((json.loads(line) for line in lines), key=lambda row: -len(row["answer"]))
    long = [row for row in rows if len(row["answer"]) < 400][: 8 * count : 8]
    template = ChatTemplate.from_folder(PYDOC, Tokenizer.from_folder(PYDOC))
    said = [[(row["question"], row["answer"]) for row in pair] for pair in itertools.pairwise([*long, long[0]])]
    return [
        template.encode(
            [
                {"role": role, "content": text}
                for turn in turns
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
            + [{"role": "user", "content": turns[0][0]}]
        )
        for turns in said
    ]


def lookup(args: argparse.Namespace) -> dict[str, Any]:
    """Answers that stand in the prompt: questions that were answered before, to the model's own end of the text."""
    found = []
    for prompt in asked_again(12):
        asked = SamplingParams(max_tokens=120, temperature=0.0)
        request = Request(id="r", prompt=tuple(prompt), params=asked, seed=0, arrival=0.0, eos_token_ids=(4,))
        found.append(compare(engine_of(PYDOC, None), engine_of(PYDOC, {"method": "ngram"}), [request], args.rounds))
    return {
        name: statistics.median(row[name] for row in found) for name in ("ratio", "tokens_per_step", "acceptance")
    } | {"least_ratio": min(row["ratio"] for row in found), "all": found}


def look(args: argparse.Namespace) -> dict[str, Any]:
    """Over held-out text that is told token by token, behind 16 rows of text that the tenant got before."""
    found = {}
    for name, proposer in (("ngram", NGram(2, 16)), ("suffix", SuffixDecoding(Speculation(method="suffix")))):
        spent = list[float]()
        for i, (start, *rest) in enumerate(texts(32, 512)):
            seq = Sequence(replace(requests_of([[start]], 600)[0], id=str(i)))
            for token in rest:
                begin = time.perf_counter_ns()
                proposer.propose([seq], [8])
                spent.append((time.perf_counter_ns() - begin) / 1000)
                seq.tokens.append(token)
            seq.status = Status.FINISHED
        late = sorted(spent[len(spent) // 2 :])
        found[name] = {"median_us": statistics.median(late), "p99_us": late[int(0.99 * len(late))]}
    return found


METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "self": {"method": "self", "quantization": "int4"},
    "draft_model": {"method": "draft_model", "model": str(PYDOC)},
}


def large_batches(args: argparse.Namespace) -> dict[str, Any]:
    """The cost model beside none on a model whose steps are bound by memory first, then by arithmetic."""
    found, options = {}, {"load_format": "dummy", "max_model_len": 1024, "dtype": "bfloat16"}
    for count in args.batch:
        requests = requests_of(noise(count, 16, SHAPES[args.shape]["vocab_size"]), args.tokens)
        for name in ("ngram", "self"):
            plain = engine_of(folder_of(args), None, **options)
            drafting = engine_of(folder_of(args), METHODS[name], **options)
            told = tell(drafting, args.synthetic_acceptance)
            found[f"{name} {count}"] = compare(plain, drafting, requests, args.rounds, told)
    return found


def model_logits(folder: Path, rows: list[list[int]], quantization: str | None) -> torch.Tensor:
    """Logits f64 [all rows, V] of every position, by log-probabilities of the whole vocabulary."""
    engine = engine_of(folder, None, **({"quantization": quantization} if quantization else {}))
    kept: list[torch.Tensor] = []
    sampler = engine.runner.sampler
    plain = sampler.__call__

    def keep(logits: torch.Tensor, rows: Any, scores: bool = True) -> Any:
        kept.append(logits.double().clone())
        return plain(logits, rows, scores)

    engine.runner.sampler = keep  # type: ignore[assignment]
    for i, row in enumerate(rows):
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
        engine.submit(Request(id=f"r{i}", prompt=tuple(row), params=params, seed=0, arrival=0.0))
        while engine.has_work:
            engine.step()
    return torch.cat(kept)


def coupling(args: argparse.Namespace) -> dict[str, Any]:
    """Probability of equal draws: inverse of the cumulative sum in ascending id, the race, and 1 - TV.

    Both are exact: intervals of the unit line that overlap; Daliri et al. 2024, 1 / sum_j max(p_j / p_i, q_j / q_i).
    """
    rows = texts(8, 256)
    target, draft = (model_logits(PYDOC, rows, q) for q in (None, "int4"))
    found = {}
    for temperature in (0.7, 1.0):
        p, q = ((x / temperature).softmax(1)[::8] for x in (target, draft))
        most = 1 - (p - q).abs().sum(1) / 2
        ends, others = p.cumsum(1), q.cumsum(1)
        overlap = torch.minimum(ends, others) - torch.maximum(ends - p, others - q)
        race = [_race(a, b) for a, b in zip(p, q, strict=True)]
        found[f"temperature {temperature}"] = {
            "optimum": float(most.mean()),
            "inverse_cdf": float(overlap.clamp(min=0).sum(1).mean()),
            "race": float(np.mean(race)),
        }
    return found


def _race(p: torch.Tensor, q: torch.Tensor) -> float:
    likely = (p > 1e-5) | (q > 1e-5)
    p, q = p[likely] + 1e-30, q[likely] + 1e-30
    return float((1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(1)).sum())


def kept(args: argparse.Namespace) -> dict[str, Any]:
    """Of first guesses, the share that was kept, beside the mean of 1 - TV at the same positions."""
    found = {}
    drafts = {"self": METHODS["self"], "draft_model": METHODS["draft_model"] | {"quantization": "int4"}}
    for temperature in (0.7, 1.0):
        for name, asked in drafts.items():
            engine = engine_of(PYDOC, asked | {"adaptive": False, "num_speculative_tokens": 1})
            requests = requests_of(texts(48, 64), 96, temperature=temperature)
            out, _, _ = decode(engine, requests)
            assert engine.speculator is not None
            totals = engine.speculator.totals
            rows = [[*r.prompt, *out[r.id, 0]] for r in requests]
            parts = [model_logits(PYDOC, rows, q).split([len(r) for r in rows]) for q in (None, "int4")]
            spans = [(len(r.prompt), len(row) - 1) for r, row in zip(requests, rows, strict=True)]
            p, q = (
                (torch.cat([x[a:b] for x, (a, b) in zip(part, spans, strict=True)]) / temperature).softmax(1)
                for part in parts
            )
            most = float((1 - (p - q).abs().sum(1) / 2).mean())
            share = totals.accepted / totals.tokens
            found[f"{name} temperature {temperature}"] = {"kept": share, "optimum": most, "ratio": share / most}
    return found


WORK: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "coupling": coupling, "chain": chain, "self": self_drafts, "lookup": lookup,
    "large-batches": large_batches, "kept": kept, "look": look,
}  # fmt: skip


def main() -> None:
    """Run some of them, print and keep what they found."""
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=WORK, nargs="+")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--synthetic-acceptance", type=float, default=0.8, metavar="R")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "quire-peers")
    parser.add_argument("--output", type=Path, default=RESULTS / "speculation.json")
    args = parser.parse_args()
    rows = json.loads(args.output.read_text()) if args.output.exists() else {}
    for what in args.what:
        rows[what] = {"command": f"python -m benchmarks.speculation.drafts {what}"} | WORK[what](args)
        print(what, json.dumps(rows[what], indent=1))
        args.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
