"""Tables and a picture of `bench suite=quantspec_quality`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from longtrain.bench import report

SCORES = {
    "context": "context_tokens",
    "old tokens": "reading",
    "perplexity": "perplexity",
    "change %": "change_percent.value",
    "from": "change_percent.low",
    "to": "change_percent.high",
    "same top token": "top1_agreement.value",
    "divergence, nats": "divergence_nats.value",
    "tokens": "tokens",
}
ROWS = {
    "cache": "cache",
    "rows": "rows",
    "attention equal": "attention_equal",
    "layers equal": "layers_equal",
    "first that differs": "first_layer",
    "hidden difference": "hidden_difference",
    "logit difference": "logit_difference",
    "logit spacing": "logit_spacing",
    "same argmax": "same_argmax",
}
TEXTS = {
    "system": "system",
    "context": "context_tokens",
    "shape": "shape",
    "texts": "exactness.compared",
    "tokens": "new_tokens",
    "different": "exactness.different",
    "beyond 0.02": "exactness.violations",
    "largest gap": "exactness.largest_gap",
    "tau": "tau",
    "accepted": "acceptance_rate",
}
TABLES = {"perplexity": SCORES, "axes": SCORES, "rows": ROWS, "texts": TEXTS}
"""Section -> columns of its table."""
TITLES = {
    "perplexity": "Old tokens quantised, beside full precision",
    "axes": "Which numbers share a step and a zero (QuantSpec Table 5)",
    "rows": "Rows of a step beside the same rows one by one",
    "texts": "Greedy texts beside plain decoding on the same cache",
}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table a section that was measured."""
    parts = []
    for section, columns in TABLES.items():
        if some := [row for row in rows if row["section"] == section]:
            parts.append(f"## {TITLES[section]}\n\n{report.table([*map(_shown, some)], columns)}\n")
    return "\n".join(parts)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose perplexity keeps the digits that readings differ in."""
    exact = {"perplexity": f"{row['perplexity']:.4f}"} if "perplexity" in row else {}
    return {**row, **exact}


def picture(rows: Sequence[Mapping[str, Any]]) -> bytes | None:
    """A PNG: change of perplexity and divergence by context length, a line a reading; None without scores."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["section"] == "perplexity" and "change_percent" in row]
    if not rows:
        return None
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    change, divergence = figure.subplots(1, 2)
    for name in dict.fromkeys(row["reading"] for row in rows):
        some = [row for row in rows if row["reading"] == name]
        x = [row["context_tokens"] for row in some]
        for axes, key in ((change, "change_percent"), (divergence, "divergence_nats")):
            y = [row[key]["value"] for row in some]
            arms = [
                [0.0 if row[key][end] is None else abs(row[key][end] - row[key]["value"]) for row in some]
                for end in ("low", "high")
            ]
            axes.errorbar(x, y, yerr=arms, marker="o", markersize=4, capsize=2, label=name)
    change.axhline(0, color="black", linewidth=0.8)
    change.set_ylabel("change of perplexity, % (95% interval)")
    divergence.set_ylabel("divergence from full precision, nats")
    divergence.set_yscale("log")
    lengths = sorted({row["context_tokens"] for row in rows})
    for axes in (change, divergence):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths])
        axes.minorticks_off()
        axes.set_xlabel("context, tokens")
    divergence.legend(fontsize=8, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
