"""What rendering a chat template in a process of its own costs: `python benchmarks/templates.py`.

"start": a process until its first text, compilation included; "warm": one more rendering. Medians, beside the same
template rendered by jinja here, which is what the process saves nothing of.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.text.template_renderer import Renderer

SOURCE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
VALUES = {"messages": [{"role": "user", "content": "What does itertools.chain do?"}] * 4}


def median_ms(work: Callable[[], object], times: int) -> float:
    """Of `times` calls."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(seconds)


def start() -> None:
    """A process from nothing to its first text."""
    renderer = Renderer()
    renderer.render(SOURCE, VALUES, 1000)
    renderer.close()


def main() -> None:
    """Print the three."""
    warm, here = Renderer(), ImmutableSandboxedEnvironment().from_string(SOURCE)
    warm.render(SOURCE, VALUES, 1000)
    print(f"start {median_ms(start, 9):8.1f} ms")
    print(f"warm  {median_ms(lambda: warm.render(SOURCE, VALUES, 1000), 500):8.3f} ms")
    print(f"here  {median_ms(lambda: here.render(VALUES), 500):8.3f} ms")


if __name__ == "__main__":
    main()
