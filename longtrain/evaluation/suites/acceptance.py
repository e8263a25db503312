"""Acceptance of drafts by context length, depth, place in the text and kind of text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from longtrain.decoding.stats import Stats
from longtrain.errors import ConfigError
from longtrain.evaluation.attention_mass import attention_mass
from longtrain.evaluation.contexts import choose_points
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import ByTask, Figure, Suite, Summary
from longtrain.evaluation.suites import drafting
from longtrain.evaluation.suites.continuation import Continuation, continuations, held_out
from longtrain.evaluation.suites.shared import settings_of
from longtrain.evaluation.task import Example, Facet, Measured, rows_sha256
from longtrain.settings import Count, Lengths, within
from longtrain.systems import System

if TYPE_CHECKING:
    from longtrain.decoding.roles import Parts
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

TITLE = "Acceptance by context length"
FIGURES = (
    Figure("repeated", "repeated_tokens", "output_tokens", "mean", "percent"),
    Figure("τ, not repetitive", "fresh_tokens", "fresh_cycles"),
    Figure("cache", "cache_bytes", kind="mean", unit="bytes"),
    Figure("draft", "draft_bytes", kind="mean", unit="bytes"),
    Figure("attention outside the window", "outside", kind="mean", unit="percent"),
    Figure("the same without the first 4 tokens", "outside_no_sinks", kind="mean", unit="percent"),
)


@dataclass(frozen=True)
class AcceptanceSettings:
    """The keys of the suite; see conf/suite/acceptance.yaml."""

    lengths: Lengths
    prompts: Count
    max_new_tokens: Annotated[int, within(2)]
    ignore_eos: bool = True
    text: str | None = None
    kinds: tuple[str, ...] | None = ()
    baseline: bool = True
    attention_mass: bool = False
    home: str = "."
    data: str | None = None


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """A task for each context length, and one for the attention outside a draft's window if it is asked for.

    Args:
        settings: see `AcceptanceSettings`.
        target: the frozen model.
        seed: of the choice of continuation points.
        sampling: how the run decodes.

    Raises:
        ConfigError: a wrong setting, or a length that the target's context does not hold.
        DataError: there is no held-out text, or not enough of it.
    """
    asked = settings_of(AcceptanceSettings, settings)
    documents = held_out(target, asked.text, asked.kinds or (), home=asked.home, data=asked.data)
    chosen = choose_points(
        documents,
        longest=asked.lengths[-1],
        count=asked.prompts,
        margin=asked.max_new_tokens,
        seed=seed,
    )
    tasks = continuations(
        chosen.points,
        asked.lengths,
        target,
        max_new_tokens=asked.max_new_tokens,
        ignore_eos=asked.ignore_eos,
    )
    notes = [f"{count} {reason}" for reason, count in chosen.dropped.items()]
    extra = {"documents": len({point.document.name for point in chosen.points})}

    def summarise(records: ByTask) -> Summary:
        found = drafting.summary(TITLE, records, notes)
        ends = [records.get(tasks[place].name, []) for place in (0, -1)]
        return replace(found, extra={**found.extra, **extra, **retention(*ends)} if found.tasks else {})

    return Suite(
        str(settings["name"]),
        (*tasks, *([AttentionOutside(tuple(tasks))] if asked.attention_mass else [])),
        scale=drafting.SCALE,
        summarise=summarise,
        figures=FIGURES,
        rivals=first_and_others,
        full_cache=asked.baseline,
        meet=needs_a_draft,
    )


def retention(shortest: Sequence[Record], longest: Sequence[Record]) -> dict[str, Any]:
    """(τ - 1) at the longest context over (τ - 1) at the shortest, with its own table."""
    short, long = (Stats(rows=[r for one in some for r in one.rows()]).tau for some in (shortest, longest))
    if not short > 1 or math.isnan(long):
        return {}
    share = (long - 1) / (short - 1)
    title = "(τ - 1) at the longest context over that at the shortest"
    return {"retention": share, "table": {"title": title, "columns": {"retention": share}}}


def first_and_others(systems: Sequence[System]) -> list[tuple[str, str]]:
    """The first system that drafts with each of the others that do."""
    first, *others = [system.name for system in systems if system.drafts]
    return [(first, other) for other in others]


def needs_a_draft(suite: Suite, systems: Sequence[System]) -> Suite:
    """Refuse a run in which nothing drafts.

    Raises:
        ConfigError: nothing drafts.
    """
    if any(system.drafts for system in systems):
        return suite
    if len(systems) < 2:
        raise ConfigError(
            f"suite={suite.name} measures drafts and none is given; pass artifact=NAME, or artifact=[A,B] to "
            "compare several (longtrain eval suite=smoke artifact=checkpoints/mine), or method=quantspec, "
            "which needs no artifact"
        )
    raise ConfigError(
        f"{systems[1].name} brings no draft, and suite={suite.name} measures drafts; put a draft beside it "
        "(suite.systems=[{artifact: [DRAFT, EVICTOR]}]), or pass suite=longbench, ruler or needle"
    )


@dataclass(frozen=True)
class AttentionOutside(Measured):
    """The target's attention that a draft's window cannot see, at the layer whose keys and values it reads.

    Args:
        tasks: whose prompts are read.
    """

    tasks: tuple[Continuation, ...]
    known: dict[Any, dict[str, float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was measured: several shapes of one draft have the same window."""
    name = "attention"

    @property
    def rows(self) -> tuple[Example, ...]:  # type: ignore[override]
        """Every prompt of every length."""
        return tuple(
            Example(f"{task.name}-{row.id}", {"task": number, "row": row.id, **row.fields})
            for number, task in enumerate(self.tasks)
            for row in task.rows
        )

    def facets(self, example: Example) -> dict[str, Facet]:
        """The context length."""
        return {"length": self.tasks[example.fields["task"]].length}

    def settings(self) -> dict[str, Any]:
        """See `Measured`."""
        return {"task": self.name, "rows": len(self.rows), "rows_sha256": rows_sha256(self.rows)}

    def measure(self, target: Target, parts: Parts, examples: Sequence[Example]) -> list[dict[str, float]]:
        """`outside` and `outside_no_sinks` for drafts that have a window, nothing for others."""
        layer, window = (getattr(parts.draft, name, None) for name in ("kv_layer", "window"))
        if layer is None or window is None:
            return [{} for _ in examples]
        found = []
        for example in examples:
            key = (example.id, layer, window)
            if key not in self.known:
                prompt = self.tasks[example.fields["task"]].prompts[example.fields["number"]]
                self.known[key] = vars(attention_mass(target, prompt, layer=layer, window=window))
            found.append(self.known[key])
        return found
