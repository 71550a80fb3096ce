"""Greedy answers of a pulled GGUF model to questions, quire's beside llama.cpp's, and which is nearer to float32's.

    python -m benchmarks.compress.greedy_answers                 50 questions to smollm2 (quire pull smollm2)
    python -m benchmarks.compress.greedy_answers --questions 10 --tokens 16
    python -m benchmarks.compress.greedy_answers --activations int16

quire answers by its own chat template, as `quire run` does. llama.cpp reads prompt and answer in one batch: its greedy
answer is quire's up to the first token that is not its own likeliest. float32 is transformers' model of the same file,
whose codes it turns to float32. KL(float32 || engine) is in nats, the mean over all tokens of the answers. Where the
answers part, `float32 takes` says whose token float32 finds likeliest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.results import keep, parser_of
from benchmarks.compress.format_quality import run_quire
from quire.bench.suite.engines import FOREIGN
from quire.bench.suite.environments import environment
from quire.bench.suite.process import Command, Process
from quire.core.machine import processor
from quire.core.params import SamplingParams
from quire.engine.llm import LLM
from quire.store.names import local_path

QUESTIONS = Path(__file__).parents[2] / "src" / "quire" / "assets" / "questions" / "answers.jsonl"


class Answer(NamedTuple):
    """Ids of a prompt, and of quire's answer."""

    question: str
    prompt: list[int]
    ids: list[int]

    @property
    def predicted(self) -> slice:
        """The rows of logits over prompt and answer that predict the answer."""
        return slice(len(self.prompt) - 1, len(self.prompt) + len(self.ids) - 1)


def answers_of(model: Path, questions: list[str], tokens: int, activations: str) -> list[Answer]:
    """quire's greedy answers, as `quire run` gives them."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    with LLM(model=str(model), activations=activations) as llm:
        asked = [[{"role": "user", "content": question}] for question in questions]
        outputs = llm.chat(asked, params)  # type: ignore[arg-type]
    return [
        Answer(question, list(output.prompt_token_ids), list(output.outputs[0].token_ids))
        for question, output in zip(questions, outputs, strict=True)
    ]


def llama_cpp_logits(work: Path, model: Path, rows: list[list[int]]) -> list[Tensor]:
    """Logits [len(row), vocabulary] f32 of llama.cpp after every token."""
    env, out = environment(work, "llama"), work / "logits.npy"
    words = [env.python, str(FOREIGN / "peer_llama_cpp.py"), str(model), "2", "1"]
    process = Process("llama.cpp", Command(words, env.variables), work / "answers.log")
    found = []
    for row in rows:
        process.ask({"do": "logits", "tokens": row, "out": str(out)})
        found.append(torch.from_numpy(np.load(out)))
    process.close()
    out.unlink()
    return found


def float32_logits(model: Path, rows: list[list[int]]) -> list[Tensor]:
    """The same of transformers' model in float32.

    `from_pretrained(gguf_file=)` asks for accelerate, which only places tensors; the reader below it does not.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(model.parent, gguf_file=model.name)
    loaded = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(model), return_tensors=True, model_to_load=loaded)["tensors"]
    missing = loaded.load_state_dict(tensors, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    loaded.tie_weights()
    with torch.inference_mode():
        return [loaded(torch.tensor([row])).logits[0] for row in rows]


def divergence(exact: Tensor, found: Tensor) -> Tensor:
    """KL(exact || found) of each row, in nats."""
    a, b = exact.log_softmax(-1), found.log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1).clamp_min(0).double()


def compare(answer: Answer, ours: Tensor, theirs: Tensor, exact: Tensor) -> dict[str, object]:
    """Where the answers part, if they do, and how far both engines are from float32. Logits of the answer's tokens."""
    ids, other = torch.tensor(answer.ids), theirs.argmax(-1)
    row: dict[str, object] = {
        "question": answer.question,
        "tokens": len(answer.ids),
        "kl": float(divergence(exact, ours).mean()),
        "kl_llama_cpp": float(divergence(exact, theirs).mean()),
    }
    apart = (ids != other).nonzero()
    if len(apart):
        at = int(apart[0])
        likeliest = int(exact[at].argmax())
        takes = {int(ids[at]): "quire's", int(other[at]): "llama.cpp's"}.get(likeliest, "neither")
        row |= {"parts_at": at, "float32_takes": takes}
    return row


def main() -> None:
    """Print a line for each answer that differs, and the counts; keep them in `benchmarks/results`."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--activations", default="auto", help="of quire, as its flag of that name")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "quire-peers")
    args: argparse.Namespace = parser.parse_args()
    model = local_path(args.model)
    questions = [json.loads(line)["question"] for line in QUESTIONS.read_text().splitlines()[: args.questions]]
    answers = answers_of(model, questions, args.tokens, args.activations)
    rows = [answer.prompt + answer.ids for answer in answers]
    ours = run_quire(model, {"activations": args.activations}, rows).logits
    theirs, exact = llama_cpp_logits(args.work, model, rows), float32_logits(model, rows)
    found = [
        compare(answer, *(logits[answer.predicted] for logits in three))
        for answer, *three in zip(answers, ours, theirs, exact, strict=True)
    ]
    apart = [row for row in found if "parts_at" in row]
    for row in apart:
        print(f"token {row['parts_at']:>3}: float32 takes {row['float32_takes']:12} {row['question']}")
    weights = [row["tokens"] for row in found]
    total = {
        "model": args.model, "activations": args.activations, "processor": processor(),
        "questions": len(found), "same": len(found) - len(apart),
        **{f"float32 takes {who}": sum(row["float32_takes"] == who for row in apart)
           for who in ("quire's", "llama.cpp's", "neither")},
        "kl": float(np.average([row["kl"] for row in found], weights=weights)),
        "kl_llama_cpp": float(np.average([row["kl_llama_cpp"] for row in found], weights=weights)),
    }  # fmt: skip
    print(json.dumps(total, indent=1))
    keep("greedy_answers", {f"{args.model}, activations {args.activations}": total | {"answers": found}})


if __name__ == "__main__":
    main()
