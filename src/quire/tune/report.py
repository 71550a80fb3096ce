"""What a search found, for people: a table, and the file that `quire serve --config` takes, with the reasons."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.core.errors import ConfigError
from quire.figures.changes import Change, changed, with_text
from quire.tune.journal import shown
from quire.tune.objective import Objective
from quire.tune.search import GAIN, CandidateTrial, TuneResult
from quire.tune.space import QUALITY, Candidate, Value, usual

MARK = "# Written by quire tune"
SHOWN = 12
"""Rows of the table."""
TEXTS = {True: "on", False: "off"}


def named(name: str, value: Value) -> str:
    """An option with its value, short."""
    told = shown(value)
    return f"{name.replace('_', '-')} {TEXTS[told] if isinstance(told, bool) else told}"


def difference(candidate: Candidate) -> str:
    """What is not the default."""
    changed = [named(name, value) for name, value in candidate.values if value != usual(name)]
    return ", ".join(changed) or "the defaults"


def _columns(objective: Objective) -> list[str]:
    return list(dict.fromkeys((objective.metric, f"ttft_ms_{objective.at}", f"tpot_ms_{objective.at}")))


def _plain(metric: str) -> str:
    return metric.replace("_per_s", "/s").replace("_", " ")


def print_outcome(outcome: TuneResult, console: Console) -> None:
    """The table of what was measured, best first, and what became of the others."""
    objective = outcome.objective
    table = Table(title=f"measured; {'more' if objective.rises else 'less'} {_plain(objective.metric)} is better")
    for name in _columns(objective):
        table.add_column(_plain(name), justify="right")
    table.add_column("runs", justify="right")
    table.add_column("what is not the default", overflow="fold")
    for trial in outcome.trials[:SHOWN]:
        told = [f"{trial.found[name]:,.1f}" if name in trial.found else "-" for name in _columns(objective)]
        mark = "" if objective.meets(trial.found) else "  (misses a target)"
        chosen = "* " if trial is outcome.best else ""
        table.add_row(*told, str(len(trial.samples)), chosen + difference(trial.candidate) + mark)
    console.print(table)
    console.print(account(outcome))
    for reason, count in outcome.space.refused.most_common():
        console.print(f"  {count:,} refused: {reason}", markup=False)


def won(outcome: TuneResult, bytes_of: Callable[[Candidate], int]) -> list[Change]:
    """Compare the best with what runs untuned, the candidate that changes least; [] where they are one.

    `bytes_of`: memory that a candidate takes beside the KV cache, as predicted.
    """
    best, objective = outcome.best, outcome.objective
    usual_one = min(outcome.trials, key=lambda trial: trial.candidate.changes, default=None)
    if best is None or usual_one is None or best is usual_one:
        return []
    names = dict.fromkeys((*_columns(objective), "output_tokens_per_s"))
    found = [
        changed(
            _plain(name), usual_one.found[name], best.found[name], ",.1f", rises=name.endswith("_per_s"), least=GAIN
        )
        for name in names
        if name in usual_one.found and name in best.found
    ]
    before, after = (bytes_of(trial.candidate) for trial in (usual_one, best))
    memory = changed("memory beside the KV cache", before, after)
    return [*found, with_text(memory, f"{before / 2**20:,.1f} MiB", f"{after / 2**20:,.1f} MiB")]


def account(outcome: TuneResult) -> str:
    """How the search came to its end, in one line."""
    runs = sum(len(trial.samples) for trial in outcome.trials)
    refused = outcome.space.refused.total()
    more = f"; {len(outcome.trials) - SHOWN} more were measured" if len(outcome.trials) > SHOWN else ""
    return (
        f"{outcome.predicted:,} configurations predicted, {refused:,} refused, {len(outcome.trials)} measured "
        f"in {runs} runs, {outcome.finalists} of them in turns; predictions, corrected by what was measured, "
        f"were off by {outcome.margin:.0%} (2 sigma){more}; {outcome.seconds:.0f} s"
    )


def config_text(outcome: TuneResult, given: dict[str, Any], asked: str) -> str:
    """TOML: options that were given, and those that were found, each with what its other values gave.

    `asked`: load and targets in words.
    """
    best = outcome.best
    if best is None:
        raise ConfigError("nothing was measured: there is no configuration to write")
    objective = outcome.objective
    lines = [f"{MARK}: the best of what was measured for {asked}.", f"# {account(outcome)}."]
    found = ", ".join(
        f"{name} {best.found[name]:,.4g}" for name in dict.fromkeys((objective.metric, *objective.targets))
    )
    lines.append(f"# Medians of {len(best.samples[1:] or best.samples)} runs in one process, without HTTP: {found}.")
    if not outcome.meets:
        lines.append("# IT MISSES A TARGET: nothing that was measured keeps all of them.")
    if outcome.stopped:
        lines.append(f"# The search did not end: {outcome.stopped}.")
    lines += [f"{name.replace('_', '-')} = {toml(value)}" for name, value in given.items() if value is not None]
    for name, value in best.candidate.values:
        why = reasons(outcome, best, name)
        line = f"{name.replace('_', '-')} = {toml(value)}" if value is not None else f"# {name.replace('_', '-')}: none"
        changes = ["changes answers"] if name in QUALITY and value != usual(name) else []
        lines.append("  # ".join((line, "; ".join((*changes, why)))) if why or changes else line)
    return "\n".join(lines) + "\n"


def reasons(outcome: TuneResult, best: CandidateTrial, name: str) -> str:
    """What other values of one option give beside this configuration: measured, or expected."""
    objective, told = outcome.objective, []
    measured = {trial.candidate.values: trial.found for trial in outcome.trials}
    here = dict(best.candidate.values)
    for value in outcome.space.axes[name]:
        if value == here[name]:
            continue
        values = tuple((each, value if each == name else own) for each, own in best.candidate.values)
        expected = {candidate.values: guess for candidate, guess in outcome.expected.items()}
        found = measured.get(values) or expected.get(values)
        if found is None:
            told.append(f"{shown(value)}: refused")
            continue
        change = objective.value(found) / objective.value(best.found) - 1
        far = "" if objective.meets(found) else ", misses a target"
        told.append(f"{shown(value)}: {'' if values in measured else 'expected '}{change:+.1%}{far}")
    return ", ".join(told)


def toml(value: Any) -> str:
    """A TOML value; its strings are JSON's but for one character."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Sequence):
        return f"[{', '.join(map(toml, value))}]"
    return repr(value)
