"""The 13 tasks of RULER as data: wording, parameters and answer lengths of the official release.

Source: Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?", and
the official generator (NVIDIA/RULER, Apache-2.0), whose prompts these are, to the letter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


FAMILIES = {
    "niah": Family(
        "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special magic "
        "{type_needle_v} for {query} mentioned in the provided text?",
        " The special magic {type_needle_v} for {query} mentioned in the provided text are",
        128,
    ),
    "variable_tracking": Family(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
        "Question: Find all variables that are assigned the value {query} in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are "
        "assigned the value {query}, they are: ",
        30,
    ),
    "common_words_extraction": Family(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
        "ones that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above "
        "list?",
        " Answer: The top 10 words that appear most often in the list are:",
        120,
    ),
    "freq_words_extraction": Family(
        "Read the following coded text and track the frequency of each coded word. Find the three most "
        "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore "
        "the dots '....'. What are the three most frequently appeared words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        50,
    ),
    "qa": Family(
        "Answer the question based on the given documents. Only give me the answer and do not output any "
        "other words.\n\nThe following are given documents.\n\n{context}\n\nAnswer the question based on the "
        "given documents. Only give me the answer and do not output any other words.\n\nQuestion: {query}",
        " Answer:",
        32,
        "string_match_part",
    ),
}


@dataclass(frozen=True)
class Task:
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


def _niah(name: str, haystack: str, key: str, value: str, *, keys: int, values: int, queries: int) -> Task:
    options = {
        "haystack": haystack,
        "key": key,
        "value": value,
        "keys": keys,
        "values": values,
        "queries": queries,
    }
    return Task(name, "niah", options)


TASKS = {
    task.name: task
    for task in (
        _niah("niah_single_1", "noise", "words", "numbers", keys=1, values=1, queries=1),
        _niah("niah_single_2", "essay", "words", "numbers", keys=1, values=1, queries=1),
        _niah("niah_single_3", "essay", "words", "uuids", keys=1, values=1, queries=1),
        _niah("niah_multikey_1", "essay", "words", "numbers", keys=4, values=1, queries=1),
        _niah("niah_multikey_2", "needle", "words", "numbers", keys=1, values=1, queries=1),
        _niah("niah_multikey_3", "needle", "uuids", "uuids", keys=1, values=1, queries=1),
        _niah("niah_multivalue", "essay", "words", "numbers", keys=1, values=4, queries=1),
        _niah("niah_multiquery", "essay", "words", "numbers", keys=1, values=1, queries=4),
        Task("vt", "variable_tracking", {"chains": 1, "hops": 4}),
        Task("cwe", "common_words_extraction", {"common_repeats": 30, "other_repeats": 3, "common": 10}),
        Task("fwe", "freq_words_extraction", {"alpha": 2.0}),
        Task("qa_1", "qa", {"dataset": "squad"}),
        Task("qa_2", "qa", {"dataset": "hotpotqa"}),
    )
}
"""The official 13, by name, in the official order."""


def find_task(name: str) -> Task:
    """A task by its name.

    Raises:
        ConfigError: no such task.
    """
    if name not in TASKS:
        raise ConfigError(f"unknown RULER task '{name}'; known: {', '.join(TASKS)}")
    return TASKS[name]


@dataclass(frozen=True)
class Draft:
    """A prompt that was written but not yet counted; see `Example` for the fields."""

    input: str
    answer_prefix: str
    answers: tuple[str, ...]


class Writer(Protocol):
    """Writes prompts of a wanted size: words, lines or documents of haystack, by task.

    Sizes are `least + k * unit`; `step` is what the official generator takes off a prompt that is too long.
    """

    unit: int
    step: int

    def least(self, index: int) -> int:
        """The smallest size that example `index` can have."""
        ...

    def write(self, size: int, index: int, stream: str) -> Draft:
        """Example `index` of a size. All chance comes from `random.Random(stream)`."""
        ...
