"""Suite `acceptance`: acceptance of drafts by context length, depth, position in the output and kind of text.

Shapes: T context tokens, R query positions, H query heads, G KV heads, D head dim, E hidden dim, B batch (1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from longtrain.decoding.stats import Stats
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import ByTask, Metric, Suite, Summary
from longtrain.evaluation.suites.continuation import choose_points, continuations, held_out
from longtrain.evaluation.suites.drafted import (
    ACCEPTANCE_SCALE,
    acceptance_summary,
    first_and_others,
    needs_a_draft,
)
from longtrain.evaluation.suites.shared import settings_of
from longtrain.evaluation.task import Example, Facet, Measured, Task, rows_sha256
from longtrain.kernels.attention.sinks import with_sinks
from longtrain.settings import Count, Lengths, within
from longtrain.targets.step import OutputRequest

if TYPE_CHECKING:
    from longtrain.decoding.roles import Parts
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

METRICS = (
    Metric("cache", "cache_bytes", kind="mean", unit="bytes"),
    Metric("draft", "draft_bytes", kind="mean", unit="bytes"),
    Metric("attention outside the window", "outside", kind="mean", unit="percent"),
    Metric("the same without the first 4 tokens", "outside_no_sinks", kind="mean", unit="percent"),
)


@dataclass(frozen=True)
class AcceptanceSettings:
    """The keys of the suite; see conf/suite/acceptance.yaml."""

    lengths: Lengths
    prompts: Count
    max_new_tokens: Annotated[int, within(2)]
    ignore_eos: bool = False
    text: str | None = None
    kinds: tuple[str, ...] | None = ()
    baseline: bool = True
    attention_mass: bool = False
    home: str = "."
    data: str | None = None


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """One task for each context length, and optionally one for the attention outside a draft's window.

    The seed determines the continuation points.

    Raises:
        ConfigError: a wrong setting, or a length beyond the target's context window.
        DataError: there is no held-out text, or not enough of it.
    """
    asked = settings_of(AcceptanceSettings, settings)
    documents = held_out(target, asked.text, asked.kinds or (), home=asked.home, data=asked.data)
    longest, margin = asked.lengths[-1], asked.max_new_tokens
    chosen = choose_points(documents, longest=longest, count=asked.prompts, margin=margin, seed=seed)
    tasks = continuations(
        chosen.points, asked.lengths, target, max_new_tokens=margin, ignore_eos=asked.ignore_eos
    )
    extra = {"documents": len({point.document.name for point in chosen.points})}

    def summarise(records: ByTask) -> Summary:
        found = acceptance_summary(records)
        ends = [records.get(tasks[place].name, []) for place in (0, -1)]
        return replace(found, extra={**found.extra, **extra, **retention(*ends)} if found.tasks else {})

    return Suite(
        str(settings["name"]),
        (*tasks, *([AttentionOutside(tuple(tasks))] if asked.attention_mass else [])),
        scale=ACCEPTANCE_SCALE,
        summarise=summarise,
        title="Acceptance by context length",
        notes=[f"{count} {reason}" for reason, count in chosen.dropped.items()],
        metrics=METRICS,
        rivals=first_and_others,
        full_cache=asked.baseline,
        meet=needs_a_draft,
    )


def retention(shortest: Sequence[Record], longest: Sequence[Record]) -> dict[str, Any]:
    """(τ - 1) at the longest context over (τ - 1) at the shortest, as a table of the result."""
    short, long = (Stats(rows=[r for one in some for r in one.rows()]).tau for some in (shortest, longest))
    if not short > 1 or math.isnan(long):
        return {}
    share = (long - 1) / (short - 1)
    title = "(τ - 1) at the longest context over that at the shortest"
    return {"retention": share, "table": {"title": title, "columns": {"retention": share}}}


@dataclass(frozen=True)
class AttentionOutside(Measured):
    """Measures the target's attention outside a draft's window, at the layer whose KV cache the draft reads.

    Args:
        tasks: the tasks whose prompts are measured.
    """

    tasks: tuple[Task, ...]
    known: dict[Any, dict[str, float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cached measurements: several tree shapes of one draft have the same window."""
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
        return {"length": self.tasks[example.fields["task"]].size(example)}

    def settings(self) -> dict[str, Any]:
        """See `Measured`."""
        return {"task": self.name, "rows": len(self.rows), "rows_sha256": rows_sha256(self.rows)}

    def measure(self, target: Target, parts: Parts, examples: Sequence[Example]) -> list[dict[str, float]]:
        """`outside` and `outside_no_sinks` for drafts that have a window; an empty mapping for others."""
        layer, window = (getattr(parts.draft, name, None) for name in ("kv_layer", "window"))
        if layer is None or window is None:
            return [{} for _ in examples]
        found = []
        for example in examples:
            key = (example.id, layer, window)
            if key not in self.known:
                task = self.tasks[example.fields["task"]]
                row = Example(example.fields["row"], example.fields)
                prompt = task.encode(row, target.require_tokenizer(), max_tokens=0).ids
                self.known[key] = attention_mass(target, prompt, layer=layer, window=window)
            found.append(self.known[key])
        return found


MASS_ROWS = 16
"""Number of last positions of a context whose attention is measured."""
SINKS = 4
"""Number of first tokens of a context that count as attention sinks."""


@torch.no_grad()
def attention_mass(target: Target, prompt: Sequence[int], *, layer: int, window: int) -> dict[str, float]:
    """Shares of the attention of a prompt's last `MASS_ROWS` tokens, averaged over these and heads.

    Args:
        target: the frozen model.
        prompt: token ids.
        layer: the layer whose queries and keys are used; negative counts from the end.
        window: previous tokens that count as inside, besides the token itself.

    Returns:
        `outside`: the share on tokens before the window; `outside_no_sinks`: the same without the first
        `SINKS` tokens of the prompt (attention sinks).
    """
    layer %= target.info.n_layers
    ids_T = torch.tensor(list(prompt), device=target.device)
    pos_T = torch.arange(len(ids_T), device=target.device)
    q_HRD = torch.empty(0)

    def keep(at: int, q_BHTD: Tensor, _k_BGTD: Tensor, _v_BGTD: Tensor) -> None:
        nonlocal q_HRD
        if at == layer:
            q_HRD = q_BHTD[0, :, -MASS_ROWS:].float()

    outputs = OutputRequest("none", stop_at_layer=layer, kv=(layer,))
    k_TGD, _ = target.packed(ids_T, pos_T, (0, len(ids_T)), outputs, hook=keep).kv[layer]
    k_THD = k_TGD.repeat_interleave(target.info.n_heads // target.info.n_kv_heads, dim=1)
    pos_R = pos_T[-MASS_ROWS:]
    scores_HRT = torch.einsum("hrd,thd->hrt", q_HRD, k_THD.float()) * target.scaling(layer)
    visible_RT = pos_T[None] <= pos_R[:, None]
    scores_HRT = scores_HRT.masked_fill(~visible_RT, float("-inf"))
    probs_HRT = scores_HRT.softmax(-1)
    if (sinks_H := target.sinks(layer)) is not None:
        probs_HRT = with_sinks(probs_HRT, scores_HRT.logsumexp(-1), sinks_H)
    outside_RT = pos_T[None] < pos_R[:, None] - window
    no_sinks_RT = outside_RT & (pos_T[None] >= SINKS)
    seen = {"outside": outside_RT, "outside_no_sinks": no_sinks_RT}
    return {name: float((probs_HRT * seen_RT).sum(-1).mean().double()) for name, seen_RT in seen.items()}
