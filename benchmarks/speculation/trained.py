"""Draft heads trained for SmolLM2 on dialogue that it wrote itself: tokens a step on dialogue of other topics.

    python -m benchmarks.speculation.trained                                    all methods
    python -m benchmarks.speculation.trained --method eagle3 --steps 150        one, trained as long as is said

The text is that of `benchmarks/common/dialogue.py`: answers at temperature 0.8 to questions on 35 topics. Heads learn
from it by `quire train-heads`. Tokens a step: of greedy answers, and of answers at temperature 0.8, to the first and
to the second question on the five other topics, each alone, the prompt's step not counted; always as many drafts as the
method has (`adaptive` off). The questions of both are made of the same templates. Time plays no part in any figure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.results import RESULTS, parser_of
from benchmarks.speculation.drafts import engine_of
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.model.disk.checkpoint import resolve
from quire.store.pull import ensure
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

HEADS = ("medusa", "eagle3")
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "self, 15 layers": {"method": "self", "layers": 15},
    "medusa": {"method": "medusa"},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
    "eagle3, tree of 16": {"method": "eagle3", "num_speculative_tokens": 4, "topk": 4, "num_draft_tokens": 16},
}


def dialogue(model: str, work: Path, held_out: bool) -> list[list[dict[str, str]]]:
    """Conversations, written to a file below `work` when it is missing."""
    file = work / f"dialogue-{'held-out' if held_out else 'train'}.jsonl"
    if not file.exists():
        words = [sys.executable, "-m", "benchmarks.common.dialogue", model, str(file)]
        subprocess.run([*words, *(["--held-out"] if held_out else [])], check=True)
    return [json.loads(line)["messages"] for line in file.read_text().splitlines()]


def train(model: str, work: Path, method: str, template: ChatTemplate, asked: Any) -> Path:
    """The folder of heads of `method`, trained when it is missing."""
    out = work / f"{method}-{asked.steps}x{asked.length}"
    if not (out / "config.json").exists():
        text = work / "dialogue.txt"
        rows = dialogue(model, work, held_out=False)
        text.write_text("".join(template.render(said, add_generation_prompt=False) for said in rows))
        words = [sys.executable, "-m", "quire", "train-heads", model, str(out), "--data", str(text), "--method", method]
        subprocess.run([*words, "--steps", str(asked.steps), "--length", str(asked.length), "--heads", "4"], check=True)
    return out


def prompts(template: ChatTemplate, told: list[list[dict[str, str]]]) -> list[list[int]]:
    """Every question of the conversations, with what was said before it."""
    asked = [said[: i + 1] for said in told for i, one in enumerate(said) if one["role"] == "user"]
    return [template.encode(messages) for messages in asked]


def answers(engine: Engine, rows: list[list[int]], tokens: int, temperature: float) -> tuple[list[list[int]], int]:
    """Answers to `rows`, one at a time, and the steps they took behind the prompts'."""
    params = SamplingParams(max_tokens=tokens, temperature=temperature)
    found, steps, eos = list[list[int]](), 0, engine.info().eos_token_ids
    for i, row in enumerate(rows):
        request = Request(id=str(i), prompt=tuple(row), params=params, seed=i, arrival=0.0, eos_token_ids=eos)
        engine.submit(request)
        made = list[int]()
        while engine.has_work:
            for output in engine.step():
                assert output.error is None, output.error
                steps += bool(made) and bool(output.tokens)
                made += output.tokens
        found.append(made)
    return found, steps


def measure(model: str, speculation: dict[str, Any], rows: list[list[int]], tokens: int, plain: Any) -> dict[str, Any]:
    """Tokens a step of both kinds of answers, which are those of `plain` decoding."""
    asked = speculation | {"adaptive": False}
    found: dict[str, Any] = {"speculative_config": asked | {"model": "heads"} if "model" in asked else asked}
    for temperature, want in plain.items():
        engine = engine_of(model, asked, max_num_seqs=1, enable_prefix_caching=False)
        made, steps = answers(engine, rows, tokens, temperature)
        assert made == want, "speculation changed what came out"
        assert engine.speculator is not None
        totals = engine.speculator.totals
        found[f"temperature {temperature}"] = {
            "tokens_per_step": sum(len(row) - 1 for row in made) / steps,
            "tokens": sum(map(len, made)),
            "drafts": totals.drafts,
            "accepted_per_draft": totals.accepted / max(1, totals.drafts),
            "kept_by_place": [kept / max(1, totals.drafts) for kept in totals.accepted_per_pos],
        }
    return found


def main() -> None:
    """Train what is missing, measure, print, and keep each method as soon as it is there."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2", help="a name that quire knows, a folder or a file")
    parser.add_argument("--method", choices=METHODS, nargs="+", default=[*METHODS])
    parser.add_argument("--steps", type=int, default=150, help="of training, four rows each")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--questions", type=int, default=40, help="that are answered, of 80")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer at most")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "quire-peers" / "smollm2-heads")
    parser.add_argument("--output", type=Path, default=RESULTS / "trained_drafts.json")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    model = ensure(args.model)
    template = ChatTemplate.from_folder(resolve(model), Tokenizer.from_folder(resolve(model)))
    assert template is not None, f"{model} has no chat template"
    told = dialogue(model, args.work, held_out=True)
    rows = prompts(template, told[:: max(1, 2 * len(told) // args.questions)])[: args.questions]
    engine = engine_of(model, None, max_num_seqs=1, enable_prefix_caching=False)
    plain = {}
    for temperature in (0.0, 0.8):
        plain[temperature], steps = answers(engine, rows, args.tokens, temperature)
        assert steps == sum(len(row) - 1 for row in plain[temperature]), "a step of plain decoding is a token"
    found = json.loads(args.output.read_text()) if args.output.exists() else {}
    for name in args.method:
        asked = METHODS[name]
        if asked["method"] in HEADS:
            asked = asked | {"model": str(train(model, args.work, asked["method"], template, args))}
        row = measure(model, asked, rows, args.tokens, plain)
        if asked["method"] in HEADS:
            row |= {"trained_steps": args.steps, "trained_tokens": args.steps * 4 * args.length}
        found[name] = row
        print(name, json.dumps(row, indent=1), flush=True)
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
