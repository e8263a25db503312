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
from typing import Any

from longtrain.assets import asset_dir
from longtrain.errors import ConfigError
from longtrain.evaluation.metrics.ruler import clean, match_all, match_part

METRICS = {"string_match_all": match_all, "string_match_part": match_part}
"""The official names of the metrics: all answers are wanted, or any."""

SEED = 42
"""The official seed."""

SHORT = 4096
"""Below this length the official generator takes smaller steps and fewer repeats."""


_DATA = json.loads((asset_dir("bundled") / "benchmarks" / "ruler.json").read_text(encoding="utf-8"))
NEEDLE, NOISE, DOCUMENT = str(_DATA["needle"]), str(_DATA["noise"]), str(_DATA["document"])
"""A needle, the line that noise haystacks repeat, and a document of the tasks with questions."""


@dataclass(frozen=True)
class RulerSpec:
    """A task.

    Args:
        name: the official one.
        family: tasks of one family have one writer and one wording.
        options: the parameters that its writer takes.
        template: the user's message, without the answer's beginning.
        answer_prefix: what the answer begins with; the model goes on from here.
        max_new_tokens: tokens of the answer; they count towards the length.
        metric: `string_match_all` or `string_match_part`.
    """

    name: str
    family: str
    options: Mapping[str, Any]
    template: str
    answer_prefix: str
    max_new_tokens: int
    metric: str = "string_match_all"

    def mark(self, prediction: str, answers: Sequence[str]) -> float:
        """An answer's mark, 0 to 1; `metrics.ruler.percent` makes a task's score of them.

        Args:
            prediction: the raw answer; cleaned here as officially.
            answers: the example's.

        Raises:
            DataError: no answers.
        """
        return METRICS[self.metric](clean(prediction), answers)


def _spec(name: str, family: str, **options: Any) -> RulerSpec:
    return RulerSpec(name, family, options, **_DATA["families"][family])


TASKS = {name: _spec(name, **values) for name, values in _DATA["tasks"].items()}
"""The official 13, by name, in the official order."""


def find_task(name: str) -> RulerSpec:
    """A task by its name.

    Raises:
        ConfigError: no such task.
    """
    if name not in TASKS:
        raise ConfigError(f"unknown RULER task '{name}'; known: {', '.join(TASKS)}")
    return TASKS[name]
