"""Tables and picture of the eviction benchmark.

Every figure stands beside what arithmetic predicts for it, where that is known.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from longtrain.bench import eviction_kernels, eviction_parts, eviction_train, eviction_ttft
from longtrain.bench.report import table

Row = Mapping[str, Any]

THEORY = {
    "prompt": "prompt_tokens",
    "attention": "attention",
    "forward TFLOP": "forward_tflop",
    "forward ms": "forward_ms",
    "LookaheadKV +": "lookaheadkv_ms",
    "fused +": "lookaheadkv_fused_ms",
    "second pass +": "lookaheadkv_second_pass_ms",
    "second pass, fused +": "lookaheadkv_second_pass_fused_ms",
    "SnapKV +": "snapkv_ms",
    "SpecKV +": "speckv_ms",
    "SpecKV TFLOP": "speckv_tflop",
    "LAQ +": "laq_ms",
    "LAQ decode GB": "laq_decode_gb",
}
"""Columns of the theoretical table; those with a plus are milliseconds over the forward."""

NOTES = {
    "theory": (
        "Rooflines at 70% of peak arithmetic and 90% of peak bandwidth, bf16, batch 1. The lookahead rows "
        "ride in the prefill's products or run as a second pass, which reads weights and cache again; "
        "`fused`: the attention weights of the observing rows are never written out. `causal` counts half "
        "of the attention's square, `full` all of it."
    ),
    "ttft": (
        "Token ids in, first answer token on the host and the cache compacted. `added` is paired with a run "
        "of the full cache right before, p10 and p90 over pairs; `overhead` is the median of the paired "
        "ratios. Theory is that of this GPU (LookaheadKV: second pass, fused). LAQ and SpecKV write 32 "
        "tokens each, launched one by one, without CUDA graphs. Peak memory has the weights of target and "
        "draft in it. LookaheadKV's paper measured, at 8K on an H100 over a forward of about 187 ms: "
        "LookaheadKV + 11 ms, SnapKV + 20, SpecKV + 121, LAQ + 509 (Fig. 2)."
    ),
    "parts": (
        "Each part alone on the cache of one prefilled prompt, by wall clock; `queued`: by CUDA events "
        "behind other work, so that the host's launches are hidden as they are behind a prefill."
    ),
    "training": (
        "Prefill: the packed pass over prompt and response, no gradients, no LM head, the last layer left "
        "after its K and V. Step: forward, backward, clipping and optimizer. Ratio of the medians."
    ),
    "kernels": (
        "One layer, caches cold. The bound reads and writes everything once at peak bandwidth, and "
        "multiplies at peak rate. `difference`: the largest to the torch twin, over its largest value."
    ),
}
TITLES = {
    "theory": "Theory",
    "ttft": "Time to first token",
    "parts": "Parts of the added time",
    "training": "A training step",
    "kernels": "Importance kernels",
}
COLUMNS = {
    "ttft": eviction_ttft.COLUMNS,
    "parts": eviction_parts.COLUMNS,
    "training": eviction_train.COLUMNS,
    "kernels": eviction_kernels.COLUMNS,
}


def markdown(rows: Sequence[Row], *, shape: str, device: str) -> str:
    """All sections that have rows, as Markdown.

    Args:
        rows: of `eviction.measure`.
        shape: the measured target's.
        device: what it ran on, for the title.
    """
    parts = [f"# Cost of eviction: {shape} on {device}"]
    for name in TITLES:
        own = [row for row in rows if row["section"] == name]
        if own:
            body = _theory(own) if name == "theory" else _measured(own, COLUMNS[name])
            parts.append(f"## {TITLES[name]}\n\n{NOTES[name]}\n\n{body}")
    return "\n\n".join(parts) + "\n"


def _theory(rows: Sequence[Row]) -> str:
    """A table for each shape and GPU."""
    done = [row for row in rows if "failed" not in row]
    found = []
    for shape, draft, gpu in dict.fromkeys((row["shape"], row["draft_shape"], row["gpu"]) for row in done):
        own = [row for row in done if (row["shape"], row["gpu"]) == (shape, gpu)]
        found.append(f"{shape}, SpecKV's draft {draft}, {gpu}:\n\n{table(own, THEORY)}")
    return "\n\n".join(found)


def _measured(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """A table without the columns that no row has anything for."""
    used = {head: key for head, key in columns.items() if any(_has(row, key) for row in rows)}
    return table(rows, used)


def _has(row: Any, key: str) -> bool:
    for part in key.split("."):
        row = row.get(part) if isinstance(row, Mapping) else None
    return row is not None


def picture(rows: Sequence[Row]) -> bytes | None:
    """A PNG: overhead of each method by prompt length, measured and predicted, and where LookaheadKV's goes.

    None where no time to first token was measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [row for row in rows if row["section"] == "ttft" and "extra_ms" in row]
    if not measured:
        return None
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(row["method"] for row in measured):
        own = [row for row in measured if row["method"] == name]
        lengths = [row["prompt_tokens"] for row in own]
        middle = [row["extra_ms"]["median"] for row in own]
        low = [max(0.0, row["extra_ms"]["median"] - row["extra_ms"]["p10"]) for row in own]
        high = [max(0.0, row["extra_ms"]["p90"] - row["extra_ms"]["median"]) for row in own]
        line = left.errorbar(lengths, middle, yerr=[low, high], marker="o", capsize=3, label=name)
        theory = [(row["prompt_tokens"], row["theory_ms"]) for row in own if "theory_ms" in row]
        if theory:
            left.plot(*zip(*theory, strict=True), linestyle=":", color=line[0].get_color())
    left.set_xscale("log", base=2)
    places = sorted({row["prompt_tokens"] for row in measured})
    left.set_xticks(places, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in places])
    if all(row["extra_ms"]["median"] > 0 for row in measured):
        left.set_yscale("log")
    _label(left, "prompt tokens", "added to the first token, ms (dotted: theory)")
    parts = [row for row in rows if row["section"] == "parts" and "scores" in row]
    names = [f"{row['method']}\n{row['prompt_tokens']}" for row in parts]
    base = [0.0] * len(parts)
    for key in ("scores", "selection", "compaction"):
        values = [row[key]["ms"]["median"] for row in parts]
        if parts:
            right.bar(names, values, bottom=base, label=key)
        base = [a + b for a, b in zip(base, values, strict=True)]
    right.tick_params(axis="x", labelsize=7)
    _label(right, "", "each part alone, ms")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110, metadata={"Software": None})
    return content.getvalue()


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
