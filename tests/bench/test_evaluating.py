"""`quire eval` on quire's own sets: the questions are true, answers are judged, and two models are compared."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Run
from command_line import run as run
from quire.bench.evaluating import SetScores, differences, domains, pieces, summary
from quire.bench.quality import TextScore
from quire.bench.question_sets import Marks, choice_questions, is_right, short_questions

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
    "percent of": lambda a, b: a * b // 100,
}
PYTHON: dict[str, object] = {
    "2 ** 3": 2**3, "10 // 3": 10 // 3, "10 % 4": 10 % 4, 'len("hello")': len("hello"),
    "sum([1, 2, 3])": sum([1, 2, 3]),
    "max([4, 9, 2])": max([4, 9, 2]), '"xyz"[0]': "xyz"[0], '"abc"[::-1]': "abc"[::-1],
    "[1, 2, 3].index(3)": [1, 2, 3].index(3), 'int("42") + 1': int("42") + 1,
    '"a,b,c".split(",")[1]': ["a", "b", "c"][1], "sorted([3, 1, 2])[0]": min([3, 1, 2]),
    "len({1, 1, 2})": len({1, 2}), 'bool("")': bool(""), "3 == 3.0": 3 == 3.0,
}  # fmt: skip


def test_the_sets_are_large_enough_and_no_place_is_favoured() -> None:
    choices, answers = choice_questions(), short_questions()
    assert len(choices) >= 200 and len(answers) >= 200
    for rows in (choices, answers):
        assert len({row.question for row in rows}) == len(rows)
        assert min(Counter(row.subject for row in rows).values()) >= 15
    assert all(len(set(row.choices)) == 4 and 0 <= row.answer < 4 for row in choices)
    places = Counter(row.answer for row in choices)
    assert max(places.values()) - min(places.values()) <= 1
    assert len(choice_questions(7)) == 7 and choice_questions(7)[0] == choices[0]
    assert not {row.question for row in choices} & {row.question for row in answers}


def test_questions_of_arithmetic_and_python_are_true() -> None:
    computed = 0
    for row in short_questions():
        if found := re.fullmatch(r"What is (\d+) (\+|-|\*|/|percent of) (\d+)\?", row.question):
            a, how, b = found.groups()
            assert row.answers == [str(OPERATIONS[how](int(a), int(b)))], row
            computed += 1
        elif found := re.fullmatch(r"In Python, what does (.*) (?:give|return)\?", row.question):
            assert row.answers == [str(PYTHON[found[1]])], row
            computed += 1
    assert computed >= 50


@pytest.mark.parametrize(
    ("text", "answers", "right"),
    [
        ("Paris", ["Paris"], True),
        ("The capital is paris.\nMore.", ["Paris"], True),
        ("Parisian", ["Paris"], False),
        ("\n\n 42.", ["42"], True),
        ("42.5", ["42"], False),
        ("3.42", ["42"], False),
        ("1,042", ["42"], False),
        ("four", ["4", "four"], True),
        ("東京です。", ["東京"], True),
        ("One line\nParis", ["Paris"], False),
        ("", ["Paris"], False),
    ],
)
def test_an_answer_is_judged(text: str, answers: list[str], right: bool) -> None:
    assert is_right(text, answers) is right


def marks(*right: bool) -> Marks:
    return Marks(("a",) * len(right), right, ("",) * len(right))


def test_figures_have_their_error() -> None:
    of = marks(*[True] * 60, *[False] * 40)
    assert of.share == 0.6 and of.margin == pytest.approx(1.96 * math.sqrt(0.24 / 100))
    assert of.by_subject() == {"a": (60, 100)}


def test_two_models_are_compared_in_pairs() -> None:
    one = SetScores(
        {"n 1": TextScore(100, 25, 69.3), "n 2": TextScore(100, 25, 83.2)}, marks(*[True] * 50), None, False
    )
    two = SetScores(
        {"n 1": TextScore(100, 20, 76.2), "n 2": TextScore(100, 20, 90.2)}, marks(*[False] * 50), None, True
    )
    text, choices = differences(one, two)
    assert text.change == pytest.approx((69.3 - 76.2 + 83.2 - 90.2) / math.log(2) / 200) and text.clear
    assert text.error < 0.001, "both differ by nearly the same on each piece, however hard that is"
    assert (choices.first, choices.second, choices.error) == (100, 0, 0) and choices.clear
    same = differences(one, one)
    assert not any(each.clear for each in same)
    found = summary(one)
    assert found["text"]["tokens"] == 50 and found["choices"]["right"] == 50 and "answers" not in found
    assert {name: list(part) for name, part in domains(one.text or {}).items()} == {"n": ["n 1", "n 2"]}


def test_text_is_cut_into_pieces() -> None:
    cut = pieces({"a": "x" * 4000 + "y" * 10, "b": "z" * 4001})
    assert list(cut) == ["a 1", "a 2", "b 1"] and "".join(cut.values()) == "x" * 4000 + "y" * 10 + "z" * 4000


def test_any_model_is_scored_beside_another(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    words = ("--limit", "2", "--num-blocks", "200", "-o", str(output))
    code, out, err = run("eval", "pydoc", "--beside", "pydoc", *words)
    assert code == 0, err
    assert "bits per byte" in out and "within the error" in out and "next:" in out and "+-" in out
    found = json.loads(output.read_text())
    assert found["choices"]["total"] == found["answers"]["total"] == 2 and found["text"]["pieces"] == 2
    assert found["beside"]["text"] == found["text"] and not any(each["clear"] for each in found["differences"])
    code, out, _ = run("eval", "pydoc", "--set", "answers", "--no-chat", "--limit", "1", "--num-blocks", "200", "-q")
    assert code == 0 and "no chat template" in out and "bits per byte" not in out


def test_sets_that_are_refused(run: Run) -> None:
    code, _, err = run("eval", "--set", "jokes")
    assert code == 2 and "--set jokes: one of text, choices, answers is needed" in err
    code, _, err = run("eval", "--against", "pydoc", "--beside", "pydoc")
    assert code == 2 and "leave --set and --beside out" in err
