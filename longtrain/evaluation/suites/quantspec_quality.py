"""What a quantised KV cache costs in quality, and whether drafts on it give the texts of plain decoding.

Windows of text are scored as decoding would see them: the context is read in full precision, all but its last
128 to 255 tokens are quantised, and the tokens after it follow while further blocks are quantised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from longtrain.cache.engine_rules import RULES
from longtrain.cache.readings import Axis, Rounding
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError
from longtrain.evaluation.corpora import prefix_of
from longtrain.evaluation.perplexity import measure_against_full, perplexity
from longtrain.evaluation.records import ids_sha256
from longtrain.evaluation.suite import ByTask, Figure, Scale, Suite, Summary
from longtrain.evaluation.suites.continuation import choose_points, continuations, held_out
from longtrain.evaluation.suites.shared import settings_of
from longtrain.evaluation.task import Example, Facet, Measured, Task, rows_sha256
from longtrain.kernels.hierarchical.layout import BLOCK, Split
from longtrain.settings import Count, Counts, Lengths, some_of, within
from longtrain.systems import Builder, System, parse
from longtrain.tables import tokens

if TYPE_CHECKING:
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

METHOD = "quantspec"
LEAST_AFTER = 24
"""Tokens of text that are there after every context, however few are scored."""
ROWS = "rows"
"""A section that `longtrain bench` measures."""
ENGINES = "engines"
"""A section: rules of vLLM beside ours, with the bytes of each."""
SECTIONS = ("perplexity", "axes", ENGINES, ROWS, "texts")
FIGURES = (
    Figure("change, %", "nats", "tokens", "change", growth=True, plotted=True),
    Figure("same top token", "agreed", "tokens", unit="percent"),
    Figure("sampled drafts accepted", "overlap", "tokens", unit="percent"),
    Figure("divergence, nats", "divergence", "tokens", plotted=True),
)


@dataclass(frozen=True)
class QualitySettings:
    """The keys of the suite; see conf/suite/quantspec_quality.yaml."""

    sections: some_of(SECTIONS, all_if_empty=False)  # type: ignore[valid-type]
    lengths: Lengths
    windows: Count
    scored_tokens: Count
    splits: some_of([split.value for split in Split], all_if_empty=False)  # type: ignore[valid-type]
    bits: tuple[Count, ...]
    drafted: Counts
    prompts: Count
    max_new_tokens: Annotated[int, within(2)]
    policy: str
    budget: float
    text: str | None = None
    kinds: tuple[str, ...] | None = ()
    artifact: str | None = None
    method: dict[str, Any] | None = None
    row_counts: Counts = (2,)

    def __post_init__(self) -> None:
        if not self.bits or not set(self.bits) <= {4, 8}:
            raise ConfigError(f"suite.bits={list(self.bits)}; allowed: one or more of 8, 4")
        if self.method is not None and self.method["name"] != METHOD:
            raise ConfigError(
                f"method={self.method['name']} for suite=quantspec_quality, which measures QuantSpec's "
                "cache; pass method=quantspec or none, and a draft as artifact=NAME"
            )


@dataclass(frozen=True, eq=False)
class QualityWindows(Measured):
    """QualityWindows of one context length, each with the tokens after it that are scored.

    Args:
        name: of the task.
        rows: a window each.
        length: tokens of a context.
        windows: context and scored tokens of each row.
    """

    name: str
    rows: tuple[Example, ...]
    length: int
    windows: tuple[tuple[list[int], list[int]], ...] = field(repr=False)
    against_full = True

    def serves(self, system: System) -> bool:
        """Drafts have no part in this, and an evicted cache is measured by suite=perplexity."""
        return not (system.drafts or system.evicts)

    def facets(self, example: Example) -> dict[str, Facet]:
        """The context length."""
        return {"length": self.length}

    def settings(self) -> dict[str, Any]:
        """See `Measured`."""
        rows = {"rows": len(self.rows), "rows_sha256": rows_sha256(self.rows)}
        return {"task": self.name, "metric": "perplexity", **rows}

    def measure(self, target: Target, parts: Parts, examples: Sequence[Example]) -> list[dict[str, float]]:
        """See `measure_against_full`."""
        return self.measure_against_full(target, parts, examples, {})

    def measure_against_full(
        self, target: Target, parts: Parts, examples: Sequence[Example], known: dict[str, Any]
    ) -> list[dict[str, float]]:
        """Sums over the scored tokens: `nats`; how many have the full cache's likeliest token (`agreed`): how
        often a greedy draft by the target on this cache would be accepted; the chance that one drawn at
        temperature 1 would be (`overlap`); the divergence of the full cache's law from this one, in nats.
        """
        windows = {example.id: self.windows[int(example.fields["number"])] for example in examples}
        found = measure_against_full(target, parts, windows, known)
        keys = ("nats", "tokens", "agreed", "overlap", "divergence")
        return [{key: getattr(one, key) for key in keys} for one in found]


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """Windows and greedy texts of each context length. The seed is that of the choice of text.

    Raises:
        ConfigError: a wrong setting, or a context that the target does not hold.
        DataError: there is too little text.
    """
    asked = settings_of(QualitySettings, settings)
    longest = asked.lengths[-1] + max(asked.scored_tokens, asked.max_new_tokens)
    if longest > target.info.max_positions:
        raise ConfigError(
            f"contexts of {asked.lengths[-1]} tokens and what follows them exceed the context of "
            f"{target.info.max_positions} of target {target.info.name}; pass shorter lengths="
        )
    chosen = choose_points(
        held_out(target, asked.text or "bundled", asked.kinds or ()),
        longest=max(asked.lengths[-1], BLOCK + 1),
        count=asked.windows,
        margin=max(asked.scored_tokens, LEAST_AFTER),
        seed=seed,
    )
    tasks: list[Task | Measured] = []
    if {"perplexity", "axes", ENGINES} & set(asked.sections):
        prefix = prefix_of(target.tokenizer)
        for length in asked.lengths:
            windows = tuple(
                (p.prompt(length, prefix), p.document.ids_T[p.end : p.end + asked.scored_tokens].tolist())
                for p in chosen.points
            )
            rows = tuple(_row(number, window) for number, window in enumerate(windows))
            tasks.append(QualityWindows(f"perplexity {tokens(length)}", rows, length, windows))
    if "texts" in asked.sections:
        points = chosen.points[: asked.prompts]
        new = asked.max_new_tokens
        tasks += continuations(points, asked.lengths, target, max_new_tokens=new, name="texts {}")
    notes = [f"{count} {reason}" for reason, count in chosen.dropped.items()]
    if ENGINES in asked.sections:
        notes.append(_bytes(asked, target.info.head_dim))
    if ROWS in asked.sections:
        notes.append("rows of a step are measured by python -m benchmarks rows")
    return Suite(
        str(settings["name"]),
        tuple(tasks),
        scale=Scale("perplexity", None, higher_is_better=False),
        summarise=_summary,
        title="Quality of a quantised cache",
        notes=notes,
        figures=FIGURES,
        own_systems=lambda builder: systems_of(asked, builder),
    )


def systems_of(asked: QualitySettings, builder: Builder) -> list[System]:
    """Caches with each choice of bits, split and axes; QuantSpec's draft and the artifact's on them."""
    entries: list[dict[str, Any]] = []
    if {"texts", "perplexity", ENGINES} & set(asked.sections):
        entries += [
            {"cache": {"name": f"int{bits}", "split": split}}
            for bits in asked.bits
            for split in asked.splits
            if {"perplexity", ENGINES} & set(asked.sections) or bits == 8
        ]
    if ENGINES in asked.sections:
        entries += [
            {
                "cache": {"name": "engine", "rule": rule, "at_once": at_once},
                "label": f"{rule} at once" if at_once else rule,
            }
            for rule in RULES
            for at_once in (False, True)
        ]
    if "axes" in asked.sections:  # QuantSpec Table 5
        entries += [
            {
                "cache": {
                    "name": "rounded",
                    "keys": k.value,
                    "values": v.value,
                    "bits": b,
                    "split": asked.splits[0],
                }
            }
            for b in asked.bits
            for v in (Axis.TOKEN, Axis.CHANNEL)
            for k in (Axis.TOKEN, Axis.CHANNEL)
        ]
    if "texts" in asked.sections:
        options = {key: value for key, value in (asked.method or {}).items() if key not in ("name", "draft")}
        entries += [
            {
                "method": {"name": METHOD, **options, "split": split},
                "label": f"{METHOD} {split}",
                "drafted": list(asked.drafted),
            }
            for split in asked.splits
        ]
    found = [system for entry in entries for system in builder.of(parse(entry))]
    return found + (_drafts(asked, builder) if asked.artifact and "texts" in asked.sections else [])


def _drafts(asked: QualitySettings, builder: Builder) -> list[System]:
    """The artifact's draft on the quantised cache, and over an evicted one that is there alone too."""
    held = Budget(ratio=asked.budget) if asked.budget < 1 else Budget(tokens=int(asked.budget))
    at_budget = replace(builder, budgets=(held,))
    cache = {"name": "int8", "split": asked.splits[0]}
    draft: dict[str, Any] = {"artifact": asked.artifact, "drafted": list(asked.drafted)}
    return [
        *builder.of(parse({**draft, "cache": cache})),
        *at_budget.of(parse(asked.policy)),
        *at_budget.of(parse({**draft, "policy": asked.policy})),
    ]


def _bytes(asked: QualitySettings, head_dim: int) -> str:
    """Bytes of a cached number by rule. Ours always stores 8 bits: 4 is what a draft reads of them."""
    found = {f"int{bits}": Rounding(bits=bits).bytes_per_number(head_dim) for bits in asked.bits}
    found |= {name: rule.bytes_per_number(head_dim) for name, rule in RULES.items()}
    listed = ", ".join(f"{name} {number:.3f}" for name, number in found.items())
    return f"bytes of an old number, scales included (int4: as much as is read): {listed}"


def _row(number: int, window: tuple[list[int], list[int]]) -> Example:
    return Example(f"{number:04d}", {"number": number, "sha256": ids_sha256([*window[0], -1, *window[1]])})


def _summary(records: ByTask) -> Summary:
    tasks = {}
    for name, some in records.items():
        scored = [one.measures for one in some if one.measures and "nats" in one.measures]
        if scored:
            nats, count = (sum(one[key] for one in scored) for key in ("nats", "tokens"))
            tasks[name] = round(perplexity(nats, int(count)), 4)
    return Summary(tasks=tasks)
