"""Suites small enough to run in a moment."""

from __future__ import annotations

from longtrain.evaluation.suite import Suite
from longtrain.evaluation.task import Example, Task


def task(name="copy", *, examples=5, new=6, **settings) -> Task:
    """Prompts of different lengths; the score is the share of letters in the answer."""
    rows = tuple(
        Example(f"{name}-{number}", {"text": "abc " * (3 + 7 * number % 5) + str(number)})
        for number in range(examples)
    )

    def judge(text: str, example: Example) -> float:
        return sum(char.isalpha() for char in text) / max(1, len(text))

    return Task(name, rows, "Say: {text}", new, "letters", settings.pop("judge", judge), **settings)


def suite(*tasks: Task) -> Suite:
    return Suite("toy", tasks or (task(), task("more", examples=3, chat=False)))
