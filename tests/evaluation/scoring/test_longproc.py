"""F1 of table rows against the published definition on pandas."""

import csv
import random
import re
import string

import pandas as pd
import pytest

from longtrain.evaluation.scoring.longproc import extract_tsv, html_to_tsv

TABLE = "name\tprice\nThe Cat\t$5\nDog, big\t7\nN/A\t-"


def _normalise(text: str) -> str:
    text = "".join(ch for ch in text.lower() if ch not in set(string.punctuation))
    text = " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())
    return text.replace(" ", "")


def _frame(lines: list[str]) -> pd.DataFrame:
    data = list(csv.reader(lines, delimiter="\t"))
    header, data = data[0], data[1:]
    if len(data[-1]) != len(header):
        data = data[:-1]
    for i, line in enumerate(data):
        if len(line) != len(header):
            data[i] = ["N/A" for _ in range(len(header))]
    frame = pd.DataFrame(data, columns=header).fillna("N/A")
    for column in frame.columns:
        frame[column] = frame[column].astype(str).apply(_normalise)
    return frame


def official(prediction: str, reference: str) -> float:
    """Oracle: LongProc's evaluation written out, on pandas as there; any exception scores 0."""
    found = re.search(r"```tsv([\s\S]*)```", prediction)
    if found is not None:
        prediction = found.group(1).strip()
    else:
        prediction = prediction.split("```tsv")[1] if "```tsv" in prediction else prediction
        prediction = prediction.strip()
    try:
        gt = _frame(reference.lstrip().rstrip().split("\n"))
        pred = _frame(prediction.lstrip().rstrip().split("\n"))
        precision, recall = 0, 0
        for i in range(len(pred.index)):
            precision += gt.eq(pred.iloc[i].values).all(axis=1).any()
        precision /= len(pred.index)
        for i in range(len(gt.index)):
            recall += pred.eq(gt.iloc[i].values).all(axis=1).any()
        recall /= len(gt.index)
        return 0 if recall + precision == 0 else 2 * recall * precision / (recall + precision)
    except Exception:
        return 0


def _table(rng: random.Random) -> str:
    width = rng.choice((1, 2, 2, 3))
    cells = (
        "a cat",
        "the Cat",
        "dog",
        "",
        "N/A",
        "na",
        '"q"',
        '"un',
        "5$",
        "5",
        " x",
        "é",
        "nan",
        "None",
        "\r",
    )
    odd = rng.random() < 0.3
    names = rng.choices("abcd", k=width) if odd else "abcd"[:width]
    rows = ["\t".join(names)]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        wide = width + (rng.choice((-1, 1)) if odd and rng.random() < 0.3 else 0)
        rows.append("\t".join(rng.choices(cells[: rng.choice((3, 5, 9, len(cells)))], k=wide)))
    return "\n".join([*rows, *rng.choices(("", "The end.", "```"), k=rng.randrange(2))])


def _pairs(count: int) -> list[tuple[str, str]]:
    rng = random.Random(0)
    pairs = []
    for _ in range(count):
        reference = _table(rng)
        rows = reference.split("\n")
        rng.shuffle(rest := rows[1:])
        other = "\n".join([rows[0], *rest[rng.randrange(2) :], *rng.choices(rows, k=rng.randrange(3))])
        answer = rng.choice((other, other, reference, _table(rng)))
        wraps = (
            "{}",
            "```tsv\n{}\n```",
            "Here:\n```tsv{}",
            "```tsv\n{}```\n```",
            "```\n{}\n```",
            "```tsv{}```tsv```",
        )
        pairs.append((rng.choice(wraps).replace("{}", answer), reference))
    return pairs


@pytest.mark.parametrize("count", [450, pytest.param(1950, marks=pytest.mark.slow)])
def test_equal_to_the_official_definition(count: int) -> None:
    pairs = _pairs(count)
    edges = (
        "",
        "\n",
        "a",
        "a\tb",
        "a\nx",
        "a\ta\nx\ty",
        "a\tb\nx\ty",
        "a\tb\nx",
        "\ta\nx",
        "```tsv",
        "```tsv```",
    )
    pairs += [(a, b) for a in (*edges, "'''", '"', '"a\tb\nx') for b in edges]
    got = [html_to_tsv(a, b) for a, b in pairs]
    for score, (a, b) in zip(got, pairs, strict=True):
        assert score == official(a, b), (a, b)
    assert sum(0 < score < 1 for score in got) > count / 7


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_equal_on_odd_and_long_texts(text_pairs, step) -> None:
    """Of each third pair, or of all."""
    found = set()
    for number, (prediction, reference) in enumerate(text_pairs(1400, longest=200)[::step]):
        joint = "name\n" if number % 4 else ""  # with a header nearly every text is a table
        table, answer = joint + reference, joint + prediction
        score = html_to_tsv(answer, table)
        assert score == official(answer, table), (answer, table)
        found.add(score)
    assert {0.0, 1.0} < found and len(found) > 5


@pytest.mark.parametrize(
    ("prediction", "precision", "recall"),
    [
        (TABLE, 1.0, 1.0),
        ("other\tnames\nthe 'cat'\t5\nDog big\t7\nna\t.", 1.0, 1.0),
        ("name\tprice\nN/A\t\nDOG BIG\t7.", 1.0, 2 / 3),
        ("name\tprice\ncat\t5\ncat\t5\nx\ty", 2 / 3, 1 / 3),
        ("name\tprice\n5\tcat", 0.0, 0.0),
    ],
)
def test_by_hand(prediction: str, precision: float, recall: float) -> None:
    both = precision + recall
    assert html_to_tsv(prediction, TABLE) == (2 * recall * precision / both if both else 0.0)


@pytest.mark.parametrize("text", ["a\tb\tc\n1\t2\t3", "I do not know.", "a\ta\n1\t2", "a\tb\n1\r2\t3"])
def test_what_is_no_such_table_scores_nothing(text: str) -> None:
    assert html_to_tsv(text, TABLE) == 0


def test_the_table_is_found_in_an_answer() -> None:
    assert extract_tsv("Sure:\n```tsv\na\tb\n```\nDone.") == "a\tb"
    assert extract_tsv("```tsv\na\n```\nand\n```tsv\nb\n```") == "a\n```\nand\n```tsv\nb"  # greedy
    assert extract_tsv("```tsv\na\tb\n") == "a\tb" and extract_tsv(" a\tb ") == "a\tb"
