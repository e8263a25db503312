"""Classes named in an answer, against a transcription of the published definition."""

import random

import pytest

from longtrain.evaluation.metrics.longbench import classification

TREC = (
    *("Food", "Date", "Order, rank", "Speed", "Disease and medicine", "Word with a special property"),
    *("Abbreviation", "Language", "Letter like a-z", "Other entity", "Animal", "Expression abbreviated"),
    *(
        "Price",
        "Techniques and method",
        "Musical instrument",
        "Mountain",
        "Currency name",
        "Event",
        "Product",
    ),
    *("State", "Individual", "Organ of body", "Reason", "Manner of an action", "City", "Religion", "Sport"),
)
NESTED = ("a", "b", "ab", "aba", "ba", "abab", "c", "", "cab", "a", "bab")
"""Classes that contain each other, one twice and one empty."""


def official(prediction: str, ground_truth: str, all_classes: list[str]) -> float:
    """Oracle: the published loop, which changes the list it runs over."""
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


def test_equal_to_the_official_definition() -> None:
    rng = random.Random(0)
    scores = []
    for _ in range(6000):
        nested = rng.random() < 0.7
        pool = NESTED if nested else TREC
        classes = rng.sample(pool, rng.randrange(1, len(pool) + 1))
        answer = rng.choice(classes) if rng.random() < 0.9 else rng.choice(pool)
        if nested:
            prediction = "".join(rng.choices("aabbc \n", k=rng.randrange(9)))
        else:
            prediction = rng.choice((" ", ", ", "")).join(
                rng.choices((*classes, "x", answer), k=rng.randrange(5))
            )
        scores.append(classification(prediction, answer, classes))
        assert scores[-1] == official(prediction, answer, classes), (prediction, answer, classes)
    assert {0.0, 1.0, 1 / 2, 1 / 3, 1 / 4} <= set(scores)


def test_equal_on_odd_and_long_texts(text_pairs) -> None:
    rng, scores = random.Random(1), []
    for prediction, answer in text_pairs(3000, longest=200):
        pieces = [answer, answer[: len(answer) // 2], answer[1:], *answer.split(), *NESTED[:3]]
        classes = rng.sample(pieces, rng.randrange(1, min(len(pieces), 40) + 1))
        text = prediction + rng.choice(("", answer))
        scores.append(classification(text, answer, classes))
        assert scores[-1] == official(text, answer, classes), (text, answer, classes)
    assert {0.0, 1.0, 1 / 2} <= set(scores)


@pytest.mark.parametrize(
    ("prediction", "answer", "classes", "score"),
    [
        ("City", "City", ["City", "State"], 1.0),
        ("City or State", "City", ["City", "State"], 0.5),
        ("city", "City", ["City", "State"], 0.0),
        ("", "City", ["City", "State"], 0.0),
        ("abc", "abc", ["a", "b", "c", "abc"], 0.5),  # taking "a" off hides "b" from the loop
        ("abc", "abc", ["abc", "a", "b", "c"], 0.5),
        (
            "abc",
            "abc",
            ["a", "abc", "b"],
            1.0,
        ),  # here it hides the right class, which would have stayed anyway
    ],
)
def test_by_hand(prediction: str, answer: str, classes: list[str], score: float) -> None:
    assert classification(prediction, answer, classes) == score
