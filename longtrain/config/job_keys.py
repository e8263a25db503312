"""Top-level configuration keys (outside all groups) that only one job has; a dataclass for each job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from longtrain.config.groups import AsTyped
from longtrain.settings import (
    Count,
    NotNegative,
    Positive,
    Share,
    Text,
    Tokens,
    Words,
    between,
    convert,
    made_by,
    wrong,
)

MERGE = "merge"
"""The value of `shard` that merges the finished parts of an evaluation into its result."""
Contexts = Annotated[tuple[Tokens, ...], Words("token counts such as [8k, 128k]")]


@dataclass(frozen=True)
class GenerateKeys:
    """The keys that only `generate` has."""

    prompt: AsTyped = None
    prompt_file: AsTyped = None
    chat: Literal["auto", True, False] = "auto"
    stop: Annotated[
        tuple[Text, ...],
        made_by(lambda value: [] if value is None else value if isinstance(value, list | tuple) else [value]),
        Words("a string, or a list of strings, none of them empty"),
    ] = ()
    color: bool = True


@dataclass(frozen=True)
class ServeKeys:
    """The keys that only `serve` has."""

    host: Text = "127.0.0.1"
    port: between(0, 65535, int) = 8000  # type: ignore[valid-type]
    served_name: Text | None = None
    queue: Count = 64
    max_body: Count = 8388608


@dataclass(frozen=True)
class EvalKeys:
    """The keys that only `eval` has."""

    report: Annotated[Literal["html"] | None, Words("html, or null (Markdown and JSON alone)")] = None
    shards: Count = 1
    shard: Any = None
    compare: Any = None

    @property
    def page(self) -> bool:
        """True if an HTML page is written beside Markdown and JSON."""
        return self.report is not None

    def part(self) -> int | str | None:
        """The requested part of the evaluation: a number, `merge`, or None for all parts.

        Raises:
            ConfigError: there is no such part.
        """
        return MERGE if self.shard == MERGE else part_of(self.shard, self.shards, "merge, or null (all)")


@dataclass(frozen=True)
class AnsweredInParts:
    """The keys of jobs whose answers several commands may write, each a part of them."""

    shards: Count = 1
    shard: Any = None

    def part(self) -> int | None:
        """The requested part of the answers to generate, or None for all of them.

        Raises:
            ConfigError: there is no such part.
        """
        return part_of(self.shard, self.shards, "or null (all)")


@dataclass(frozen=True)
class PrepareKeys(AnsweredInParts):
    """The keys that only `prepare` has."""

    show: int | None = 0
    rows: Text | None = None


@dataclass(frozen=True)
class AnswersKeys(AnsweredInParts):
    """The keys that only `answers` has."""

    document_tokens: Annotated[tuple[Count, Count], Words("[SHORTEST, LONGEST] in tokens")] = (512, 8192)
    ask: Annotated[
        dict[str, tuple[Text | dict[str, tuple[Text, ...]], ...]],
        Words("{text: [QUESTION, {FORM: [QUESTION, ...]}, ...], code: [...]}"),
    ] = field(default_factory=dict)
    ask_weights: Annotated[
        dict[str, NotNegative] | None, Words("{FORM: WEIGHT, ...}, each 0 or more, or null")
    ] = None
    turns: Annotated[tuple[Count, Count], Words("[FEWEST, MOST] questions")] = (1, 1)
    batch: Count = 256
    batch_tokens: Count | None = None
    prompts: Count | None = None


@dataclass(frozen=True)
class ExportKeys:
    """The keys that only `export` has."""

    format: AsTyped = None
    private: bool = True
    collection: Text | None = None
    licence: Text | None = None
    unfinished: bool = False
    verify: AsTyped = None


@dataclass(frozen=True)
class PlanKeys:
    """The keys that only `plan` has."""

    gpu: str = "H200"
    network_gbits: Positive = 400.0
    json: AsTyped = None
    tokens: Tokens | None = None
    contexts: Contexts = (8192, 32768, 65536, 131072)
    batch: Count = 1
    acceptance: Share = 0.9


def part_of(shard: Any, shards: int, others: str) -> int | None:
    """Parse the number of a part of the work; None means all of it.

    Args:
        shard: as typed.
        shards: how many parts there are.
        others: what else is allowed, for the message.

    Raises:
        ConfigError: there is no such part.
    """
    number: int | None = convert(shard, int | None, "shard")
    if number is not None and not 0 <= number < shards:
        raise wrong("shard", f"{number} shards={shards}", f"0 to {shards - 1}, {others}")
    return number
