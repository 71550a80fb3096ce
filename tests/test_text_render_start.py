"""When processes that render templates start and end: none is there that serves nothing."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from quire.cli.flags import to_arguments
from quire.text.template_renderer import Renderer
from test_end_to_end import serving
from test_text_render import alive, children, renderers
from tiny_model import OPTIONS, write_tiny

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")


def test_one_that_only_checked_templates_ends_at_rest() -> None:
    before = set(renderers(os.getpid()))
    renderer = Renderer()
    renderer.compile("{{ a }}")
    [checked] = set(renderers(os.getpid())) - before
    renderer.rest()
    assert not alive(checked)
    assert renderer.render("{{ a }}", {"a": 1}, 9) == "1"
    renderer.rest()
    assert renderer.render("{{ a }}", {"a": 2}, 9) == "2"
    [kept] = set(renderers(os.getpid())) - before
    assert kept != checked, "the one that rendered stays"
    renderer.close()


@pytest.mark.slow
def test_a_server_has_no_renderer_until_the_first_chat(tmp_path: Path) -> None:
    with serving(str(write_tiny(tmp_path)), *to_arguments(OPTIONS)) as url:
        [server] = [pid for pid, command in children(os.getpid()).items() if b"serve" in command]
        before = children(server)
        body = {"prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
        assert children(server) == before and not renderers(server)
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        for _ in range(2):
            assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30).status_code == 200
            [renderer] = renderers(server)
            assert set(children(server)) == {*before, renderer}
