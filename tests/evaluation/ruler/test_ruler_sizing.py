"""How much haystack is taken: the most that fits, then the official steps back; what does not fit says so."""

from __future__ import annotations

from random import Random

import pytest

from longtrain.errors import ConfigError
from longtrain.evaluation.ruler.generate import Generator
from longtrain.evaluation.ruler.sizing import Framing, Material, largest
from longtrain.evaluation.ruler.tasks import TASKS

STEPS = {
    "essay": (500, 500),
    "noise": (25, 5),
    "needle": (25, 5),
    "vt": (10, 5),
    "cwe": (10, 10),
    "qa": (10, 10),
}
"""Steps back from 4096 tokens on, and below."""


def test_largest_is_the_largest() -> None:
    for seed in range(40):
        check_largest(seed)


def check_largest(seed: int) -> None:
    rng = Random(seed)
    costs = [rng.randrange(0, rng.choice([2, 30, 500])) + (seed % 2) for _ in range(400)]
    totals, total = [], rng.randrange(200)
    for cost in costs:
        total += cost
        totals.append(total)
    least, unit = rng.randrange(0, 5), rng.choice([1, 3, 17])
    limit = rng.randrange(totals[least], max(totals[300], totals[least] + 1))
    probes: list[int] = []

    def count(size: int) -> int:
        probes.append(size)
        return totals[size] if size < len(totals) else totals[-1] + 1000 * (size - 399)

    size = largest(count, limit, least=least, unit=unit)
    assert size is not None
    assert (size - least) % unit == 0
    assert count(size) <= limit < count(size + unit)
    assert len(probes) <= 40
    assert largest(count, totals[least] - 1, least=least, unit=unit) is None


@pytest.mark.corners
@pytest.mark.parametrize("length", [2048, 4096])
@pytest.mark.parametrize("task", TASKS)
def test_haystack_is_the_most_that_fits(tokenizer, haystack, questions, task: str, length: int) -> None:
    sources = {"haystack": haystack, "questions": questions.get(task)}
    run = Generator(Material(TASKS[task], length, Framing(tokenizer), 7, **sources))
    writer = run.writer
    room = length - TASKS[task].max_new_tokens

    def tokens(size: int, index: int, stream: str) -> int:
        return run.of.framing.count(writer.write(size, index, stream))

    if task == "fwe":
        step = writer.unit
        assert step == (room - run.of.framing.tokens) // 32
    else:
        kind = TASKS[task].options.get("haystack", task.split("_")[0])
        step = STEPS[kind][0 if length >= 4096 else 1]
        assert writer.unit == 1
    assert writer.step == step
    most = run.size
    assert tokens(most, 0, run.of.stream("size")) <= room
    if task[:2] in ("ni", "vt"):  # elsewhere a larger prompt holds other words, and may be shorter
        assert tokens(most + writer.unit, 0, run.of.stream("size")) > room
    for example in map(run.example, range(3)):
        size = most
        while tokens(size, example.index, run.of.stream(example.index)) > room:
            size = max(size - step, writer.least(example.index))
        assert example.size == size


@pytest.mark.parametrize("task", TASKS)
def test_too_short_says_how_long(make, task: str) -> None:
    with pytest.raises(ConfigError, match="pass a length of at least") as caught:
        make(task, length=140)
    least = int(str(caught.value).rsplit(" ", 1)[1])
    for _ in range(12):  # the shortest prompt of another length or example can be a little longer
        try:
            examples = make(task, length=least, n=3)
            break
        except ConfigError as error:
            least = int(str(error).rsplit(" ", 1)[1])
    assert all(example.length_tokens <= least for example in examples)
    assert least < 1800


def test_bad_numbers(make) -> None:
    with pytest.raises(ConfigError, match="vt does not fit a length of 1 tokens"):
        make("vt", length=1)


def test_frames(tokenizer, make) -> None:
    framing = Framing(tokenizer)
    assert (framing.before, framing.after, framing.tokens) == ("<|user|>", "<|assistant|>", 2)
    with_chat, without = make("vt", length=2048)[0], make("vt", length=2048, chat=False)[0]
    assert framing.ids(with_chat.input, with_chat.answer_prefix)[0] == tokenizer.convert_tokens_to_ids(
        "<|user|>"
    )
    assert len(framing.ids(with_chat.input, with_chat.answer_prefix)) == with_chat.prompt_tokens
    assert without.prompt_tokens == len(tokenizer(without.input + without.answer_prefix).input_ids)


class Plain:
    """A tokenizer of one token a character, with a mark before each text, and no chat template."""

    chat_template = None

    def __call__(self, text, *, add_special_tokens: bool, verbose: bool):
        ids = [0] * add_special_tokens + [ord(c) for c in text]
        return type("Encoding", (), {"input_ids": ids})


def test_another_tokenizer(haystack) -> None:
    for task in ("niah_single_2", "niah_multikey_3", "vt", "cwe", "fwe"):
        material = Material(TASKS[task], 9000, Framing(Plain()), haystack=haystack)
        for example in map(Generator(material).example, range(2)):
            text = example.solved + example.input + example.answer_prefix
            assert example.prompt_tokens == 1 + len(text)
            assert 5500 < example.length_tokens <= 9000
    with pytest.raises(ConfigError, match="no chat template"):
        Framing(Plain(), chat=True)
