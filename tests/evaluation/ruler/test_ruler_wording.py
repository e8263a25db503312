"""Prompts against rows written by hand in the official format, character for character."""

from __future__ import annotations

import re
from itertools import pairwise
from random import Random

import pytest

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


@pytest.fixture(scope="module")
def row(make):
    """`row(task)`: a short example's texts."""

    def call(task: str, length: int = 1024, **options):
        (example,) = make(task, length=length, n=1, **options)
        return {**vars(example), "outputs": list(example.answers)}

    return call


def whole(pattern: str, text: str) -> re.Match[str]:
    found = re.fullmatch(pattern, text, flags=re.DOTALL)
    assert found, text[:400] + " ... " + text[-400:]
    return found


def test_noise(row) -> None:
    got = row("niah_single_1")
    key = whole(
        r" The special magic number for ([a-z]+-[a-z]+) mentioned in the provided text is",
        got["answer_prefix"],
    )[1]
    (value,) = got["outputs"]
    assert re.fullmatch(r"[1-9]\d{6}", value)
    lines = got["input"].split("\n")
    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards."
    )
    assert lines[-1] == f"What is the special magic number for {key} mentioned in the provided text?"
    assert lines.count(NOISE) == len(lines) - 3
    assert lines.count(f"One of the special magic numbers for {key} is: {value}.") == 1


def test_uuids_among_uuids(row) -> None:
    got = row("niah_multikey_3")
    whole(rf" The special magic uuid for {UUID} mentioned in the provided text is", got["answer_prefix"])
    lines = got["input"].split("\n")
    assert lines[0] == (
        "A special magic uuid is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the uuid afterwards."
    )
    whole(rf"What is the special magic uuid for {UUID} mentioned in the provided text\?", lines[-1])
    for line in lines[1:-1]:
        whole(rf"One of the special magic uuids for {UUID} is: {UUID}\.", line)
    assert len({line.split(" ")[7] for line in lines[1:-1]}) == len(lines) - 2
    assert re.fullmatch(UUID, got["outputs"][0])


def test_several_keys_values_and_queries(row, haystack) -> None:
    got = row("niah_multiquery")
    keys = whole(
        r" The special magic numbers for (\S+), (\S+), (\S+), and (\S+) mentioned in the provided text are",
        got["answer_prefix"],
    ).groups()
    context = whole(
        r"Some special magic numbers are hidden within the following text\. Make sure to memorize it\. "
        r"I will quiz you about the numbers afterwards\.\n(.*)\nWhat are all the special magic numbers for "
        rf"{', '.join(keys[:-1])}, and {keys[-1]} mentioned in the provided text\?",
        got["input"],
    )[1]
    for key, value in zip(keys, got["outputs"], strict=True):
        needle = f"One of the special magic numbers for {key} is: {value}."
        assert context.count(needle) == 1
        context = context.replace(needle, "")
    text = " ".join(context.split())
    assert haystack.text.startswith(text)
    assert len(text.split()) > 100

    got = row("niah_multivalue")
    (key,) = set(re.findall(r"One of the special magic numbers for (\S+) is: ", got["input"]))
    assert sorted(re.findall(r" is: (\d+)\.", got["input"])) == sorted(got["outputs"])
    assert got["answer_prefix"] == f" The special magic numbers for {key} mentioned in the provided text are"
    assert (
        len(
            set(re.findall(r"One of the special magic numbers for (\S+) is", row("niah_multikey_1")["input"]))
        )
        == 4
    )
    assert re.fullmatch(UUID, row("niah_single_3")["outputs"][0])


def test_variable_tracking(row) -> None:
    got = row("vt")
    section = (
        r"Memorize and track the chain\(s\) of variable assignment hidden in the following text\.\n\n(.*?)\n"
        r"Question: Find all variables that are assigned the value (\d{5}) in the text above\."
    )
    said = (
        r" Answer: According to the chain\(s\) of variable assignment in the text above, 5 variables are "
        r"assigned the value (\d{5}), they are: "
    )
    solved, asked, shown, names, context, value = whole(
        section + said + r" (\w{3} \w{3} \w{3} \w{3} \w{3})\n\n" + section, got["input"]
    ).groups()
    assert asked == shown != value
    assert whole(said, got["answer_prefix"])[1] == value
    for text, chain, first in ((solved, names.split(), asked), (context, got["outputs"], value)):
        others = [line for line in text.split("\n") if line != NOISE]
        steps = [f"VAR {new} = VAR {old} " for old, new in pairwise(chain)]
        assert others == [f"VAR {chain[0]} = {first}", *steps]
    assert all(re.fullmatch(r"[A-Z]{5}", name) for name in got["outputs"])


@pytest.mark.parametrize(
    ("length", "solved", "main"), [(4095, (20, 3, 1), (6, 1)), (8192, (40, 10, 3), (30, 3))]
)
def test_common_words(row, length: int, solved: tuple[int, int, int], main: tuple[int, int]) -> None:
    got = row("cwe", length=length)
    section = (
        r"Below is a numbered list of words\. In these words, some appear more often "
        r"than others\. Memorize the ones that appear most often\.\n([^\n]*)\n"
        r"Question: What are the 10 most common words in the above list\?"
    )
    prefix = " Answer: The top 10 words that appear most often in the list are:"
    turn = r"<\|user\|>" + section + r"<\|assistant\|>" + re.escape(prefix) + r" ([^\n]*)\n"
    first, shown = whole(turn, got["solved"]).groups()  # a chat turn of its own, as in the official run.sh
    second = whole(section, got["input"])[1]
    plain = row("cwe", length=length, chat=False)
    assert whole(section + re.escape(prefix) + r" ([^\n]*)\n", plain["solved"])
    assert got["answer_prefix"] == prefix
    answers = [word.split(". ")[1] for word in re.split(r" (?=\d+\. )", shown)]
    for text, common, times in ((first, answers, solved[1:]), (second, got["outputs"], main)):
        words = re.findall(r"(\d+)\. (\S+)", text)
        assert [int(place) for place, _ in words] == list(range(1, len(words) + 1))
        counts = {word: [w for _, w in words].count(word) for _, word in words}
        assert {word for word in counts if counts[word] == times[0]} == set(common)
        assert {counts[word] for word in counts if word not in common} == {times[1]}
    assert len(set(re.findall(r"\d+\. (\S+)", first))) == solved[0]


def test_coded_words(row) -> None:
    scipy_special = pytest.importorskip("scipy.special")
    got = row("fwe", length=4096)
    context = whole(
        r"Read the following coded text and track the frequency of each coded word\. "
        r"Find the three most frequently appeared coded words\. ([^\n]*)\n"
        r"Question: Do not provide any explanation\. Please ignore the dots "
        r"'\.\.\.\.'\. What are the three most frequently appeared words in the above coded text\?",
        got["input"],
    )[1]
    assert got["answer_prefix"] == (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    words = context.split(" ")
    counts = sorted(((words.count(word), word) for word in set(words)), reverse=True)
    assert [word for _, word in counts[:4]] == ["...", *got["outputs"]]
    assert all(re.fullmatch(r"[a-z]{6}", word) for _, word in counts[1:])
    sizes = [
        n
        for n in range(100, 4096)
        if [int(n * k**-2.0 / scipy_special.zeta(2.0)) for k in range(1, 1 + (4096 - 50 - 2) // 50)][
            : len(counts)
        ]
        == [count for count, _ in counts]
    ]
    assert sizes


def test_documents(row, questions) -> None:
    got = row("qa_1", length=2048)
    only = "Only give me the answer and do not output any other words."
    context, query = whole(
        rf"Answer the question based on the given documents\. {re.escape(only)}\n\nThe following are given "
        rf"documents\.\n\n(.*)\n\nAnswer the question based on the given documents\. {re.escape(only)}\n\n"
        r"Question: (.*)",
        got["input"],
    ).groups()
    assert got["answer_prefix"] == " Answer:"
    first = questions["qa_1"].items[0]
    assert (query, tuple(got["outputs"])) == (first.query, first.answers)
    parts = context.split("\n\n")
    texts = [whole(rf"Document {place}:\n(.*)", part)[1] for place, part in enumerate(parts, 1)]
    assert set(texts) >= {questions["qa_1"].documents[i] for i in (*first.own, *first.near)}
    assert len(set(texts)) == len(texts) > 8

    got = row("qa_2", length=4096)
    own = {questions["qa_2"].documents[i] for i in questions["qa_2"].items[0].own}
    texts = [part.split("\n", 1)[1] for part in got["input"].split("\n\n") if part.startswith("Document ")]
    assert set(texts) > own
    assert len(own) == 10


def test_orders_are_the_seeds(make, questions) -> None:
    """The official generator orders documents and lists by the run's seed, alike in every example."""
    for seed in (42, 9):
        examples = make("qa_1", length=2048, n=12, seed=seed)
        for example in examples:
            order = list(range(example.size))
            Random(seed).shuffle(order)
            own = questions["qa_1"].documents[questions["qa_1"].items[example.index].own[0]]
            assert f"Document {order.index(0) + 1}:\n{own}" in example.input
        for example in make("cwe", length=2048, n=3, seed=seed):
            words = re.findall(r"\d+\. (\S+)", example.input)
            order = [*(list(range(10)) * 6), *range(10, example.size)]
            Random(seed).shuffle(order)
            assert [words[place] for place in map(order.index, range(10))] == list(example.answers)
