"""Traces of every layout, written here by hand as their publishers write them: what is read of them, what refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from quire.bench.loads import ServeLoad
from quire.bench.sessions import workload_of
from quire.bench.traces.read import read_trace
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.record.recording import FORMAT, EndLine, RequestLine, RunLine
from stub_engine import stub_info

MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 1500, "input_length": 1200, "output_length": 3, "hash_ids": [7, 8, 11]}

{"timestamp": 3000, "input_length": 20, "output_length": 1, "hash_ids": [12]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,0
"""
AZURE_2024 = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
47,GPT-4,417,0,417,API log
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def call(text: str) -> Path:
        path = tmp_path / "trace"
        path.write_text(text)
        return path

    return call


def recording(folder: Path, prompts: bool) -> Path:
    """Two requests: one of four tokens, answered by 3, one of two with an end that is not there."""
    folder.mkdir()
    asked = [((1, 2, 3, 4), 9, 1.0), ((5, 6), 7, 3.0)]
    lines: list[msgspec.Struct] = [
        RunLine(format=FORMAT, version="0", prompts=prompts, config=EngineConfig(), info=stub_info())
    ]
    for number, (prompt, most, at) in enumerate(asked):
        said, params = prompt if prompts else (), SamplingParams(max_tokens=most)
        request = Request(id=f"r{number}", prompt=said, params=params, seed=1, arrival=at)
        lines.append(RequestLine(at=at, prompt_tokens=len(prompt), request=request))
    lines.append(EndLine(at=2.0, id="r0", index=0, reason="stop", count=3))
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    (folder / "20250101T000000-1-000000.jsonl").write_bytes(text)
    return folder


@pytest.mark.parametrize(
    ("text", "layout", "times", "lengths", "skipped"),
    [
        (MOONCAKE, "mooncake", [0.0, 1.5, 3.0], [(1100, 5), (1200, 3), (20, 1)], 0),
        (AZURE, "azure", [0.0, 4.314579], [(374, 44), (396, 109)], 1),
        ("\ufeff" + AZURE.replace("\n", "\r\n"), "azure", [0.0, 4.314579], [(374, 44), (396, 109)], 1),
        (AZURE_2024, "azure", [0.0], [(2162, 5)], 0),
        (BURSTGPT, "burstgpt", [0.0, 40.0], [(472, 18), (1087, 230)], 1),
    ],
)
def test_each_layout_is_found_out_and_read(
    write: Write, text: str, layout: str, times: list[float], lengths: list[tuple[int, int]], skipped: int
) -> None:
    found = read_trace(write(text))
    assert (found.layout, found.skipped) == (layout, skipped)
    assert [r.at for r in found.requests] == pytest.approx(times, abs=1e-6)
    assert [(r.input_tokens, r.output_tokens) for r in found.requests] == lengths
    assert len(read_trace(write(text), limit=1).requests) == 1


@pytest.mark.parametrize("prompts", [True, False])
def test_a_recording_is_a_trace(tmp_path: Path, prompts: bool) -> None:
    folder = recording(tmp_path / "run", prompts)
    found = read_trace(folder)
    assert found.layout == "recording"
    assert [(r.at, r.input_tokens, r.output_tokens) for r in found.requests] == [(0.0, 4, 3), (2.0, 2, 7)]
    sessions = workload_of(ServeLoad(trace=str(folder))).sessions
    said = [session.turns[0].new() for session in sessions]
    assert list(map(len, said)) == [4, 2] and (said == [[1, 2, 3, 4], [5, 6]]) == prompts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "begins with ''"),
        ("hello\nworld\n", "begins with 'hello'"),
        ("\x00\xff\n" * 4, "begins with"),
        ('{"timestamp": 0}\n', "line 1 has no 'input_length'"),
        (MOONCAKE + "[1]\n", "line 5 is no JSON object"),
        (MOONCAKE + '{"timestamp": 1, "input', "line 5 is not JSON"),
        (MOONCAKE.replace("1200", "12.5"), "line 2: input_length is '12.5'"),
        (MOONCAKE.replace("1200", "true"), "line 2: input_length"),
        (MOONCAKE.replace("1200", "-1"), "line 2: input_length"),
        (MOONCAKE.replace("1200", "99999999999"), "line 2: input_length"),
        (MOONCAKE.replace("1500", "NaN"), "line 2 is not JSON"),
        (MOONCAKE.replace("1500", '"x"'), "line 2: timestamp is 'x'"),
        (MOONCAKE.replace("[12]", "[12, 13]"), "line 4: 2 hash_ids"),
        (MOONCAKE.replace("[12]", '["a"]'), "line 4: hash_ids is no list of whole numbers"),
        (AZURE.replace("396", "many"), "line 3: ContextTokens is 'many'"),
        (AZURE.replace("2023-11-16 18:15:50.9951690", "yesterday"), "line 3: TIMESTAMP is 'yesterday'"),
        (AZURE.replace(",109", ""), "line 3 has 2 cells, the head 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no answered request"),
        (BURSTGPT.replace("\n45,", "\ninf,"), "line 3: Timestamp is 'inf'"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(write: Write, text: str, words: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as told:
        read_trace(path)
    assert words in str(told.value) and str(path) in str(told.value)


def test_other_wrong_files_are_refused(tmp_path: Path, write: Write) -> None:
    for path, layout, words in (
        (tmp_path / "none", "", "No such file"),
        (tmp_path, "", "holds no recording"),
        (write(MOONCAKE), "csv", "--trace-layout csv"),
        (write(MOONCAKE), "azure", "no column 'TIMESTAMP'"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_trace(path, layout)
    long = tmp_path / "long"
    long.write_bytes(b"{" + b" " * (5 << 20))
    with pytest.raises(ConfigError, match="line 1 is longer"):
        read_trace(long)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="line 1 is not UTF-8"):
        read_trace(tmp_path / "bytes")


def test_equal_hashes_are_equal_tokens(write: Write) -> None:
    load = ServeLoad(trace=str(write(MOONCAKE)), vocab_size=1000)
    first, second, third = (session.turns[0].new() for session in workload_of(load).sessions)
    assert list(map(len, (first, second, third))) == [1100, 1200, 20]
    assert first[:1024] == second[:1024] and first[1024:] != second[1024:1100]
    assert first[:512] != first[512:1024] and third != first[:20]
    again = [session.turns[0].new() for session in workload_of(load).sessions]
    assert again == [first, second, third]
    other = workload_of(msgspec.structs.replace(load, seed=1)).sessions[0].turns[0].new()
    assert other[:512] != first[:512]


def test_a_trace_is_scaled_cut_and_fitted(write: Write) -> None:
    path = str(write(MOONCAKE))
    load = ServeLoad(trace=path, trace_speed=3.0, length_scale=0.1)
    found = workload_of(load)
    assert (found.arrivals, found.name) == ("trace", "mooncake:trace")
    assert [session.due for session in found.sessions] == pytest.approx([0.0, 0.5, 1.0])
    assert [len(session.turns[0].new()) for session in found.sessions] == [110, 120, 2]
    shared = [session.turns[0].new()[:102] for session in found.sessions[:2]]
    assert shared[0] == shared[1]
    assert [session.turns[0].output_tokens for session in found.sessions] == [1, 1, 1]
    assert workload_of(ServeLoad(trace=path, num_prompts=2)).requests == 2
    fitted = workload_of(ServeLoad(trace=path), longest=1150)
    assert fitted.requests == 2 and "1 requests of the trace do not fit" in fitted.notes[0]
    with pytest.raises(ConfigError, match="no request fits"):
        workload_of(ServeLoad(trace=path), longest=10)
    rated = workload_of(ServeLoad(trace=path, request_rate=2.0))
    assert rated.arrivals == "poisson" and rated.requests == 3
