"""F1 against a straight transcription of the published definition."""

import re
import string
from collections import Counter

import pytest

from longtrain.evaluation.metrics.longbench import token_f1


def official(prediction: str, ground_truth: str) -> float:
    """Oracle: the steps of LongBench's `qa_f1_score`, each written out."""

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


def test_equal_to_the_official_definition(text_pairs) -> None:
    pairs = text_pairs(6000)
    got = [token_f1(a, b) for a, b in pairs]
    assert got == [official(a, b) for a, b in pairs]
    assert sum(0 < score < 1 for score in got) > 700 and len(set(got)) > 100


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
def test_by_hand(prediction: str, answer: str, score: float) -> None:
    assert token_f1(prediction, answer) == score
