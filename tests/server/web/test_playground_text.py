"""The page at `/`: formulas and code in answers."""

from __future__ import annotations

import json
import re

from browser import Browser
from live_server import live
from playground_page import browser as browser
from playground_page import in_chromium, opened

FORMULAS = {
    "x": "<mi>x</mi>",
    "x^2_i": "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>",
    r"\frac12": "<mfrac><mn>1</mn><mn>2</mn></mfrac>",
    r"\sqrt[3]{x}": "<mroot><mi>x</mi><mn>3</mn></mroot>",
    "3.14": "<mn>3.14</mn>",
    r"\alpha \le 5": "<mrow><mi>\u03b1</mi><mo>≤</mo><mn>5</mn></mrow>",
    "f'": "<msup><mi>f</mi><mo>\u2032</mo></msup>",
    r"\mathbb{R}": '<mi mathvariant="normal">\u211d</mi>',
    r"\text{if } x": "<mrow><mtext>if&nbsp;</mtext><mi>x</mi></mrow>",
    r"\sum_{i=1}^n": "<msubsup><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></msubsup>",
    r"\left( x \right.": '<mrow><mo fence="true" stretchy="true">(</mo><mi>x</mi></mrow>',
    r"a \notin \{1\}": (
        '<mrow><mi>a</mi><mo>∉</mo><mo stretchy="false">{</mo><mn>1</mn><mo stretchy="false">}</mo></mrow>'
    ),
    r"\begin{matrix} 1 & 2 \\ 3 & 4 \end{matrix}": (
        '<mrow><mtable class="matrix"><mtr><mtd><mn>1</mn></mtd><mtd><mn>2</mn></mtd></mtr>'
        "<mtr><mtd><mn>3</mn></mtd><mtd><mn>4</mn></mtd></mtr></mtable></mrow>"
    ),
}
BROKEN = [
    r"\frac{1", r"\unheard{x}", "x}", r"\left( x", r"\begin{matrix} 1", r"\begin{evil}\end{evil}",
    "{" * 100 + "}" * 100, "a & b", "a $ b", "a" * 5000,
]  # fmt: skip
TEXTS = {
    "costs $5 and $10 or $1-$2": "<p>costs $5 and $10 or $1-$2</p>",
    "so $x$.": '<p>so <math alttext="x"><mi>x</mi></math>.</p>',
    r"so \(x\).": '<p>so <math alttext="x"><mi>x</mi></math>.</p>',
    "$$\nx\n$$\nend": '<p><math display="block" alttext="x"><mi>x</mi></math></p><p>end</p>',
    "\\[\nx\n\\]": '<p><math display="block" alttext="x"><mi>x</mi></math></p>',
    "$$\nx": "<p>$$<br>x</p>",
    "`$x$` and $<b>$": (
        '<p><code>$x$</code> and <math alttext="&lt;b&gt;"><mrow><mo>&lt;</mo><mi>b</mi><mo>&gt;</mo></mrow></math></p>'
    ),
}
CODES = {
    ("python", "def f(x):  # a\n    return 'b'"): ["k def", "f f", "c # a", "k return", "s 'b'"],
    ("js", "let x = `a`; // b"): ["k let", "s `a`", "c // b"],
    ("bash", "echo $HOME # x"): ["k echo", "c # x"],
    ("json", '{"a": true, "b": 1.5}'): ['s "a"', "n true", 's "b"', "n 1.5"],
    ("sql", "SELECT 1 -- x"): ["k SELECT", "n 1", "c -- x"],
    ("html", '<a href="x">y</a>'): ["k <a", 's "x"', "k >", "k </a", "k >"],
    ("unheard", "def f"): [],
}


@in_chromium
def test_formulas_code_and_prices(browser: Browser) -> None:
    with live() as server, opened(browser, f"{server.url}/") as page:
        page.run("""Promise.all(["math", "highlight", "markdown"].map((name) => import(`./playground/text/${name}.js`)))
            .then(([{ formula }, { highlighted }, { MarkdownView }]) => {
                window.math = (text) => formula(text).outerHTML;
                window.shown = (text) => {
                    const box = document.createElement("div");
                    new MarkdownView(box).show(text);
                    return box.innerHTML;
                };
                window.coloured = (language, text) => highlighted(text, language).filter((node) => node.className)
                    .map((node) => `${node.className.slice(3)} ${node.textContent}`);
                window.spent = (doing) => {
                    const began = performance.now();
                    doing();
                    return performance.now() - began;
                };
            })""")
        for text, inside in FORMULAS.items():
            found = page.run(f"math({json.dumps(text)})")
            assert re.sub(r"^<math[^>]*>|</math>$", "", found) == inside, text
        for text in BROKEN:
            assert page.run(f"math({json.dumps(text)})").startswith('<code class="formula"'), text
        for text, html in TEXTS.items():
            assert page.run(f"shown({json.dumps(text)})") == html, text
        for (language, text), spans in CODES.items():
            assert page.run(f"coloured({json.dumps(language)}, {json.dumps(text)})") == spans, language
        for unit in ("$", "$a", "$$", "\\(", "\\[\n", "$$\n", "{", "x^", "\\left(", "\\frac"):
            assert page.run(f"spent(() => shown({json.dumps(unit)}.repeat(20000)))") < 3000, unit
            assert page.run(f"spent(() => math({json.dumps(unit)}.repeat(500)))") < 3000, unit
        for unit in ("'", '"""', "/*", "<!--", "a", "0x", "`\\", "#", "\n "):
            for language in ("python", "js", "html", "bash"):
                spent = page.run(f"spent(() => coloured({json.dumps(language)}, {json.dumps(unit)}.repeat(10000)))")
                assert spent < 3000, (language, unit)
