"""Templates that mean harm: each ends in bounded time and memory with an error that says why, and others are served."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from chat_templates import BROKEN, FAILING, HANG, LARGE, LONG, alive, make, renderers, tokenizer, user
from live_server import live
from quire.core.errors import BadRequest, ModelError, Unavailable
from quire.text import template_renderer
from quire.text.template import ChatTemplate
from quire.text.template_renderer import MEMORY, RENDERER, WALL_SECONDS, Renderer, RenderError
from serving_process import serving
from stub_engine import StubEngine


def peak() -> int:
    """Most memory this process has had, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def check(source: str, errors: Any, match: str) -> None:
    """`source` ends with an error that shows no path, soon, without much memory here, and the next one is rendered."""
    begin, before = time.monotonic(), peak()
    with pytest.raises(errors, match=match) as caught:
        make(source).render(user("x"))
    assert time.monotonic() - begin < WALL_SECONDS
    assert peak() - before < 64 << 10, "the template's memory is not ours"
    assert "Traceback" not in str(caught.value) and ".py" not in str(caught.value)
    assert make("{{ messages[0].content }}").render(user("y")) == "y"


@pytest.mark.parametrize("case", LONG)
def test_time_is_bounded(case: str) -> None:
    check(
        LONG[case], BadRequest, "the chat template 'default' stopped: .*(0.25 s of CPU time|64 MiB|4300 digits)|digits"
    )


@pytest.mark.sampled(5)
@pytest.mark.skipif(sys.platform == "darwin", reason="no bound of address space there")
@pytest.mark.parametrize("case", LARGE)
def test_memory_and_text_are_bounded(case: str) -> None:
    stopped = "stopped: (it takes more than (64 MiB of memory|0.25 s)|the text grows beyond)"
    check(LARGE[case], BadRequest, f"the chat template 'default' ({stopped}|fails on these messages: OverflowError)")


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_compile_is_refused_at_load(case: str) -> None:
    check(BROKEN[case], ModelError, "^chat template: template 'default' does not compile: ")


@pytest.mark.parametrize("case", FAILING)
def test_mistakes_of_a_template_are_told_without_a_path(case: str) -> None:
    check(FAILING[case], BadRequest, "the chat template 'default' (fails on these messages|does what is not allowed)")


@pytest.mark.parametrize(
    "source",
    ["{% if a %}{% elif b %}" + "{{ a }}" * 400_000 + "{% endif %}", "{{ 9 ** (9 ** 9) }}"],
    ids=["long", "a constant"],
)
def test_compiling_is_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_renderer, "COMPILE_SECONDS", 0.5)
    with pytest.raises(ModelError, match=r"does not compile: it takes more than 0\.5 s of CPU time"):
        make(source)
    assert make("{{ 1 }}").render(user("x")) == "1"


def test_long_messages_have_room() -> None:
    text = "日本語 a\U0001f600 " * 300_000
    source = "{% for m in messages %}<|user|>{{ m.content | trim }}{{ m | tojson }}{% endfor %}"
    assert len(make(source).render(user(text))) > 2 * len(text)


def test_time_grows_with_what_is_given_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions of each message of one character, more than published templates have."""
    asks = "{% if m.content is string and m.content not in ['y', 'z'] %}{{ m.content | trim }}{% endif %}"
    many = "{% for m in messages %}" + 3 * asks + "{% endfor %}"
    given = {"messages": 20_000 * user("x")}
    assert len(RENDERER.render(many, given, 1 << 20)) == 60_000
    for size, seconds in ((200_000, "0.45"), (900_000, "0.6")):
        monkeypatch.setattr(template_renderer, "MOST_SECONDS", 0.6)
        with pytest.raises(RenderError, match=f"more than {seconds} s of CPU time"):
            RENDERER.render(HANG, {"messages": user("x" * size)}, 1 << 20)


def test_text_is_bounded_by_the_context() -> None:
    source = "{% for i in range(99) %}{{ 'x' * 999 }}{% endfor %}"
    small = ChatTemplate({"default": source}, tokenizer, "x", 512)
    with pytest.raises(BadRequest, match=r"the text grows beyond 6\d{4} characters"):
        small.render(user("x"))
    assert len(ChatTemplate({"default": source}, tokenizer, "x", 1 << 15).render(user("x"))) == 99 * 999


def test_one_that_hangs_leaves_room_for_others() -> None:
    make(HANG), make("{{ 1 }}").render(user("x"))
    stop, failures = threading.Event(), []

    def hang() -> None:
        while not stop.is_set():
            try:
                RENDERER.render(HANG, {}, 1)
            except RenderError as error:
                failures.append(str(error))

    thread = threading.Thread(target=hang)
    thread.start()
    try:
        times = []
        for _ in range(50):
            begin = time.monotonic()
            assert RENDERER.render("{{ a }}", {"a": 1}, 9) == "1"
            times.append(time.monotonic() - begin)
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join()
    assert failures and set(failures) == {"it takes more than 0.25 s of CPU time"}
    assert sorted(times)[25] < 0.1, "half of them take what they take alone, many times over"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_one_that_something_else_ended_is_replaced_and_its_work_is_done_again() -> None:
    assert RENDERER.render("{{ a }}", {"a": 1}, 9) == "1"
    for child in renderers(os.getpid()):
        os.kill(child, signal.SIGKILL)
    assert RENDERER.render("{{ a }}", {"a": 2}, 9) == "2", "it was idle"
    slow = "{% for i in range(900) %}{% for j in range(900) %}{% endfor %}{% endfor %}{{ a }}"
    assert RENDERER.render(slow, {"a": 3}, 9) == "3"
    with ThreadPoolExecutor(1) as threads:
        for _ in range(3):
            busy = threads.submit(RENDERER.render, slow, {"a": 3}, 9)
            time.sleep(0.005)
            for child in renderers(os.getpid()):
                os.kill(child, signal.SIGKILL)
            assert busy.result() == "3", "it was at work"


def test_one_that_ends_again_and_again_is_an_error_of_its_template(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def dies(self: Any, job: Any, seconds: float) -> str:
        asked.append(job)
        self.close()
        raise template_renderer._Ended(-11)

    renderer = Renderer()
    with monkeypatch.context() as patched:
        patched.setattr(template_renderer._Process, "ask", dies)
        with pytest.raises(RenderError, match="ends with code -11"):
            renderer.render("{{ a }}", {}, 9)
    assert len(asked) == 2, "once more, and no more"
    assert renderer.render("{{ a }}", {"a": 1}, 9) == "1"
    renderer.close()


def test_messages_that_are_too_large_are_no_fault_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    source = make("{{ messages[0].content }}")
    assert source.render(user("x")) == "x"
    before, rests = renderers(os.getpid()), set(RENDERER._rests)
    with monkeypatch.context() as patched:
        patched.setattr(template_renderer, "MAX_FRAME", 999)
        with pytest.raises(BadRequest, match="bytes are more than the 999 that a template may be given"):
            source.render(user("x" * 1000))
    assert set(RENDERER._rests) <= rests and renderers(os.getpid()) == before
    assert source.render(user("x" * 1000)) == "x" * 1000


def test_processes_that_do_not_start_are_not_started_without_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However many ask: a start costs a core for 60 ms."""
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    started: list[Any] = []
    start = subprocess.Popen

    def counting(*args: Any, **more: Any) -> Any:
        started.append(args)
        return start(*args, **more)

    renderer = Renderer()
    with monkeypatch.context() as patched:
        patched.setattr(template_renderer, "_SCRIPT", tmp_path / "broken.py")
        patched.setattr(template_renderer, "START_AGAIN_SECONDS", 30.0)
        patched.setattr(subprocess, "Popen", counting)
        with pytest.raises(Unavailable, match="does not start: it ended with code 3"):
            renderer.compile("{{ 1 }}")
        for _ in range(50):
            with pytest.raises(Unavailable, match="does not start; in a second"):
                renderer.compile("{{ 1 }}")
        assert len(started) == 1
    renderer._start_again = 0.0
    assert renderer.render("{{ 1 }}", {}, 9) == "1"
    renderer.close()


def test_a_template_that_exceeds_its_time_again_and_again_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(template_renderer, "RENDER_SECONDS", 0.05)
    # Of this module alone: subprocess sleeps too, where it waits for a process that was ended.
    monkeypatch.setattr(template_renderer, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
    renderer = Renderer()
    for _ in range(2):
        with pytest.raises(RenderError, match=r"0\.05 s of CPU time"):
            renderer.render(HANG, {}, 9)
    assert slept[0] == 0 and slept[1] > 0.1, "three times what it took"
    renderer.render("{{ 1 }}", {}, 9)
    assert slept[2] == 0, "others do not wait"
    renderer.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_has_processes_of_its_own() -> None:
    assert RENDERER.render("{{ a }}", {"a": 1}, 9) == "1"
    script = """
import os
from quire.text.template_renderer import RENDERER
assert RENDERER.render("{{ a }}", {"a": 1}, 9) == "1"
child = os.fork()
for i in range(200):
    assert RENDERER.render("{{ a }}", {"a": i + (child == 0) * 1000}, 9) == str(i + (child == 0) * 1000)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "error::ResourceWarning", "-c", script], check=True, timeout=60)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
@pytest.mark.parametrize("source", ["{{ 1 }}", HANG], ids=["idle", "at work"])
def test_it_dies_with_its_parent(source: str) -> None:
    script = "import sys; from quire.text.template_renderer import RENDERER as r\n"
    script += "r.render('{{ 1 }}', {}, 9); print(1, flush=True)\n"
    script += f"import time\nwhile True:\n  try: r.render({source!r}, {{}}, 9)\n  except Exception: pass\n"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.readline()
    children: list[int] = []
    end = time.monotonic() + 10
    while not children and time.monotonic() < end:
        children = renderers(parent.pid)
    assert children
    parent.kill()
    parent.wait()
    parent.stdout.close()
    while any(map(alive, children)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, children))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_it_can_open_nothing_and_start_nothing() -> None:
    assert RENDERER.render("{{ 1 }}", {}, 9) == "1"
    for child in renderers(os.getpid()):
        limits = Path(f"/proc/{child}/limits").read_text()
        rows = {line[:26].strip(): line[26:].split()[:2] for line in limits.splitlines()}
        for name in ("Max open files", "Max processes", "Max file size", "Max core file size"):
            assert rows[name] == ["0", "0"], name
        space = int(rows["Max address space"][0])
        assert MEMORY < space < MEMORY + (96 << 20), "what the interpreter maps, and what a template may have"
        status = dict(line.split(":", 1) for line in Path(f"/proc/{child}/status").read_text().splitlines())
        assert int(status["VmPeak"].split()[0]) << 10 <= space
        assert {fd.name for fd in Path(f"/proc/{child}/fd").iterdir()} == {"0", "1", "2"}


SOMETIMES = "{% if messages[0].content == 'hang' %}" + LONG["a shadowed clock"] + "{% endif %}{{ messages[0].content }}"
HANGING = {"messages": [{"role": "user", "content": "hang"}]}


@pytest.mark.slow
def test_the_server_answers_while_and_after_a_template_hangs() -> None:
    with live(StubEngine()) as server, ThreadPoolExecutor(4) as threads:
        server.service.template = make(SOMETIMES)
        url = f"{server.url}/v1/chat/completions"
        replies = [threads.submit(httpx.post, url, json=HANGING, timeout=30) for _ in range(4)]
        answered = 0
        while not all(reply.done() for reply in replies):
            assert server.http.get("/livez").status_code == 200
            answered += 1
        assert answered > 20, "the event loop does not wait for templates"
        for reply in replies:
            assert reply.result().status_code == 400
            assert "'default' stopped: it takes more than 0.25 s" in reply.result().json()["error"]["message"]
        assert server.chat("well", max_tokens=1)["choices"]


def ask(url: str) -> int:
    """The status of the answer; that of a server that is gone counts as 503."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.post(f"{url}/v1/chat/completions", json=HANGING, timeout=30).status_code
    return 503


@pytest.mark.slow
def test_sigterm_ends_a_server_whose_template_hangs(tmp_path: Path) -> None:
    (tmp_path / "hang.jinja").write_text(SOMETIMES)
    with ThreadPoolExecutor(4) as threads:
        with serving("--chat-template", str(tmp_path / "hang.jinja")) as url:
            replies = [threads.submit(ask, url) for _ in range(8)]
            assert replies[0].result() == 400
        assert {reply.result() for reply in replies} <= {400, 503}
