"""Similarity of code lines, against fuzzywuzzy on difflib, as the official scorer uses it."""

import difflib
import random
import warnings

import pytest

from longtrain.evaluation.metrics.longbench import edit_similarity, first_code_line, percent_alike

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it recommends python-Levenshtein, which gives other values
    from fuzzywuzzy import fuzz

PIECES = (
    "return ",
    "self.",
    "x",
    "(",
    ")",
    " = ",
    "\n",
    "\n",
    "    ",
    "#",
    "//",
    "`",
    "é",
    "foo",
    "bar",
    "0",
    "\t",
    "",
)


@pytest.fixture(autouse=True)
def _difflib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where python-Levenshtein is installed."""
    monkeypatch.setattr(fuzz, "SequenceMatcher", difflib.SequenceMatcher)


def official(prediction: str, ground_truth: str) -> float:
    """LongBench's `code_sim_score`, written out, on the package."""
    all_lines = prediction.lstrip("\n").split("\n")
    prediction = ""
    for line in all_lines:
        if ("`" not in line) and ("#" not in line) and ("//" not in line):
            prediction = line
            break
    return fuzz.ratio(prediction, ground_truth) / 100


def test_equal_on_pieces_of_code() -> None:
    rng = random.Random(0)
    pairs = [
        ("".join(rng.choices(PIECES, k=rng.randrange(25))), "".join(rng.choices(PIECES, k=rng.randrange(12))))
        for _ in range(3000)
    ]
    got = [edit_similarity(a, b) for a, b in pairs]
    assert got == [official(a, b) for a, b in pairs]
    assert len(set(got)) > 50 and {0.0, 1.0} < set(got)


def test_equal_on_texts_and_long_lines(text_pairs) -> None:
    rng = random.Random(1)
    pairs = text_pairs(2500, longest=20)
    for length in (199, 200, 201, 400):  # from 200 characters on, difflib ignores frequent ones
        for letters in ("ab", "abcdefghijklmnopqrstuvwxyz() "):
            line = "".join(rng.choices(letters, k=length))
            pairs += [
                (line[1:], line),
                (line, line[1:]),
                (line[::-1], line),
                (line, line[:3]),
                (line[:3], line),
            ]
    got = [edit_similarity(a, b) for a, b in pairs]
    assert got == [official(a, b) for a, b in pairs]
    assert [percent_alike(a, b) for a, b in pairs[-40:]] == [fuzz.ratio(a, b) for a, b in pairs[-40:]]


def test_by_hand() -> None:
    assert first_code_line("\n\n# a\n// b\n```python\n  c = 1\nd") == "  c = 1"
    assert first_code_line("\n \nd") == " " and first_code_line("# a") == "" == first_code_line("")
    assert edit_similarity("# comment", "") == 1.0 and edit_similarity("", "x") == 0.0
    assert percent_alike("a" * 8, "a" + "b" * 7) == 12  # 12.5 goes to the even neighbour
    assert percent_alike("a" * 8, "aaa" + "b" * 5) == 38  # and so does 37.5
    line = "ab" * 100
    assert percent_alike("x" + line, line) < 5 < 95 < percent_alike("x" + line, line[:-1])  # 200 or 199
