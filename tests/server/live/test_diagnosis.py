"""What the live page says is wrong: each rule on histories that are made for it, and what a server replies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser
from live_server import LiveServer, live, wait_until
from quire.server.http.diagnosis import Diagnosis, diagnose
from quire.server.http.history import EVERY_SECONDS, MAX_MOMENTS, MOST_TENANTS, History, binned

Values = Mapping[str, float]
QUIET: Values = {"quire:engine_healthy": 1, "quire:requests_in_flight": 1}
CALM: Values = {**QUIET, "vllm:num_requests_running": 2, "vllm:kv_cache_usage_perc": 0.3}


def made(at: Callable[[int], Values], model: str = "m", moments: int = MAX_MOMENTS) -> History:
    """A history of one model; `at` says what /metrics says in each moment, of which the last one is 0."""
    history = History()
    for i in range(moments):
        values = at(i - moments + 1)
        for name in values:
            name, _, reason = name.partition("/")
            labels = (("finished_reason", reason), ("model_name", model)) if reason else (("model_name", model),)
            history.series.setdefault((name, () if name == "quire:grammars_waiting" else labels), len(history.series))
        places = {name + ("/" + dict(labels)["finished_reason"] if "finished_reason" in dict(labels) else ""): place
                  for (name, labels), place in history.series.items()}  # fmt: skip
        found = {place: values.get(name) for name, place in places.items()}
        history.moments.append((i * EVERY_SECONDS, [found.get(place) for place in range(len(places))]))
    return history


def told(at: Callable[[int], Values]) -> Diagnosis:
    """What is wrong in a made history."""
    return diagnose(made(at))


def seconds(i: int) -> float:
    """Seconds before the last moment, as a negative number."""
    return i * EVERY_SECONDS


CASES: dict[str, tuple[Callable[[int], Values], str, str]] = {
    "queue-grows": (
        lambda i: {**CALM, "vllm:num_requests_waiting": max(0, 30 + i)},
        "bad",
        "The queue grows: 30 sequences wait",
    ),
    "queue-stays": (lambda i: {**CALM, "vllm:num_requests_waiting": 9}, "warn", "for 15 min without a break, 9 now"),
    "cache-full": (
        lambda i: {**CALM, "vllm:kv_cache_usage_perc": 0.99, "vllm:num_preemptions_total": 200 + i},
        "bad",
        "The KV cache is full: 24 sequences were preempted in the last 2 minutes",
    ),
    "engine-gone": (
        lambda i: {**QUIET, "quire:engine_healthy": float(seconds(i) < -20)},
        "bad",
        "The engine does not answer",
    ),
    "engine-restarts": (
        lambda i: {**CALM, "quire:engine_restarts_total": float(seconds(i) >= -120)},
        "warn",
        "started again once in the last 15 minutes, 2 min ago",
    ),
    "grammars-slow": (
        lambda i: {**CALM, "quire:grammars_waiting": float(seconds(i) >= -30)},
        "warn",
        "waiting for their schemas to be read for 30 s",
    ),
    "prefix-hits-low": (
        lambda i: {
            **CALM,
            "vllm:prefix_cache_queries_total": 100_000 + 100 * i,
            "vllm:prefix_cache_hits_total": 80_000 + 80 * min(i, -36) + (5 * (i + 36) if i > -36 else 0),
        },
        "warn",
        "Prefix hits are low: 5% of prompt tokens in the last 3 minutes, 80% before",
    ),
    "drafts-rejected": (
        lambda i: {
            **CALM,
            "vllm:spec_decode_num_draft_tokens_total": 50_000 + 100 * i,
            "vllm:spec_decode_num_accepted_tokens_total": 5_000 + 10 * i,
        },
        "warn",
        "10% of draft tokens were accepted",
    ),
    "answers-fail": (
        lambda i: {
            **CALM,
            "vllm:request_success_total/stop": 1000 + 9 * i,
            "vllm:request_success_total/error": 100 + max(i, -5),
        },
        "bad",
        "Answers fail: 5 of 221 ended with an error",
    ),
}


@pytest.mark.parametrize("rule", CASES)
def test_each_rule_sees_what_it_is_for_and_nothing_else(rule: str) -> None:
    at, level, text = CASES[rule]
    found = told(at)
    if rule == "answers-fail":  # 5 errors of 221: fewer than one in twenty are no news
        assert found.level == "good"
        found = told(lambda i: {**at(i), "vllm:request_success_total/stop": 1000 + 3 * i})
        text = "Answers fail: 5 of 77 ended with an error"
    assert [(each.rule, each.level) for each in found.findings] == [(rule, level)]
    assert text in found.sentence and found.level == level, found.sentence
    assert found.findings[0].advice.endswith(".") and found.findings[0].model == ("" if "grammars" in rule else "m")


def test_all_is_well_and_nothing_yet() -> None:
    assert diagnose(History()).sentence == "All is well: nothing was asked in the last 15 minutes."
    busy = told(lambda i: {**CALM, "vllm:generation_tokens_total": 10_000 + 50 * i, "vllm:num_requests_waiting": 0})
    assert busy == Diagnosis(level="good", sentence="All is well: 2 run, 0 wait, 10 tokens/s.", findings=[])
    done = told(lambda i: {"quire:requests_in_flight": 0, "vllm:request_success_total/stop": 300 + i})
    assert done.sentence == "All is well: 179 answers in the last 15 minutes, none runs now."
    idle = told(lambda i: {**CALM, "quire:requests_in_flight": 0, "vllm:num_requests_waiting": 50})
    assert idle.level == "good", "gauges of the last step count sequences that have left since"


def test_the_worst_is_said_first_and_a_server_that_drains_says_so() -> None:
    def at(i: int) -> Values:
        return {**CASES["drafts-rejected"][0](i), **CASES["queue-grows"][0](i)}

    found = diagnose(made(at), draining=True)
    assert [each.rule for each in found.findings] == ["queue-grows", "drafts-rejected", "draining"]
    assert found.sentence.startswith("The queue grows")


def test_a_model_that_was_unloaded_says_nothing_and_one_of_two_is_named() -> None:
    history = made(CASES["queue-stays"][0])
    other = made(lambda i: CALM, "other")
    for (at, values), (_, own) in zip(list(other.moments), list(history.moments), strict=True):
        own += [None] * (len(history.series) - len(own)) + values
        assert at >= 0
    for name, labels in other.series:
        history.series[name, labels] = len(history.series)
    assert diagnose(history).sentence.startswith("m: Sequences have been waiting")
    history.moments.append((history.moments[-1][0] + EVERY_SECONDS, [None] * 5 + list(history.moments[-1][1][5:])))
    assert diagnose(history).level == "good"


def test_a_tenant_that_takes_most_is_named_to_those_who_may_know_it() -> None:
    history = made(lambda i: {**CALM, "vllm:num_requests_waiting": 2})
    for i in range(MAX_MOMENTS):
        history.tenants.append((i * EVERY_SECONDS, {"big": 100 * i, "small": i}))
    found = diagnose(history)
    assert found.sentence.startswith("Tenant big takes 99% of all tokens of the last 5 minutes")
    assert diagnose(history, named=False).sentence.startswith("One tenant takes 99%")
    assert diagnose(made(lambda i: CALM)).level == "good"
    calm = made(lambda i: CALM)
    calm.tenants = history.tenants
    assert calm.tenants and diagnose(calm).level == "good", "nobody waits, so nobody is in anyone's way"


def test_tenants_are_bounded_and_rates_are_those_of_each_part_of_the_time() -> None:
    history = History()
    for i in range(3):
        history.note([], 30.0 * i, {str(j): i * j for j in range(2 * MOST_TENANTS)})
    assert all(len(used) == MOST_TENANTS for _, used in history.tenants)
    assert history.tenant_rates(str(2 * MOST_TENANTS - 1))[-2:] == [511 / 30, 511 / 30]
    assert history.tenant_rates("x") == binned([(0.0, 0.0), (30.0, 0.0), (60.0, 0.0)], 30)
    assert binned([], 3) == [None, None, None]
    assert binned([(0.0, 5.0), (10.0, 2.0), (20.0, 32.0)], 90) == [*[None] * 88, 0.0, 3.0]


def asked(server: LiveServer, key: str) -> Diagnosis:
    """What a server says is wrong to whoever has `key`."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    reply = server.http.get("/dashboard/diagnosis", headers=headers)
    assert reply.status_code == 200 and reply.headers["cache-control"] == "no-store"
    found = reply.json()
    return Diagnosis(level=found["level"], sentence=found["sentence"], findings=[])


def test_a_server_replies_and_names_no_tenant_to_those_without_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"big": {"key": "b", "admin": True}, "small": {"key": "s"}}))
    history = made(lambda i: {**CALM, "vllm:num_requests_waiting": 2})
    for i in range(MAX_MOMENTS):
        history.tenants.append((i * EVERY_SECONDS, {"big": 100 * i, "small": i}))
    with live(api_keys_file=str(keys), protect_metrics=True) as server:
        server.state.history = history
        assert server.http.get("/dashboard/diagnosis").status_code == 401
        assert "Tenant big" in asked(server, "b").sentence and "One tenant" in asked(server, "s").sentence
    with live(api_keys_file=str(keys)) as server:
        server.state.history = history
        assert "One tenant" in asked(server, "").sentence
    with live() as server:
        wait_until(lambda: bool(server.state.history.moments))
        assert asked(server, "").level == "good"


@pytest.mark.skipif(not CHROMIUM, reason="no chromium here: apt-get install chromium")
def test_the_page_opens_on_the_sentence() -> None:
    with live() as server, Browser() as browser:
        server.state.history.series, server.state.history.moments = (
            (bad := made(CASES["queue-grows"][0])).series,
            bad.moments,
        )
        page = browser.page(f"{server.url}/dashboard", 390, 844)
        page.wait("document.querySelector('#sentence').innerText.startsWith('The queue grows: 30 sequences wait')")
        assert page.run("document.querySelector('#verdict').className") == "bad"
        assert "add a replica" in page.text("#findings") and page.errors == []
        page.close()
