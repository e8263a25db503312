"""Suite `retrieval`: recall of the target's attention by trained heads and selection rules, on held-out text.

The score is recall far from the query: outside the first 4 entries and the last 64, which any set includes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError
from longtrain.evaluation.corpora import prefix_of
from longtrain.evaluation.recall import NEAR, SINKS, recall
from longtrain.evaluation.suite import ByTask, Metric, Scale, Suite, Summary, mean_summary
from longtrain.evaluation.suites import BROUGHT
from longtrain.evaluation.suites.continuation import choose_points, held_out
from longtrain.evaluation.suites.shared import check_lengths, settings_of
from longtrain.evaluation.task import Example, Facet, Measured, rows_sha256
from longtrain.settings import Count, Lengths
from longtrain.systems import SELECTOR, System
from longtrain.tables import tokens

if TYPE_CHECKING:
    from longtrain.decoding.roles import Parts
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

METRICS = (
    Metric("all mass", "total_read", kind="mean", unit="percent"),
    Metric("gap to the shared oracle closed", "gained", "shared_gap", unit="percent", plotted=True),
    Metric("gap to the oracle of its own sets closed", "gained", "own_gap", unit="percent"),
    Metric("window", "window_read", "far_mass", "mean", "percent"),
    Metric("shared oracle", "shared_read", "far_mass", "mean", "percent"),
    Metric("oracle of its own sets", "own_read", "far_mass", "mean", "percent"),
    Metric("oracle of each layer", "oracle_read", "far_mass", "mean", "percent"),
    Metric("mean of heads", "far_share", kind="mean", unit="percent"),
    Metric("window, mean of heads", "window_share", kind="mean", unit="percent"),
    Metric("shared oracle, mean of heads", "shared_share", kind="mean", unit="percent"),
    Metric("oracle of each layer, mean of heads", "oracle_share", kind="mean", unit="percent"),
    Metric(
        "gap to the shared oracle closed, mean of heads", "gained_share", "shared_gap_share", unit="percent"
    ),
    Metric(
        "gap to the oracle of its own sets closed, mean of heads",
        "gained_share",
        "own_gap_share",
        unit="percent",
    ),
    Metric("overlap", "overlap", kind="mean", unit="percent"),
    Metric("in an LRU buffer of twice the rows", "lru_overlap", kind="mean", unit="percent"),
    Metric("oracle's overlap", "oracle_overlap", kind="mean", unit="percent"),
)


@dataclass(frozen=True)
class RetrievalSettings:
    """The keys of the suite; see conf/suite/retrieval.yaml."""

    lengths: Lengths
    texts: Count
    steps: Count
    text: str | None = None
    kinds: tuple[str, ...] | None = ()
    home: str = "."
    data: str | None = None


@dataclass(frozen=True, eq=False)
class Contexts(Measured):
    """Texts of one length, each with the following tokens at which recall is measured.

    Args:
        name: the task's name.
        rows: examples, one per text.
        length: tokens before the first measured token.
        texts: context and following tokens of each example.
    """

    name: str
    rows: tuple[Example, ...]
    length: int
    texts: tuple[tuple[list[int], list[int]], ...] = field(repr=False)

    def serves(self, system: System) -> bool:
        """True for systems with a selector."""
        return system.selects

    def facets(self, example: Example) -> dict[str, Facet]:
        """The context length."""
        return {"length": self.length}

    def settings(self) -> dict[str, Any]:
        """See `Measured`."""
        rows = {"rows": len(self.rows), "rows_sha256": rows_sha256(self.rows)}
        far = {"sinks": SINKS, "near": NEAR, "rollout": None}  # None: kept in the hash for older results
        return {"task": self.name, "metric": "recall", "steps": len(self.texts[0][1]), **far, **rows}

    def score(self, measures: Mapping[str, float], example: Example) -> float | None:
        """Share of the far attention mass that is read; None for a text without far mass."""
        return measures["far_read"] / measures["far_mass"] if measures.get("far_mass") else None

    def measure(self, target: Target, parts: Parts, examples: Sequence[Example]) -> list[dict[str, float]]:
        """See `recall`; an empty mapping for systems without a selector."""
        if (selector := parts.selector) is None:
            return [{} for _ in examples]
        contexts, given = zip(*(self.texts[one.fields["number"]] for one in examples), strict=True)
        return recall(target, selector, contexts, given)


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """One task for each context length. The seed determines the texts.

    Raises:
        ConfigError: a wrong setting, or a length beyond the target's context window.
        DataError: there is no held-out text, or not enough of it.
    """
    asked = settings_of(RetrievalSettings, settings)
    check_lengths(asked.lengths, asked.steps, target)
    if asked.lengths[0] <= SINKS + NEAR:
        raise ConfigError(
            f"suite.lengths={list(asked.lengths)}; allowed: {SINKS + NEAR + 1} or more, since the first "
            f"{SINKS} entries and the last {NEAR} are not far"
        )
    documents = held_out(target, asked.text, asked.kinds or (), home=asked.home, data=asked.data)
    chosen = choose_points(
        documents, longest=asked.lengths[-1], count=asked.texts, margin=asked.steps, seed=seed
    )
    prefix = prefix_of(target.tokenizer)

    def at(length: int) -> Contexts:
        texts = tuple(
            (point.prompt(length, prefix), point.document.ids_T[point.end : point.end + asked.steps].tolist())
            for point in chosen.points
        )
        rows = tuple(
            Example(f"{number:04d}", {"number": number, "document": point.document.name, "end": point.end})
            for number, point in enumerate(chosen.points)
        )
        return Contexts(tokens(length), rows, length, texts)

    return Suite(
        "retrieval",
        tuple(at(length) for length in asked.lengths),
        scale=Scale("far recall"),
        summarise=_summary,
        title="Recall of attention by what is read",
        notes=[f"{count} {reason}" for reason, count in chosen.dropped.items()],
        metrics=METRICS,
        needs=frozenset({SELECTOR}),
        full_cache=False,
        meet=_needs_a_selector,
    )


def _summary(records: ByTask) -> Summary:
    """Mean scores, and far recall by layer over all lengths."""
    found = mean_summary(records)
    some = [record.measures for records_of in records.values() for record in records_of if record.measures]
    layers = sum(1 for name in (some[0] if some else ()) if name.startswith("far_mass_"))
    columns: dict[str, float | None] = {}
    for layer in range(layers):
        mass, read = (sum(one[f"{name}_{layer}"] for one in some) for name in ("far_mass", "far_read"))
        columns[f"layer {layer}"] = 100 * read / mass if mass else None
    table = {"title": "Far recall by layer", "columns": columns}
    return Summary(tasks=found.tasks, average=found.average, extra={"table": table} if columns else {})


def _needs_a_selector(suite: Suite, systems: Sequence[System]) -> Suite:
    """Refuse runs without a selector, and systems with a cache form, which does not affect recall."""
    if not any(system.selects for system in systems):
        raise ConfigError(BROUGHT["retrieval"])
    for system in systems:
        if system.parts.cache is not None:
            raise ConfigError(
                f"{system.name} brings a cache, and suite=retrieval measures which entries of a plain one "
                "would be read; leave the cache out"
            )
    return suite
