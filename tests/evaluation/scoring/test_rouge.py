"""ROUGE-L against the package that the official scorer uses, in a script of the official scorer's shape."""

import json
import random
import subprocess
import sys

import pytest

from longtrain.evaluation.scoring.rouge import OFFICIAL_STEPS, rouge_l

SCRIPT = """
import json, sys
from rouge import Rouge

def rouge_score(prediction, ground_truth):
    rouge = Rouge()
    try:
        scores = rouge.get_scores([prediction], [ground_truth], avg=True)
    except:
        return 0.0
    return scores["rouge-l"]["f"]

def scorer(pairs):
    scores = []
    for prediction, ground_truth in pairs:
        scores.append(rouge_score(prediction, ground_truth))
    return scores

if __name__ == "__main__":
    print(json.dumps(scorer(json.load(sys.stdin))))
"""
"""As deep as LongBench's eval.py (module, scorer, rouge_score): where the recursion ends depends on it."""


def official(pairs: list[tuple[str, str]]) -> list[float]:
    """Scores of the package; JSON carries floats exactly."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps(pairs), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def words(count: int, name: str = "w") -> str:
    return " ".join(f"{name}{i}" for i in range(count))


def test_equal_to_the_package(text_pairs) -> None:
    pairs = text_pairs(5000)
    got = [rouge_l(a, b) for a, b in pairs]
    assert got == official(pairs)
    assert sum(0 < score < 1 for score in got) > 1000 and len(set(got)) > 150


@pytest.mark.slow
def test_equal_on_texts_of_many_sentences() -> None:
    rng = random.Random(1)
    vocabulary = words(60).split()
    ends = (" ", " ", " ", " ", " ", ". ", ".", "\n")

    def summary() -> str:
        return "".join(rng.choice(vocabulary) + rng.choice(ends) for _ in range(rng.randrange(20, 160)))

    pairs = [(summary(), summary()) for _ in range(150)]
    got = [rouge_l(a, b) for a, b in pairs]
    assert got == official(pairs) and min(got) > 0.2


@pytest.mark.slow
def test_equal_around_the_depth_where_the_official_walk_breaks() -> None:
    at = OFFICIAL_STEPS
    equal = [(words(k), words(k)) for k in (at, at + 1)]  # every step goes along both
    along_prediction = [("a " + words(k), "a") for k in (at - 1, at)]
    along_reference = [(b, a) for a, b in along_prediction]
    apart = [(words(k) + ". a b", "c a b") for k in (at, at + 1)]  # the long sentence shares nothing
    broken_once = ("a b. " + words(at + 1), "a b")
    rng = random.Random(2)
    mixed = [tuple(" ".join(rng.choices(words(300).split(), k=k)) for _ in "ab") for k in (500, 600)]
    pairs = [*equal, *along_prediction, *along_reference, *apart, broken_once, *mixed]
    got = [rouge_l(a, b) for a, b in pairs]
    assert got == official(pairs)
    assert [score > 0 for score in got] == [True, False] * 4 + [False, True, False]


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("", "a", 0.0),
        ("a", "...", 0.0),
        (" ", "\n", 1.0),  # a piece of white space is one empty word
        ("x x x x", "x", 1.0),  # different words are counted
        ("The cat", "the cat", 0.5),
        ("b a", "a b", 0.5),
        ("b. a", "a b", 1.0),  # the union over sentences has no order
        ("a b c. ", "a b c", 2 * 0.75 / 1.75),  # the piece after the last full stop is a word more
    ],
)
def test_by_hand(prediction: str, reference: str, score: float) -> None:
    assert rouge_l(prediction, reference) == pytest.approx(score, abs=1e-7)
