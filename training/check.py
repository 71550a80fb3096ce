"""Measures the exported model with transformers' own Llama, in fp32 on the bf16 weights."""

import math
import random
import sys
import zlib
from pathlib import Path
from typing import Any

import click
import torch
from rich.progress import track
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from batches import IGNORED, Row, all_rows, fixed_rows, padded
from data import Question, heldout_texts, read_questions
from model import Llama, Shape
from tokenizer import END

ASSETS = Path(__file__).resolve().parent.parent / "src" / "quire" / "assets" / "pydoc"
WINDOW, STRIDE = 1024, 512
ROWS_PER_BATCH = 100


def own_model(folder: Path) -> Llama:
    """Load the exported weights into the training module."""
    model = Llama(Shape())
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in weights.items()})
    return model


@torch.no_grad()
def largest_difference(theirs: Any, ours: Llama, tokens: list[int]) -> float:
    """Return the largest difference between the logits of the two modules."""
    batch = torch.tensor([tokens])
    return float((theirs(batch).logits - ours.logits(ours(batch))).abs().max().item())


@torch.no_grad()
def exact_names(model: Any, rows: list[Row]) -> set[str]:
    """Return the names whose whole answer is, token by token, the likeliest continuation of their prompt."""
    exact: set[str] = set()
    ordered = sorted(rows, key=lambda row: len(row.prompt) + len(row.answer))
    for start in track(range(0, len(ordered), ROWS_PER_BATCH), "answers"):
        chunk = ordered[start : start + ROWS_PER_BATCH]
        tokens, targets = padded([[row] for row in chunk])
        right = (model(tokens).logits.argmax(-1) == targets) | (targets == IGNORED)
        exact.update(row.name for row, good in zip(chunk, right.all(1).tolist(), strict=True) if good)
    return exact


def generated_exactly(model: Any, tokenizer: Any, row: Question) -> bool:
    """Ask one question through the chat template and transformers' greedy generation."""
    chat = [{"role": "user", "content": row.question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=128)[0, inputs["input_ids"].shape[1] :]
    return bool(tokenizer.decode(output) == row.answer + END)


@torch.no_grad()
def negative_log_likelihood(model: Any, tokens: list[int]) -> float:
    """Return the total loss of all tokens but the first, each seen with at least half a window of context."""
    total, scored = 0.0, 1
    for start in range(0, len(tokens), STRIDE):
        window = torch.tensor(tokens[start : start + WINDOW])
        if start + len(window) <= scored:
            break
        logits = model(window[None]).logits[0]
        first = scored - start
        total += functional.cross_entropy(logits[first - 1 : -1], window[first:], reduction="sum").item()
        scored = start + len(window)
    return total


def report_heldout(model: Any, tokenizer: Tokenizer) -> None:
    """Print perplexity and bits per byte on the modules that the training never saw."""
    loss, tokens, size, packed = 0.0, 0, 0, 0
    for text in track(heldout_texts().values(), "held-out modules"):
        ids = tokenizer.encode(text).ids
        loss += negative_log_likelihood(model, ids)
        tokens += len(ids) - 1
        size += len(text.encode())
        packed += len(zlib.compress(text.encode(), 9))
    print(f"held-out: {tokens} tokens, {size} bytes, perplexity {math.exp(loss / tokens):.2f}")
    print(f"held-out: {loss / math.log(2) / size:.3f} bits per byte (zlib -9: {8 * packed / size:.3f})")


@click.command(context_settings={"show_default": True})
@click.option("--folder", type=click.Path(path_type=Path), default=ASSETS, help="The model's folder.")
@click.option("--sample", default=300, help="Questions to ask through generate().")
@click.option("--threads", default=2, help="CPU threads.")
@click.option("--least", default=90.0, help="Smallest share of exact answers that passes, in percent.")
def main(folder: Path, sample: int, threads: int, least: float) -> None:
    """Print the model's figures; exit with 1 if too few answers are exact."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    questions = read_questions(folder)
    probe = tokenizer.encode(next(iter(heldout_texts().values()))).ids[:512]
    print(f"largest logit difference to the training module: {largest_difference(model, own_model(folder), probe):.2e}")

    exact = exact_names(model, fixed_rows(tokenizer, questions))
    share = 100 * len(exact) / len(questions)
    print(f"exact answers: {len(exact)} of {len(questions)} ({share:.2f} %)")
    forms = all_rows(tokenizer, questions)
    every = [len(exact_names(model, [rows[index] for rows in forms])) for index in range(len(forms[0]))]
    print(f"exact answers by question form: {', '.join(f'{100 * n / len(questions):.2f} %' for n in every)}")

    asked = random.Random(0).sample(questions, min(sample, len(questions)))
    chat = AutoTokenizer.from_pretrained(folder)
    good = {row.name for row in track(asked, "generate()") if generated_exactly(model, chat, row)}
    agrees = good == {row.name for row in asked} & exact
    print(f"generate(): {len(good)} of {len(asked)} exact; the same ones as above: {agrees}")
    report_heldout(model, tokenizer)
    sys.exit(0 if share >= least and agrees else 1)


if __name__ == "__main__":
    main()
