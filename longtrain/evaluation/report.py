"""What an evaluation leaves on disk: JSON, a Markdown table and a picture, each whole or not at all."""

from __future__ import annotations

import io
from typing import Any

from longtrain.plots import arms
from longtrain.plots import label as label_axes
from longtrain.tables import interval, markdown, tokens

Json = dict[str, Any]


def acceptance_table(scores: Json, timings: Json | None = None) -> str:
    """The Markdown report of an acceptance run.

    Args:
        scores: of `scores.scores`.
        timings: `{"speed": rows of speed.measure_speed}`, or None where speed was not measured.
    """
    speed = {row["length"]: row for row in (timings or {}).get("speed", [])}
    parts = [_headline(scores), _main_table(scores, speed)]
    parts += [_depth_table(scores), _position_table(scores), _kind_table(scores), _difference_table(scores)]
    parts.append(_mass_table(scores))
    return "\n\n".join(part for part in parts if part) + "\n"


def acceptance_picture(scores: Json) -> bytes:
    """A PNG: acceptance length by context length with intervals, acceptance by depth and by position."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    by_length, by_depth, by_position = figure.subplots(1, 3)
    for variant in scores["variants"]:
        cells, name = variant["lengths"], variant["name"]
        points = [(cell["length"], cell["tau"]) for cell in cells if cell["tau"]["value"] is not None]
        values = [tau["value"] for _, tau in points]
        bars = arms([tau for _, tau in points])
        by_length.errorbar([x for x, _ in points], values, yerr=bars, marker="o", capsize=3, label=name)
        for cell in (cells[0], cells[-1]) if len(cells) > 1 else cells:
            label = f"{name} @ {tokens(cell['length'])}"
            rates = [(row["depth"], row["rate"]["value"]) for row in cell["by_depth"] if row["tried"]]
            by_depth.plot(*zip(*rates, strict=True), marker="o", label=label) if rates else None
            middles = [((r["from"] + r["below"]) / 2, r["tau"]["value"]) for r in cell["by_position"]]
            middles = [(x, y) for x, y in middles if y is not None]
            by_position.plot(*zip(*middles, strict=True), marker="o", label=label) if middles else None
    lengths = sorted({cell["length"] for variant in scores["variants"] for cell in variant["lengths"]})
    by_length.set_xscale("log", base=2)
    by_length.set_xticks(lengths, [tokens(length) for length in lengths])
    label_axes(by_length, "context length, tokens", "acceptance length τ (95% interval)")
    label_axes(by_depth, "depth of the drafted token", "accepted, given that its parent was")
    label_axes(by_position, "place in the generated text, tokens", "acceptance length τ")
    by_depth.set_ylim(0, 1)
    by_depth.xaxis.get_major_locator().set_params(integer=True)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110, metadata={"Software": None})
    return picture.getvalue()


def summary(variant: Json, cell: Json, figures: Json | None) -> list[str]:
    """One line of a short table: draft, context, τ, accepted, repeated, output, tokens/s and their ratio."""
    speed = "-"
    if figures is not None:
        own = figures[variant["name"]]
        speed = f"{own['tokens_per_s']:.1f} ({own['ratio']:.2f}×)"
    return [
        variant["name"],
        tokens(cell["length"]),
        interval(cell["tau"]),
        _percent(cell["acceptance_rate"]["value"]),
        _percent(cell["repeated_share"]),
        _exactness(cell["exactness"]),
        speed,
    ]


def _headline(scores: Json) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in scores["kinds"].items())
    dropped = "; ".join(f"{count} {reason}" for reason, count in scores["dropped"].items()) or "none"
    heat = "greedy" if not scores["temperature"] else f"temperature {scores['temperature']:g}"
    return (
        "# Acceptance\n\nτ: tokens a target forward, its own token included, prefill not; pooled over "
        f"prompts, with 95% bootstrap intervals over prompts.\n{scores['prompts']} prompts ({kinds}; "
        f"{scores['documents']} documents), the same continuation points at every length, "
        f"{scores['max_new_tokens']} new tokens, {heat}. Dropped: {dropped}."
    )


def _main_table(scores: Json, speed: dict[int, Json]) -> str:
    header = [
        "draft",
        "context",
        "prompts",
        "τ",
        "accepted/drafted",
        "repeated",
        "τ, not repetitive",
        "output",
    ]
    header += ["cache MB", "draft MB", *(["tokens/s", "plain", "speed-up"] if speed else [])]
    rows = []
    for variant, cell in _cells(scores):
        row = [variant["name"], tokens(cell["length"]), str(cell["prompts"]), interval(cell["tau"])]
        row += [interval(cell["acceptance_rate"]), _percent(cell["repeated_share"])]
        row += [interval(cell["tau_not_repetitive"]), _exactness(cell["exactness"])]
        row += [f"{cell['cache_bytes'] / 1e6:.1f}", f"{cell['draft_bytes'] / 1e6:.2f}"]
        if speed:
            figures = speed[cell["length"]]["figures"]
            own = figures[variant["name"]]
            row += [
                f"{own['tokens_per_s']:.1f}",
                f"{figures['plain']['tokens_per_s']:.1f}",
                f"{own['ratio']:.2f}×",
            ]
        rows.append(row)
    return markdown(header, rows)


def _depth_table(scores: Json) -> str:
    deepest = max((len(cell["by_depth"]) for _, cell in _cells(scores)), default=0)
    rows = []
    for variant, cell in _cells(scores):
        rates = [_percent(row["rate"]["value"]) for row in cell["by_depth"]]
        rows.append([variant["name"], tokens(cell["length"]), *rates, *["-"] * (deepest - len(rates))])
    header = ["draft", "context", *(f"depth {depth}" for depth in range(1, deepest + 1))]
    return "## By depth (accepted, given that the parent was)\n\n" + markdown(header, rows)


def _position_table(scores: Json) -> str:
    rows, header = [], ["draft", "context"]
    for variant, cell in _cells(scores):
        header[2:] = [f"tokens {place['from']} to {place['below'] - 1}" for place in cell["by_position"]]
        places = [interval(place["tau"]) for place in cell["by_position"]]
        rows.append([variant["name"], tokens(cell["length"]), *places])
    return "## By place in the generated text (τ)\n\n" + markdown(header, rows)


def _kind_table(scores: Json) -> str:
    kinds = list(scores["kinds"])
    if len(kinds) < 2:
        return ""
    rows = [
        [variant["name"], tokens(cell["length"]), *(interval(cell["by_kind"][kind]) for kind in kinds)]
        for variant, cell in _cells(scores)
    ]
    return "## By kind of text (τ)\n\n" + markdown(["draft", "context", *kinds], rows)


def _difference_table(scores: Json) -> str:
    if not scores["differences"]:
        return ""
    rows = [[d["first"], d["second"], tokens(d["length"]), interval(d["tau"])] for d in scores["differences"]]
    header = ["draft", "minus", "context", "difference of τ"]
    return "## Differences over the same prompts (paired bootstrap)\n\n" + markdown(header, rows)


def _mass_table(scores: Json) -> str:
    if not scores.get("attention_mass"):
        return ""
    rows = [
        [
            tokens(m["length"]),
            str(m["layer"]),
            str(m["window"]),
            _percent(m["outside"]),
            _percent(m["outside_no_sinks"]),
        ]
        for m in scores["attention_mass"]
    ]
    header = ["context", "layer", "window", "outside the window", "the same without the first 4 tokens"]
    return "## The target's attention that the draft's window cannot see\n\n" + markdown(header, rows)


def _cells(scores: Json) -> list[tuple[Json, Json]]:
    return [(variant, cell) for variant in scores["variants"] for cell in variant["lengths"]]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _exactness(found: Json | None) -> str:
    if found is None:
        return "not compared"
    if not found["different"]:
        return "identical"
    if not found["judged"]:
        return f"{found['different']}/{found['compared']} differ (sampled)"
    gap = "" if found["largest_gap"] is None else f", gap ≤ {found['largest_gap']:.1g}"
    return f"{found['different']}/{found['compared']} differ{gap}, {found['violations']} beyond rounding"
