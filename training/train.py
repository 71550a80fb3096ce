"""Trains the pydoc model from nothing: first on the standard library's text, then on questions about it."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from batches import BLOCK, BLOCKS_PER_BATCH, ROW_LENGTHS, CodeBlocks, all_rows, fixed_rows, question_batches
from data import code_texts, heldout_texts, read_questions
from measure import heldout_loss, wrong_names
from model import Llama, Shape, export_model
from optim import Optimizer, rate_factor
from picture import draw_losses
from tokenizer import END, END_OF_TEXT, save_tokenizer, token_id, train_tokenizer

HERE = Path(__file__).resolve().parent
ASSETS = HERE.parent / "src" / "quire" / "assets" / "pydoc"
CHECKPOINT = HERE / "runs" / "checkpoint.safetensors"
QUESTIONS = 4000
CODE_BLOCKS_BESIDE_QUESTIONS = 3
PASSES_PER_CHECK = 4
SAVE_SECONDS = 300


@dataclass
class Progressed:
    """Where a run stands; everything but the tensors."""

    seed: int
    step: int = 0
    passes: int = 0
    seconds: float = 0.0
    code_blocks: int = 0
    question_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    history: list[dict[str, float | str]] = field(default_factory=list)


class Run:
    """A model in training, with its data."""

    def __init__(self, minutes: float, code_share: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.budget, self.code_share = minutes * 60, code_share
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer, texts = prepare()
        self.code = CodeBlocks(self.tokenizer, texts, seed)
        self.questions = read_questions(ASSETS)
        self.rows = all_rows(self.tokenizer, self.questions)
        self.fixed = fixed_rows(self.tokenizer, self.questions)
        self.heldout = CodeBlocks(self.tokenizer, list(heldout_texts().values()), seed).blocks[:8]
        self.model = Llama(Shape()).to(self.device)
        self.optimizer = Optimizer(self.model)
        self.at = Progressed(seed)
        self.saved = time.monotonic()

    @property
    def progress(self) -> float:
        """The share of the time budget that is spent."""
        return self.at.seconds / self.budget

    def backward(self, batch: tuple[Tensor, Tensor]) -> float:
        """Add one batch's gradients and return its loss; the head runs on positions with a target only."""
        tokens, targets = (part.to(self.device) for part in batch)
        wanted = targets.flatten() >= 0
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden = self.model(tokens).flatten(0, 1)[wanted]
            scores = self.model.logits(hidden)
        loss = functional.cross_entropy(scores.float(), targets.flatten()[wanted])
        torch.autograd.backward(loss)
        return loss.item()

    def finish_step(self, losses: dict[str, float], started: float) -> None:
        """Apply the gradients and book the step."""
        self.optimizer.step(rate_factor(self.progress, self.code_share))
        self.at.step += 1
        self.at.seconds += time.monotonic() - started
        if self.at.step % 10 == 0:
            for kind, loss in losses.items():
                self.note(kind, loss)
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save()

    def note(self, kind: str, value: float) -> None:
        """Record a figure for the picture and the log."""
        minutes = round(self.at.seconds / 60, 3)
        self.at.history.append({"kind": kind, "minutes": minutes, "step": self.at.step, "value": round(value, 4)})

    def code_step(self) -> None:
        """Learn from four blocks of the standard library's text."""
        started = time.monotonic()
        length = ROW_LENGTHS[self.at.step % len(ROW_LENGTHS)]
        loss = self.backward(self.code.batch(self.at.code_blocks, BLOCKS_PER_BATCH, length))
        self.at.code_blocks += BLOCKS_PER_BATCH
        self.finish_step({"code": loss}, started)

    def question_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Learn from a batch of questions, and from code beside it: with much less code, code is soon forgotten."""
        started = time.monotonic()
        loss = self.backward(batch)
        self.at.question_tokens += batch[0].numel()
        length = ROW_LENGTHS[self.at.step % len(ROW_LENGTHS)]
        code_loss = self.backward(self.code.batch(self.at.code_blocks, CODE_BLOCKS_BESIDE_QUESTIONS, length))
        self.at.code_blocks += CODE_BLOCKS_BESIDE_QUESTIONS
        self.finish_step({"questions": loss, "code": code_loss}, started)

    def check(self) -> None:
        """Measure exactness over the whole question set and the loss on unseen modules."""
        started = time.monotonic()
        wrong = wrong_names(self.model, self.fixed, self.device)
        self.note("exact", 100 * (1 - len(wrong) / len(self.fixed)))
        self.note("heldout", heldout_loss(self.model, self.heldout, self.device))
        self.at.wrong = sorted(wrong) if self.progress > 0.6 else []
        self.at.seconds += time.monotonic() - started
        exact, heldout = (row["value"] for row in self.at.history[-2:])
        minutes = self.at.seconds / 60
        print(f"{minutes:.1f} min  step {self.at.step}  exact {exact} %  held-out loss {heldout}", flush=True)

    def save(self) -> None:
        """Write the checkpoint and a usable model, each under its final name only when complete."""
        tensors = {f"model.{name}": value.detach() for name, value in self.model.named_parameters()}
        tensors |= {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        tensors = {name: value.contiguous().cpu() for name, value in tensors.items()}
        CHECKPOINT.parent.mkdir(exist_ok=True)
        partial = CHECKPOINT.with_suffix(".partial")
        save_file(tensors, partial, metadata={"state": json.dumps(asdict(self.at))})
        partial.replace(CHECKPOINT)
        export_model(self.model, ASSETS, token_id(self.tokenizer, END), token_id(self.tokenizer, END_OF_TEXT))
        draw_losses(self.at.history, HERE / "loss.png")
        self.saved = time.monotonic()

    def load(self) -> None:
        """Take up the checkpoint."""
        with safe_open(CHECKPOINT, "pt") as file:
            self.at = Progressed(**json.loads(file.metadata()["state"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        self.model.load_state_dict(weights)
        self.optimizer.load({n.removeprefix("optimizer."): t for n, t in tensors.items() if n.startswith("optimizer.")})


def prepare() -> tuple[Tokenizer, list[str]]:
    """Write the question set and the tokenizer unless they are there, and return the code texts."""
    ASSETS.mkdir(parents=True, exist_ok=True)
    texts = code_texts()
    if not (ASSETS / "questions.jsonl").exists():
        # Libraries replace a few names of the standard library when imported, so a fresh interpreter chooses.
        subprocess.run([sys.executable, HERE / "data.py", ASSETS, str(QUESTIONS)], check=True)
    if not (ASSETS / "tokenizer.json").exists():
        answers = [f"{row.name}\n{row.answer}\n" for row in read_questions(ASSETS)]
        save_tokenizer(train_tokenizer(texts + answers * 3), ASSETS, Shape().max_position_embeddings)
    return Tokenizer.from_file(str(ASSETS / "tokenizer.json")), texts


@click.command(context_settings={"show_default": True})
@click.option("--minutes", default=60.0, help="Time to train, resumed runs counted in.")
@click.option("--code-share", default=0.23, help="Share of the time for code before questions begin.")
@click.option("--resume/--no-resume", help="Continue from the last checkpoint.")
@click.option("--threads", default=2, help="CPU threads.")
@click.option("--seed", default=1, help="Seed of the weights and of every order.")
def main(minutes: float, code_share: float, resume: bool, threads: int, seed: int) -> None:
    """Train within a time budget; the learning rate reaches zero when the time is up."""
    torch.set_num_threads(threads)
    run = Run(minutes, code_share, seed)
    if resume and CHECKPOINT.exists():
        run.load()
    else:
        run.save()
    print(f"{len(run.code.blocks) * BLOCK} code tokens, {len(run.rows)} questions, {run.device}", flush=True)
    share = TextColumn("{task.percentage:.0f} %")
    with Progress(TextColumn("{task.description}"), BarColumn(), share, TimeRemainingColumn()) as bar:
        task = bar.add_task("code", total=run.budget)
        while run.progress < code_share:
            run.code_step()
            bar.update(task, completed=run.at.seconds)
        bar.update(task, description="questions")
        while run.progress < 1:
            if run.at.passes % PASSES_PER_CHECK == 0:
                run.check()
            for batch in question_batches(run.rows, set(run.at.wrong), seed + run.at.passes):
                run.question_step(batch)
                bar.update(task, completed=run.at.seconds)
                if run.progress >= 1:
                    break
            run.at.passes += 1
    run.check()
    run.save()


if __name__ == "__main__":
    main()
