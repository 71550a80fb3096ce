"""The page at `/` with images, in a real browser."""

from __future__ import annotations

from browser import Browser
from live_server import live
from playground_page import ask, chatting, in_chromium
from playground_page import browser as browser
from seeing import IMAGE, ROWS, said, seeing

__all__ = ["browser"]

PASTE = """(async () => {
  const canvas = document.createElement('canvas');
  canvas.width = canvas.height = 16;
  const blob = await new Promise((done) => canvas.toBlob(done, 'image/png'));
  const data = new DataTransfer();
  data.items.add(new File([blob], 'a.png', { type: 'image/png' }));
  const event = new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true });
  document.querySelector('#message').dispatchEvent(event);
})()"""


@in_chromium
def test_images_go_with_a_message(browser: Browser) -> None:
    with seeing() as server, chatting(browser, server) as page:
        server.stub.script = server.tokenizer.encode("So.", add_special_tokens=False)
        page.wait("!document.querySelector('#attach').hidden")
        for count in (1, 2):
            page.run(PASTE)
            page.wait(f"document.querySelectorAll('#images .thumbnail').length === {count}")
        page.run("document.querySelector('#images button').click()")
        assert page.run("document.querySelectorAll('#images .thumbnail').length") == 1
        ask(page, "What?")
        assert said(server) == f"<|user|>{IMAGE * ROWS}What?<|end|><|assistant|>"
        assert page.run("document.querySelector('#images').hidden")
        page.wait("document.querySelector('.question img').naturalWidth === 16")
        ask(page, "Again?")
        assert said(server).count(IMAGE) == ROWS
    with live() as server, chatting(browser, server) as page:
        page.run(PASTE)
        assert page.run("document.querySelector('#attach').hidden && document.querySelector('#images').hidden")
