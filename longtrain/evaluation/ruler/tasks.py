"""The 13 tasks of RULER; their wording, parameters and answer lengths are in bundled/benchmarks/ruler.json.

The official generator is not used: it needs downloads and its own processes, and it draws from one stream of
random numbers, so that no example can be generated alone. The wording is that of its task templates; the
chat template is applied as in its run.sh.

Source: Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?", and
the official generator (NVIDIA/RULER, Apache-2.0).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longtrain.assets import asset_dir
from longtrain.evaluation.scoring.ruler import clean, match_all, match_part

METRICS = {"string_match_all": match_all, "string_match_part": match_part}
"""The official names of the metrics: all answers are required, or any."""

SEED = 42
"""The official random seed."""

SHORT = 4096
"""Below this length the official generator uses smaller steps and fewer repetitions."""


_DATA = json.loads((asset_dir("bundled") / "benchmarks" / "ruler.json").read_text(encoding="utf-8"))
NEEDLE, NOISE, DOCUMENT = str(_DATA["needle"]), str(_DATA["noise"]), str(_DATA["document"])
"""Templates of a needle, of the line that noise haystacks repeat, and of a document in the question tasks."""


@dataclass(frozen=True)
class RulerSpec:
    """The definition of a task.

    Args:
        name: the official name.
        family: tasks of one family share a writer and a wording.
        options: parameters of its writer.
        template: the user's message, without the answer's prefix.
        answer_prefix: the beginning of the answer, which the model continues.
        max_new_tokens: token limit of the answer; it counts towards the length.
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
        """Score an answer, 0 to 1; `scoring.ruler.percent` combines the scores into a task's score.

        Args:
            prediction: the raw answer; cleaned here as in the official scorer.
            answers: the example's answers.
        """
        return METRICS[self.metric](clean(prediction), answers)


def _spec(name: str, family: str, **options: Any) -> RulerSpec:
    return RulerSpec(name, family, options, **_DATA["families"][family])


TASKS = {name: _spec(name, **values) for name, values in _DATA["tasks"].items()}
"""The 13 official tasks by name, in the official order."""
