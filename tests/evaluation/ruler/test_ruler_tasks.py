"""What every example must be: of the stated length, solvable from its text, and only from it."""

from __future__ import annotations

import pytest

from longtrain.evaluation.ruler.tasks import NEEDLE, NOISE, TASKS
from tests.evaluation.ruler.readers import oracle

N = 4


@pytest.fixture(scope="module")
def examples(make):
    return {task: make(task, length=4096, n=N) for task in TASKS}


def rendered(tokenizer, example) -> str:
    message = [{"role": "user", "content": example.input}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return example.solved + text + example.answer_prefix


def unit_tokens(task: str, example, tokenizer) -> float:
    """Upper estimate of what one unit of haystack costs, from its text alone."""

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    kind = TASKS[task].options.get("haystack", task)
    if kind in ("noise", "vt"):
        return count(NOISE + "\n")
    if kind == "needle":
        lines = [line for line in example.input.split("\n") if line.startswith("One of the special")]
        assert len(lines) == example.size + 1
        assert NEEDLE.split("{", 1)[0] == lines[0][: NEEDLE.index("{")]
        return max(count(line + "\n") for line in lines)
    if task.startswith("qa"):
        return max(count(part) for part in example.input.split("\n\n"))
    if kind == "cwe":  # each other word stands three times (once below 4096), with its number
        return (
            3 * count(" 1000. individually")
            if example.length_tokens > 3900
            else 6 * count(" 100. individually")
        )
    if kind == "fwe":  # two steps: one is the official tolerance, one the luck of short coded words
        return 2 * 3.0
    return 2.0  # words of an essay


STEPS = {"essay": 500, "noise": 25, "needle": 25, "vt": 10, "cwe": 10, "qa_1": 10, "qa_2": 10}


@pytest.mark.parametrize("task", TASKS)
def test_length(examples, tokenizer, task: str) -> None:
    for example in examples[task]:
        tokens = len(tokenizer(rendered(tokenizer, example), add_special_tokens=False).input_ids)
        assert example.prompt_tokens == tokens
        assert example.length_tokens == tokens + TASKS[task].max_new_tokens <= 4096
        kind = TASKS[task].options.get("haystack", task)
        step = STEPS.get(kind, (4096 - 50) // 32)
        assert 4096 - example.length_tokens <= (step + 2) * unit_tokens(task, example, tokenizer)
    assert max(example.length_tokens for example in examples[task]) > 4096 * 0.9


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_in_the_context(examples, task: str) -> None:
    for example in examples[task]:
        asked = example.input.rindex("\n")
        assert example.answers
        wanted = example.answers[:1] if task == "qa_1" else example.answers
        assert all(answer in example.input[:asked] for answer in wanted)
        assert not any(answer in example.input[asked:] + example.answer_prefix for answer in wanted)


@pytest.mark.parametrize(
    "length", [1021, 2048, *(pytest.param(length, marks=pytest.mark.slow) for length in (4095, 5003))]
)
def test_odd_lengths(make, length: int) -> None:
    for task in TASKS:
        if task == "qa_2" and length < 2048:
            continue
        for example in make(task, length=length, n=2):
            assert example.length_tokens <= length
            assert TASKS[task].mark(oracle(task, example.input), example.answers) == 1.0


def test_answer_counts_and_lengths_are_official(examples) -> None:
    answers = {task: len(examples[task][0].answers) for task in TASKS}
    assert answers == {
        **dict.fromkeys(TASKS, 1),
        "niah_multivalue": 4,
        "niah_multiquery": 4,
        "vt": 5,
        "cwe": 10,
        "fwe": 3,
        "qa_1": 2,
    }
    tokens = {task: spec.max_new_tokens for task, spec in TASKS.items()}
    assert tokens == {**dict.fromkeys(TASKS, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
    assert {task for task in TASKS if TASKS[task].metric == "string_match_part"} == {"qa_1", "qa_2"}


def test_marks() -> None:
    assert TASKS["cwe"].mark("1. Apple\x002. pear", ["apple", "pear", "fig", "plum"]) == 0.5
    assert TASKS["qa_1"].mark(" PARIS\n", ["paris", "london"]) == 1.0
    assert TASKS["qa_1"].mark("", ["paris"]) == 0.0
