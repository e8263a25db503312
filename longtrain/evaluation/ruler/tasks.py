"""The 13 tasks of RULER; their wording, parameters and answer lengths are in bundled/benchmarks/ruler.json.

Kept by hand: the official generator needs downloads and its own processes, and it draws from one stream of
random numbers, so that no example can be written alone. The wording here is that of its task templates; the
chat template stands where its run.sh puts it.

Source: Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?", and
the official generator (NVIDIA/RULER, Apache-2.0).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from longtrain.assets import asset_dir
from longtrain.errors import ConfigError
from longtrain.evaluation.metrics.ruler import clean, match_all, match_part

METRICS = {"string_match_all": match_all, "string_match_part": match_part}
"""The official names of the metrics: all answers are wanted, or any."""

SEED = 42
"""The official seed."""

SHORT = 4096
"""Below this length the official generator takes smaller steps and fewer repeats."""


@dataclass(frozen=True)
class Family:
    """What the tasks of one kind share.

    Args:
        template: the user's message, without the answer's beginning.
        answer_prefix: what the answer begins with; the model goes on from here.
        max_new_tokens: tokens of the answer; they count towards the length.
        metric: `string_match_all` or `string_match_part`.
    """

    template: str
    answer_prefix: str
    max_new_tokens: int
    metric: str = "string_match_all"


_DATA = json.loads((asset_dir("bundled") / "benchmarks" / "ruler.json").read_text(encoding="utf-8"))
FAMILIES = {name: Family(**values) for name, values in _DATA["families"].items()}
NEEDLE, NOISE, DOCUMENT = str(_DATA["needle"]), str(_DATA["noise"]), str(_DATA["document"])
"""A needle, the line that noise haystacks repeat, and a document of the tasks with questions."""


@dataclass(frozen=True)
class RulerSpec:
    """A task: its name, its family's name and the parameters that its writer takes."""

    name: str
    family: str
    options: Mapping[str, Any]

    @property
    def wording(self) -> Family:
        """Template, answer prefix, answer length and metric."""
        return FAMILIES[self.family]

    @property
    def max_new_tokens(self) -> int:
        """Tokens of the answer."""
        return self.wording.max_new_tokens

    @property
    def metric(self) -> str:
        """The metric's name."""
        return self.wording.metric

    def mark(self, prediction: str, answers: Sequence[str]) -> float:
        """An answer's mark, 0 to 1; `metrics.ruler.percent` makes a task's score of them.

        Args:
            prediction: the raw answer; cleaned here as officially.
            answers: the example's.

        Raises:
            DataError: no answers.
        """
        return METRICS[self.metric](clean(prediction), answers)


TASKS = {
    name: RulerSpec(name, values["family"], {key: value for key, value in values.items() if key != "family"})
    for name, values in _DATA["tasks"].items()
}
"""The official 13, by name, in the official order."""


def find_task(name: str) -> RulerSpec:
    """A task by its name.

    Raises:
        ConfigError: no such task.
    """
    if name not in TASKS:
        raise ConfigError(f"unknown RULER task '{name}'; known: {', '.join(TASKS)}")
    return TASKS[name]


@dataclass(frozen=True)
class PromptText:
    """A prompt that is written but not yet counted; see `RulerExample` for the fields."""

    input: str
    answer_prefix: str
    answers: tuple[str, ...]
    solved: str = ""


class PromptWriter(Protocol):
    """Writes prompts of a wanted size: words, lines or documents of haystack, by task.

    Sizes are `least + k * unit`; `step` is what the official generator takes off a prompt that is too long.
    """

    unit: int
    step: int

    def least(self, index: int) -> int:
        """The smallest size that example `index` can have."""
        ...

    def write(self, size: int, index: int, stream: str) -> PromptText:
        """RulerExample `index` of a size. All chance comes from `random.Random(stream)`."""
        ...
