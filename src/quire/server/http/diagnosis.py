"""What is wrong with a server now, in sentences: rules with thresholds over the last minutes of its `History`.

Each rule looks at the moments of one model, or of the server, and gives a `Finding` or None. The live page shows the
worst one on top, and the others below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from quire.server.http.history import EVERY_SECONDS, History
from quire.server.http.samples import Samples, samples_of

QUEUE_WAITING, QUEUE_GROWTH, QUEUE_SECONDS = 4, 1.5, 60.0
"""A queue grows where so many wait on average, and so many times as many as in the time before."""
KV_FULL, RECENT_SECONDS = 0.95, 120.0
GRAMMAR_SECONDS = 15.0
"""Ordinary grammars are read in milliseconds: one that is seen in every moment of this time is a slow one."""
PREFIX_SECONDS, PREFIX_BEFORE, PREFIX_FALL, PREFIX_TOKENS = 180.0, 0.3, 0.5, 2000
"""Prefix hits are low where they were at least `PREFIX_BEFORE` and fell to `PREFIX_FALL` of that."""
DRAFTS_LOW, DRAFT_TOKENS = 0.2, 500
ERRORS_SHARE, ERRORS_LEAST = 0.05, 2
TENANT_SHARE, TENANT_TOKENS, TENANT_SECONDS = 0.8, 1000, 300.0
RESTART_SECONDS = 900.0

Level = Literal["bad", "warn"]


class Finding(msgspec.Struct, kw_only=True):
    """Something that is wrong: `text` says what, `advice` what to do. `since`: seconds ago it began; null: unknown.

    `rule` is a stable name for programs. `model`: "" = of the whole server.
    """

    rule: str
    level: Level
    text: str
    advice: str
    model: str = ""
    since: float | None = None


class Diagnosis(msgspec.Struct, kw_only=True):
    """Response of /dashboard/diagnosis. `sentence`: the worst of the findings, or that all is well."""

    level: Literal["bad", "warn", "good"]
    sentence: str
    findings: list[Finding]


Rule = Callable[[Samples], Finding | None]


def engine_gone(samples: Samples) -> Finding | None:
    """The engine does not answer."""
    if samples.last.healthy:
        return None
    since = samples.since(lambda each: not each.healthy)
    return Finding(
        rule="engine-gone",
        level="bad",
        text="The engine does not answer; it is being started again, or is gone",
        advice="Last incidents and the server's log say why it died.",
        since=since,
    )


def engine_restarts(samples: Samples) -> Finding | None:
    """The engine died and came back."""
    times = samples.grown("restarts", RESTART_SECONDS)
    if not times:
        return None
    ago = samples.ago("restarts")
    return Finding(
        rule="engine-restarts",
        level="bad" if times > 1 else "warn",
        text=f"The engine was started again {_times(times)} in the last 15 minutes, {_ago(ago)} the last time",
        advice="Last incidents and the server's log say why it died; memory that ran out is the usual reason.",
        since=ago,
    )


def cache_full(samples: Samples) -> Finding | None:
    """The KV cache is full, and sequences are thrown out of it or wait for it."""
    preempted = samples.grown("preemptions", RECENT_SECONDS)
    full = samples.mean("kv", 30.0) >= KV_FULL
    waiting = round(samples.last.waiting)
    advice = (
        "Enlarge it (--kv-cache-memory-bytes), halve it per token (--kv-cache-dtype int8), or run fewer sequences at "
        "a time (--max-num-seqs)."
    )
    if preempted:
        state = "is full" if full else "was full"
        text = f"The KV cache {state}: {_number(preempted)} sequences were preempted in the last 2 minutes"
        return Finding(rule="cache-full", level="bad", text=text, advice=advice, since=samples.ago("preemptions"))
    if full and waiting:
        text = f"The KV cache is full, and {waiting} sequences wait for room in it"
        since = samples.since(lambda each: each.kv >= KV_FULL)
        return Finding(rule="cache-full", level="warn", text=text, advice=advice, since=since)
    return None


def queue_grows(samples: Samples) -> Finding | None:
    """More requests come than are done."""
    now = samples.mean("waiting", QUEUE_SECONDS)
    before = samples.mean("waiting", 2 * QUEUE_SECONDS, QUEUE_SECONDS)
    waiting = round(samples.last.waiting)
    if now < QUEUE_WAITING or waiting < QUEUE_WAITING or now < QUEUE_GROWTH * before:
        return None
    return Finding(
        rule="queue-grows",
        level="bad",
        text=f"The queue grows: {waiting} sequences wait, {_number(before)} on average a minute before",
        advice="More come than this machine does: add a replica, or refuse earlier (--max-num-queued-reqs, keys).",
        since=samples.since(lambda each: each.waiting > 0),
    )


def queue_stays(samples: Samples) -> Finding | None:
    """Requests have waited all of the last minutes."""
    since = samples.since(lambda each: each.waiting >= 1)
    if since < RECENT_SECONDS or samples.mean("waiting", RECENT_SECONDS) < QUEUE_WAITING:
        return None
    return Finding(
        rule="queue-stays",
        level="warn",
        text=f"Sequences have been waiting for {_duration(since)} without a break, {round(samples.last.waiting)} now",
        advice="Raise --max-num-seqs where the KV cache has room, or add a replica.",
        since=since,
    )


def grammars_slow(samples: Samples) -> Finding | None:
    """Grammars or JSON schemas take seconds to be read."""
    since = samples.since(lambda each: each.grammars >= 1)
    if since < GRAMMAR_SECONDS:
        return None
    return Finding(
        rule="grammars-slow",
        level="warn",
        text=f"Grammars are slow: requests have been waiting for their schemas to be read for {_duration(since)}",
        advice="Make the JSON schemas or grammars simpler; the same one is read once only.",
        since=since,
    )


def prefix_hits_low(samples: Samples) -> Finding | None:
    """The prefix cache finds much less than it did."""
    looked = samples.grown("looked", PREFIX_SECONDS)
    looked_before = samples.grown("looked", RESTART_SECONDS, PREFIX_SECONDS)
    if min(looked, looked_before) < PREFIX_TOKENS:
        return None
    share = samples.grown("found", PREFIX_SECONDS) / looked
    before = samples.grown("found", RESTART_SECONDS, PREFIX_SECONDS) / looked_before
    if before < PREFIX_BEFORE or share > PREFIX_FALL * before:
        return None
    return Finding(
        rule="prefix-hits-low",
        level="warn",
        text=f"Prefix hits are low: {share:.0%} of prompt tokens in the last 3 minutes, {before:.0%} before",
        advice="A changed system prompt, a date at its beginning, or a KV cache that is too small has this effect.",
        since=PREFIX_SECONDS,
    )


def drafts_rejected(samples: Samples) -> Finding | None:
    """Speculation costs more than it gives."""
    drafted = samples.grown("drafted", RECENT_SECONDS)
    if drafted < DRAFT_TOKENS:
        return None
    share = samples.grown("accepted", RECENT_SECONDS) / drafted
    if share >= DRAFTS_LOW:
        return None
    return Finding(
        rule="drafts-rejected",
        level="warn",
        text=f"Speculation helps little: {share:.0%} of draft tokens were accepted in the last 2 minutes",
        advice="Propose fewer tokens (num_speculative_tokens), or serve without --speculative-config.",
    )


def answers_fail(samples: Samples) -> Finding | None:
    """Answers end with errors."""
    errors, ended = samples.grown("errors", RECENT_SECONDS), samples.grown("ended", RECENT_SECONDS)
    if errors < ERRORS_LEAST or errors < ERRORS_SHARE * ended:
        return None
    return Finding(
        rule="answers-fail",
        level="bad",
        text=f"Answers fail: {_number(errors)} of {_number(ended)} ended with an error in the last 2 minutes",
        advice="Last incidents and the server's log say why.",
        since=samples.ago("errors"),
    )


RULES: tuple[Rule, ...] = (
    engine_gone,
    cache_full,
    queue_grows,
    answers_fail,
    engine_restarts,
    queue_stays,
    grammars_slow,
    prefix_hits_low,
    drafts_rejected,
)
"""Of two findings that are as bad, that of the earlier rule is said first. Where the queue grows, it is not said as
well that it stays; grammars are the server's, not a model's."""
OF_SERVER = frozenset({"grammars-slow"})


def tenant_takes_most(history: History, waiting: float, named: bool) -> Finding | None:
    """Find the tenant that gets most of the work while others wait. `named`: whoever asks may read its name."""
    if waiting < 1 or not history.tenants:
        return None
    now, last = history.tenants[-1]
    first = next((counts for at, counts in history.tenants if now - at <= TENANT_SECONDS), last)
    used = {name: count - first.get(name, 0) for name, count in last.items()}
    used = {name: count for name, count in used.items() if count > 0}
    most = max(used, key=used.__getitem__, default="")
    everything = sum(used.values())
    if len(used) < 2 or everything < TENANT_TOKENS or used[most] < TENANT_SHARE * everything:
        return None
    who = f"Tenant {most or 'without a key'}" if named else "One tenant"
    return Finding(
        rule="tenant-takes-most",
        level="warn",
        text=f"{who} takes {used[most] / everything:.0%} of all tokens of the last 5 minutes, and sequences wait",
        advice="Share by tenants (--scheduling-policy fair, with weights of keys), or limit its key (max_sequences).",
    )


def diagnose(history: History, named: bool = True, draining: bool = False) -> Diagnosis:
    """What the last moments of `history` say is wrong, worst first. `named`: with names of tenants."""
    models = samples_of(history)
    found: dict[tuple[str, str], Finding] = {}
    for name, samples in models.items():
        for rule in RULES:
            finding = rule(samples)
            if finding is None or (finding.rule == "queue-stays" and ("queue-grows", name) in found):
                continue
            finding.model = "" if finding.rule in OF_SERVER else name
            found.setdefault((finding.rule, finding.model), finding)
    waiting = sum(samples.mean("waiting", 30.0) for samples in models.values())
    tenant = tenant_takes_most(history, waiting, named)
    findings = sorted([*found.values(), *([tenant] if tenant else [])], key=lambda each: each.level != "bad")
    if draining:
        text = "The server is draining: it finishes what runs, and takes no more requests"
        findings.append(Finding(rule="draining", level="warn", text=text, advice="It was asked to stop (SIGTERM)."))
    if findings:
        several = len(models) > 1 and findings[0].model
        sentence = f"{findings[0].model}: {findings[0].text}." if several else f"{findings[0].text}."
        return Diagnosis(level=findings[0].level, sentence=sentence, findings=findings)
    return Diagnosis(level="good", sentence=_all_is_well(models), findings=[])


def _all_is_well(models: Mapping[str, Samples]) -> str:
    running = sum(each.last.running for each in models.values() if each.last.in_flight)
    waiting = sum(each.last.waiting for each in models.values() if each.last.in_flight)
    asked = sum(each.grown("ended", RESTART_SECONDS) for each in models.values())
    if running or waiting:
        rate = sum(each.grown("tokens", 30.0) for each in models.values()) / 30.0
        return f"All is well: {_number(running)} run, {_number(waiting)} wait, {_number(rate)} tokens/s."
    if asked:
        return f"All is well: {_number(asked)} answers in the last 15 minutes, none runs now."
    return "All is well: nothing was asked in the last 15 minutes."


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:.1f}"


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count:.0f} times"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _ago(seconds: float) -> str:
    return f"{_duration(max(seconds, EVERY_SECONDS))} ago"
