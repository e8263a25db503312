"""Numbers in an answer, against a transcription of the published definitions."""

import random
import re

import pytest

from longtrain.errors import DataError
from longtrain.evaluation.metrics.longbench import count, retrieval

PIECES = (
    "1",
    "2",
    "12",
    "21",
    "01",
    "٣",
    "３",
    "७",
    "²",
    "½",
    " ",
    ",",
    ".",
    "-",
    "a",
    "\n",
    "Paragraph ",
    "",
)


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


def test_equal_to_the_official_definitions() -> None:
    rng = random.Random(0)
    scores = []
    for _ in range(5000):
        prediction = "".join(rng.choices(PIECES, k=rng.randrange(8)))
        number = rng.choice(("1", "2", "12", "٣", "３", "01", ""))
        scores.append(count(prediction, number))
        assert scores[-1] == official_count(prediction, number), (prediction, number)
        if number:
            answer = (
                rng.choice(("", "1 ", "paragraph 2 "))
                + f"Paragraph {number}"
                + rng.choice(("", " Paragraph 7"))
            )
            assert retrieval(prediction, answer) == official_retrieval(prediction, answer), (
                prediction,
                answer,
            )
    assert {0.0, 1.0, 1 / 2, 1 / 3} <= set(scores)


def test_equal_on_odd_and_long_texts(text_pairs) -> None:
    scores = set()
    for prediction, answer in text_pairs(3000, longest=400):
        scores.add(count(prediction, answer))
        assert count(prediction, answer) == official_count(prediction, answer), (prediction, answer)
        for number in ("7", "٣"):
            named = f"{answer}Paragraph {number} {answer}"
            assert retrieval(prediction, named) == official_retrieval(prediction, named), (prediction, named)
            scores.add(retrieval(prediction, named))
    assert {0.0, 1.0} < scores and len(scores) > 10


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
def test_by_hand(prediction: str, answer: str, score: float) -> None:
    assert count(prediction, answer) == score
    assert retrieval(prediction, f"Paragraph {answer}") == score


def test_an_answer_without_a_paragraph_is_an_error() -> None:
    with pytest.raises(DataError, match="names no paragraph"):
        retrieval("7", "paragraph 7")
