"""The acceptance suite's tasks: held-out text continued from the same points after several context lengths.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from longtrain.decoding.stats import Stats, repeated
from longtrain.evaluation.acceptance import Cell, Protocol, Runs
from longtrain.evaluation.exactness import compare
from longtrain.evaluation.prompts import Encoded
from longtrain.evaluation.records import Record, ids_sha256
from longtrain.evaluation.suite import ByTask, Suite, Summary
from longtrain.evaluation.suites import drafting
from longtrain.evaluation.task import Example, Task
from longtrain.systems import FULL_CACHE, System
from longtrain.tables import tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longtrain.targets.model import Target

NAME = "acceptance"
TITLE = "Acceptance by context length"
Json = dict[str, Any]


@dataclass(frozen=True)
class Continuation(Task):
    """Held-out text, cut at points that all lengths share.

    Args:
        length: tokens of a prompt.
        prompts: of each row.
    """

    length: int = 0
    prompts: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def prompt(self, example: Example) -> str:
        """Where the text comes from, for messages alone: `encode` gives its tokens."""
        return f"{example.fields['document']} to token {example.fields['end']}"

    def size(self, example: Example) -> int:
        """Tokens."""
        return self.length

    def encode(
        self,
        example: Example,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        answers: Sequence[str] = (),
    ) -> Encoded:
        """The prompt, which is never shortened: its length is what is measured."""
        return Encoded(self.prompts[int(example.fields["number"])], False)

    def facets(self, example: Example) -> dict[str, int | float | str]:
        """Context length, and the kind of text."""
        return {"length": self.length, "kind": str(example.fields["kind"])}


def suite_of(protocol: Protocol, notes: Sequence[str] = ()) -> Suite:
    """A task for each context length.

    Args:
        protocol: lengths, points and settings.
        notes: what is to be said of the result.
    """
    tasks = []
    for length in protocol.lengths:
        prompts = [tuple(prompt) for prompt in protocol.prompts(length)]
        rows = tuple(
            Example(
                f"{number:04d}",
                {
                    "number": number,
                    "document": point.document.name,
                    "kind": point.document.kind,
                    "end": point.end,
                    "sha256": ids_sha256(prompt),
                },
            )
            for number, (point, prompt) in enumerate(zip(protocol.points, prompts, strict=True))
        )
        task = Continuation(
            tokens(length),
            rows,
            "{document}",
            protocol.max_new_tokens,
            "acceptance",
            None,
            chat=False,
            ignore_eos=protocol.ignore_eos,
            protocol={"lengths": [length]},
            length=length,
            prompts=tuple(prompts),
        )
        tasks.append(task)

    def summarise(records: ByTask) -> Summary:
        return drafting.summary(TITLE, records, notes)

    return Suite(NAME, tuple(tasks), scale=drafting.SCALE, summarise=summarise)


def runs_of(
    target: Target,
    systems: Sequence[System],
    records: Sequence[Record],
    protocol: Protocol,
    *,
    costs: Mapping[tuple[str, str], Json],
) -> Runs:
    """What the harness recorded, as `scores` reads it; drafted texts are compared with plain ones.

    Args:
        target: the frozen model; recomputes the logits where texts part.
        systems: that ran; `full` is plain decoding.
        records: of all of them, complete.
        protocol: as they ran.
        costs: (system, task) -> `target_forwards`, `cache_bytes`, `draft_bytes`.
    """
    found: dict[str, dict[str, list[Record]]] = {}
    for record in sorted(records, key=lambda record: record.example):
        found.setdefault(record.system, {}).setdefault(record.task, []).append(record)
    cells: dict[str, list[Cell]] = {system.name: [] for system in systems if system.drafts}
    plain: list[Cell] = []
    for length in protocol.lengths:
        task = tokens(length)
        texts: list[list[int]] | None = None
        for system in systems:
            some = found[system.name][task]
            own = [list(record.turns[0].tokens) for record in some]
            stats = _stats(some, costs.get((system.name, task), {}))
            if system.name == FULL_CACHE.name:
                texts = own
                plain.append(Cell(length, own, stats))
            if not system.drafts:
                continue
            greedy = protocol.sampling.greedy
            exact = None
            if texts is not None and system.lossless_of == FULL_CACHE.name:
                exact = compare(target, protocol.prompts(length), texts, other=own, greedy=greedy)
            cells[system.name].append(Cell(length, own, stats, exact))
    return Runs(cells, plain)


def _stats(records: Sequence[Record], costs: Json) -> Stats:
    return Stats(
        rows=[row for record in records for row in (record.rows() or [[]])],
        prompt_tokens=[record.prompt_tokens for record in records],
        output_tokens=[record.output_tokens for record in records],
        repeated_tokens=[repeated(record.turns[0].tokens) for record in records],
        kept_rows=[record.turns[0].kept_rows for record in records],
        cache_bytes=costs.get("cache_bytes", 0),
        draft_bytes=costs.get("draft_bytes", 0),
        target_forwards=costs.get("target_forwards", 0),
    )
