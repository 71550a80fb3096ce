"""Text to learn from that a teacher writes, through the engine, with its reasons where these are wanted.

Answers with rationales: Hsieh et al. 2023 (Distilling step-by-step). The rationale is asked for first (Kojima et al.
2022), then the answer that follows from it; a student learns each as a task of its own (`text.Texts`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire.core.errors import BadRequest, ConfigError
from quire.core.params import SamplingParams
from quire.engine.llm import LLM

REASONING_PROMPT = "Let's think step by step."
ANSWER_PROMPT = "Therefore, the answer alone is:"
PROMPTS_AT_ONCE = 64
"""Prompts whose answers are written together: what is lost when it is stopped."""


def write_answers(
    llm: LLM,
    prompts: Sequence[str],
    out: Path,
    params: SamplingParams,
    rationales: bool,
    report: Callable[[int], None],
) -> None:
    """Write a line of JSON for each of `prompts` to `out`: prompt, completion and, with `rationales`, rationale.

    Through the chat template where the model has one. What stopped goes on after the lines that are there; `out` gets
    its name when it is whole. `report(done)` now and then. `ConfigError` where lines are of other prompts or options.
    """
    part = out.with_suffix(".part")
    done = _lines(part, prompts, rationales)
    report(len(done))
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("w", encoding="utf-8") as file:
        file.writelines(done)
        for at in range(len(done), len(prompts), PROMPTS_AT_ONCE):
            asked = prompts[at : at + PROMPTS_AT_ONCE]
            for entry in _answers(llm, asked, params, rationales):
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            file.flush()
            report(at + len(asked))
    part.replace(out)


def _lines(part: Path, prompts: Sequence[str], rationales: bool) -> list[str]:
    """Whole lines of a file that was begun."""
    if not part.is_file():
        return []
    lines = [line for line in part.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    for number, line in enumerate(lines):
        entry = json.loads(line)
        if number >= len(prompts) or entry["prompt"] != prompts[number] or ("rationale" in entry) != rationales:
            raise ConfigError(f"{part}: line {number + 1} is of other prompts or options; remove it, or give another")
    return lines


def _answers(llm: LLM, prompts: Sequence[str], params: SamplingParams, rationales: bool) -> list[dict[str, str]]:
    if not rationales:
        found = _generate(llm, [[prompt] for prompt in prompts], params)
        return [{"prompt": p, "completion": text} for p, text in zip(prompts, found, strict=True)]
    reasons = _generate(llm, [[f"{prompt}\n{REASONING_PROMPT}"] for prompt in prompts], params)
    turns = [
        [f"{prompt}\n{REASONING_PROMPT}", reason, ANSWER_PROMPT]
        for prompt, reason in zip(prompts, reasons, strict=True)
    ]
    return [
        {"prompt": p, "completion": text, "rationale": reason}
        for p, text, reason in zip(prompts, _generate(llm, turns, params), reasons, strict=True)
    ]


def _generate(llm: LLM, turns: Sequence[Sequence[str]], params: SamplingParams) -> list[str]:
    """What follows on each: turns of a user and the model by turns, or text after text where there is no template."""
    try:
        template = llm.chat_template
    except BadRequest:
        template = None
    asked: list[Any] = []
    for each in turns:
        if template is None:
            asked.append("\n".join(each) + "\n")
        else:
            chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(each)]
            asked.append({"prompt_token_ids": template.encode(chat)})
    return [output.outputs[0].text.strip() for output in llm.generate(asked, params, use_tqdm=False)]
