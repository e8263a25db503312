"""The metrics of LongBench against transcriptions of the published definitions, on random and odd texts."""

from __future__ import annotations

import difflib
import random
import re
import string
import warnings
from collections import Counter

import pytest

from longtrain.evaluation.scoring.longbench import (
    classification,
    count,
    edit_similarity,
    first_code_line,
    percent_alike,
    retrieval,
    token_f1,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it recommends python-Levenshtein, which gives other values
    from fuzzywuzzy import fuzz

_TREC = """Food|Date|Order, rank|Speed|Disease and medicine|Word with a special property|Abbreviation|Language
Letter like a-z|Other entity|Animal|Expression abbreviated|Price|Techniques and method|Musical instrument
Mountain|Currency name|Event|Product|State|Individual|Organ of body|Reason|Manner of an action|City|Religion
Sport"""
TREC = re.split(r"[|\n]", _TREC)
NESTED = ("a", "b", "ab", "aba", "ba", "abab", "c", "", "cab", "a", "bab")
"""Classes that contain each other, one twice and one empty."""
_CODE, _DIGITS = "self. x ( ) # // ` é foo bar 0", "1 2 12 21 01 ٣ ３ ७ ² ½ , . - a"
CODE = ["\n", "\n", "    ", "\t", "", "return ", " = ", *_CODE.split()]
DIGITS = [" ", "\n", "Paragraph ", "", *_DIGITS.split()]


def official_f1(prediction: str, ground_truth: str) -> float:
    """The steps of LongBench's `qa_f1_score`, each written out."""

    def tokens(text: str) -> list[str]:
        text = text.lower()
        text = "".join(ch for ch in text if ch not in set(string.punctuation))
        text = re.sub(r"\b(a|an|the)\b", " ", text)
        return " ".join(text.split()).split()

    ours, theirs = tokens(prediction), tokens(ground_truth)
    common = Counter(ours) & Counter(theirs)
    same = sum(common.values())
    if same == 0:
        return 0
    precision = 1.0 * same / len(ours)
    recall = 1.0 * same / len(theirs)
    return (2 * precision * recall) / (precision + recall)


def official_count(prediction: str, ground_truth: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    right_num = 0
    for number in numbers:
        if str(number) == str(ground_truth):
            right_num += 1
    return float(0.0 if len(numbers) == 0 else right_num / len(numbers))


def official_retrieval(prediction: str, ground_truth: str) -> float:
    ground_truth_id = re.findall(r"Paragraph (\d+)", ground_truth)[0]
    return official_count(prediction, ground_truth_id)


def official_classification(prediction: str, ground_truth: str, all_classes: list[str]) -> float:
    """The published loop, which changes the list it runs over."""
    em_match_list = []
    for class_name in all_classes:
        if class_name in prediction:
            em_match_list.append(class_name)
    for match_term in em_match_list:
        if match_term in ground_truth and match_term != ground_truth:
            em_match_list.remove(match_term)
    if ground_truth in em_match_list:
        return 1.0 / len(em_match_list)
    return 0.0


def official_code(prediction: str, ground_truth: str) -> float:
    """LongBench's `code_sim_score`, written out, on the package fuzzywuzzy with difflib."""
    all_lines = prediction.lstrip("\n").split("\n")
    prediction = ""
    for line in all_lines:
        if ("`" not in line) and ("#" not in line) and ("//" not in line):
            prediction = line
            break
    return fuzz.ratio(prediction, ground_truth) / 100


@pytest.fixture(autouse=True)
def _difflib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where python-Levenshtein is installed."""
    monkeypatch.setattr(fuzz, "SequenceMatcher", difflib.SequenceMatcher)


def compared(metric, official, cases) -> list[float]:
    """The scores of all cases, each equal to the official one."""
    got = [metric(*case) for case in cases]
    wrong = [case for case, score in zip(cases, got, strict=True) if score != official(*case)]
    assert not wrong, wrong[0]
    return got


def test_f1_is_the_official_one(text_pairs) -> None:
    got = compared(token_f1, official_f1, text_pairs(6000))
    assert sum(0 < score < 1 for score in got) > 700 and len(set(got)) > 100


def test_numbers_are_counted_as_officially(text_pairs) -> None:
    rng, pairs, named = random.Random(0), [], []
    for _ in range(5000):
        prediction = "".join(rng.choices(DIGITS, k=rng.randrange(8)))
        number = rng.choice(("1", "2", "12", "٣", "３", "01", ""))
        pairs.append((prediction, number))
        before, after = rng.choice(("", "1 ", "paragraph 2 ")), rng.choice(("", " Paragraph 7"))
        named += [(prediction, f"{before}Paragraph {number}{after}")] if number else []
    assert {0.0, 1.0, 1 / 2, 1 / 3} <= set(compared(count, official_count, pairs))
    odd = text_pairs(3000, longest=400)
    named += [(a, f"{b}Paragraph {number} {b}") for a, b in odd for number in ("7", "٣")]
    scores = set(compared(count, official_count, odd) + compared(retrieval, official_retrieval, named))
    assert {0.0, 1.0} < scores and len(scores) > 10


def test_classes_are_found_as_officially(text_pairs) -> None:
    rng, cases = random.Random(0), []
    for _ in range(6000):
        nested = rng.random() < 0.7
        pool = NESTED if nested else TREC
        classes = rng.sample(pool, rng.randrange(1, len(pool) + 1))
        answer = rng.choice(classes) if rng.random() < 0.9 else rng.choice(pool)
        if nested:
            prediction = "".join(rng.choices("aabbc \n", k=rng.randrange(9)))
        else:
            said = rng.choices((*classes, "x", answer), k=rng.randrange(5))
            prediction = rng.choice((" ", ", ", "")).join(said)
        cases.append((prediction, answer, classes))
    assert {0.0, 1.0, 1 / 2, 1 / 3, 1 / 4} <= set(compared(classification, official_classification, cases))
    cases = []
    for prediction, answer in text_pairs(3000, longest=200):
        pieces = [answer, answer[: len(answer) // 2], answer[1:], *answer.split(), *NESTED[:3]]
        classes = rng.sample(pieces, rng.randrange(1, min(len(pieces), 40) + 1))
        cases.append((prediction + rng.choice(("", answer)), answer, classes))
    assert {0.0, 1.0, 1 / 2} <= set(compared(classification, official_classification, cases))


def test_lines_of_code_are_compared_as_officially(text_pairs) -> None:
    rng = random.Random(0)
    pairs = [
        tuple("".join(rng.choices(CODE, k=rng.randrange(most))) for most in (25, 12)) for _ in range(3000)
    ]
    got = compared(edit_similarity, official_code, pairs)
    assert len(set(got)) > 50 and {0.0, 1.0} < set(got)
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
    compared(edit_similarity, official_code, pairs)
    assert [percent_alike(a, b) for a, b in pairs[-40:]] == [fuzz.ratio(a, b) for a, b in pairs[-40:]]


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("", "", 0.0),
        ("the", "a", 0.0),
        ("The U.S.A!", "usa", 1.0),  # punctuation is deleted, not replaced
        ("well-known", "well known", 0.0),
        ("“quoted”", "quoted", 0.0),  # only ASCII punctuation is
        ("cat cat dog", "cat", 0.5),
        ("theatre a-the", "theatre athe", 1.0),  # articles are taken off after punctuation
    ],
)
def test_f1_by_hand(prediction: str, answer: str, score: float) -> None:
    assert token_f1(prediction, answer) == score


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("", "7", 0.0),
        ("seven", "7", 0.0),
        ("07", "7", 0.0),
        ("7 or 8, no: 7", "7", 2 / 3),
        ("3.7", "7", 0.5),
        ("٧", "7", 0.0),  # a number, but not that string
        ("٧", "٧", 1.0),
        ("²", "2", 0.0),  # a digit that is no decimal is no number
    ],
)
def test_numbers_by_hand(prediction: str, answer: str, score: float) -> None:
    assert count(prediction, answer) == retrieval(prediction, f"Paragraph {answer}") == score


@pytest.mark.parametrize(
    ("prediction", "answer", "classes", "score"),
    [
        ("City", "City", "City State", 1.0),
        ("City or State", "City", "City State", 0.5),
        ("city", "City", "City State", 0.0),
        ("", "City", "City State", 0.0),
        ("abc", "abc", "a b c abc", 0.5),  # taking "a" off hides "b" from the loop
        ("abc", "abc", "abc a b c", 0.5),
        ("abc", "abc", "a abc b", 1.0),  # here it hides the right class, which would have stayed anyway
    ],
)
def test_classes_by_hand(prediction: str, answer: str, classes: str, score: float) -> None:
    assert classification(prediction, answer, classes.split()) == score


def test_code_by_hand() -> None:
    assert first_code_line("\n\n# a\n// b\n```python\n  c = 1\nd") == "  c = 1"
    assert first_code_line("\n \nd") == " " and first_code_line("# a") == "" == first_code_line("")
    assert edit_similarity("# comment", "") == 1.0 and edit_similarity("", "x") == 0.0
    assert percent_alike("a" * 8, "a" + "b" * 7) == 12  # 12.5 goes to the even neighbour
    assert percent_alike("a" * 8, "aaa" + "b" * 5) == 38  # and so does 37.5
    line = "ab" * 100
    assert percent_alike("x" + line, line) < 5 < 95 < percent_alike("x" + line, line[:-1])  # 200 or 199
