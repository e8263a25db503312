"""The Markdown report and the pictures of an eviction run."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from longtrain.decoding.ranking import RECALLS
from longtrain.evaluation.eviction_protocol import ARTIFACT, FULL, ORACLE, Json
from longtrain.evaluation.eviction_tasks import CONTINUE, QUOTED
from longtrain.plots import arms
from longtrain.tables import interval, markdown, tokens

BOUNDS = (FULL, ORACLE)


def table(scores: Json, timings: Json) -> str:
    """The Markdown report: accuracy, its share of the full cache's, differences, tasks, ranks, memory, time.

    Args:
        scores: of `Figures.scores`.
        timings: of `Figures.timings`.
    """
    parts = [_headline(scores), _exact(scores), _of_full(scores), _differences(scores)]
    parts += [_tasks(scores), _ranks(scores), _memory(scores), _times(scores, timings)]
    return "\n\n".join(part for part in parts if part) + "\n"


def accuracy_picture(scores: Json) -> bytes:
    """A PNG: exact match against budget, a panel a length; full cache and oracle as bounds."""
    figure, panels = _panels(len(scores["lengths"]))
    styles = _styles(scores["policies"])
    for axes, length in zip(panels, scores["lengths"], strict=True):
        for policy, cell in _at(scores, length):
            rows = cell["budgets"]
            marks = [row[figure_of(scores)] for row in rows]
            values = [mark["value"] for mark in marks]
            if policy["kind"] == FULL:
                axes.axhline(values[0], color="black", linestyle="--", linewidth=1, label=policy["name"])
                continue
            bars = {"yerr": arms(marks), "markersize": 4, "capsize": 2}
            axes.errorbar(_places(scores), values, **bars, **styles[policy["name"]], label=policy["name"])
        axes.set_xscale("log", base=2)
        axes.set_xticks(_places(scores), scores["budgets"], minor=False)
        axes.minorticks_off()
        axes.set_ylim(-0.02, 1.02)
        _label(axes, f"{tokens(length)} tokens", _budget_name(scores), f"{name_of(scores)} (95% interval)")
    return _png(figure)


def overhead_picture(scores: Json, timings: Json) -> bytes:
    """A PNG: exact match at the timed budget against overhead over the full cache's time to first token."""
    figure, panels = _panels(len(scores["lengths"]))
    styles = _styles(scores["policies"])
    for axes, length in zip(panels, scores["lengths"], strict=True):
        timed = {row["name"]: row for row in timings["rows"] if row["length"] == length}
        for policy, cell in _at(scores, length):
            rows = {found["budget"]: found[figure_of(scores)]["value"] for found in cell["budgets"]}
            if policy["kind"] == FULL:
                axes.axhline(rows[None], color="black", linestyle="--", linewidth=1, label=policy["name"])
            row = timed.get(policy["name"])
            if row is None:
                continue
            value = rows[row["times"]["budget"]]
            style = {**styles[policy["name"]], "linestyle": "none"}
            axes.plot(100 * row["overhead_share"], value, **style, label=policy["name"])
        axes.set_xscale("symlog", linthresh=1)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(-0.02, 1.02)
        budget = timings["rows"][0]["times"]["budget"] if timings["rows"] else ""
        title = f"{tokens(length)} tokens, budget {budget}"
        _label(axes, title, "overhead of the first token, %", name_of(scores))
    return _png(figure)


def summary(scores: Json) -> list[list[str]]:
    """Lines of a short table: policy, context, accuracy at each budget."""
    return [
        [policy["name"], tokens(cell["length"]), *_by_budget(cell, scores, figure_of(scores), short=True)]
        for policy, cell in _cells(scores)
    ]


def figure_of(scores: Json) -> str:
    """What stands for accuracy: exact match, or agreement where plain text alone is continued."""
    return "share" if scores["tasks"] == [CONTINUE] else "exact"


def name_of(scores: Json) -> str:
    """Its name."""
    return "agreement with the full cache" if scores["tasks"] == [CONTINUE] else "exact match"


def _headline(scores: Json) -> str:
    heat = "greedy" if not scores["temperature"] else f"temperature {scores['temperature']:g}"
    asked = " Questions stand " + (
        "at the end of the prompt, seen by every policy."
        if scores["question"] == "prompt"
        else "after eviction, seen by none of the policies (the oracle is told it and its answer)."
    )
    asked = "" if scores["tasks"] == [CONTINUE] else asked
    several = f", {scores['samples']} answers a prompt" if scores["samples"] > 1 else ""
    marks = [
        *(["exactly the values asked for, in any order"] if {*scores["tasks"]} - {CONTINUE, "quote"} else []),
        *([f"a quotation's first {QUOTED} words"] if "quote" in scores["tasks"] else []),
    ]
    exact = f" Exact match means {'; or '.join(marks)}." if marks else ""
    judged = (
        "\nTask `continue`: exact match means the whole continuation equals the full cache's, and the "
        "share contained is that of its tokens that do."
        if CONTINUE in scores["tasks"]
        else ""
    )
    return (
        f"# Eviction: {scores.get('target', '')}\n\n{scores['prompts']} prompts of each length "
        f"({', '.join(scores['tasks'])}, in equal parts), the same for every policy; {heat}{several}, at "
        f"most {scores['max_new_tokens']} new tokens.{asked} Budgets count rows of "
        f"each layer and KV head.{exact}{judged}"
    )


def _exact(scores: Json) -> str:
    rows = [
        [policy["name"], tokens(cell["length"]), *_by_budget(cell, scores, figure_of(scores))]
        for policy, cell in _cells(scores)
    ]
    title = f"## {name_of(scores).capitalize()} (95% intervals)\n\n"
    return title + markdown(["policy", "context", *_columns(scores)], rows)


def _of_full(scores: Json) -> str:
    rows = [
        [policy["name"], tokens(cell["length"]), *_by_budget(cell, scores, "of_full", digits=2)]
        for policy, cell in _cells(scores)
        if policy["kind"] != FULL
    ]
    header = ["policy", "context", *_columns(scores)]
    return "## Share of the full cache's exact match (paired bootstrap)\n\n" + markdown(header, rows)


def _differences(scores: Json) -> str:
    if not scores["differences"]:
        return ""
    rows = [
        [row["first"], row["second"], tokens(row["length"]), row["budget"], interval(row["exact"], 3)]
        for row in scores["differences"]
    ]
    header = ["policy", "minus", "context", "budget", "difference of exact match"]
    return "## Differences over the same prompts (paired bootstrap)\n\n" + markdown(header, rows)


def _tasks(scores: Json) -> str:
    rows = []
    for policy, cell in _cells(scores):
        for row in cell["budgets"]:
            found = [row["by_task"].get(task) for task in scores["tasks"]]
            marks = ["-" if one is None else f"{one['value']:.3f}" for one in found]
            rows.append(
                [
                    policy["name"],
                    tokens(cell["length"]),
                    row["budget"] or "-",
                    *marks,
                    interval(row["share"], 3),
                ]
            )
    header = ["policy", "context", "budget", *scores["tasks"], "values contained"]
    return "## Exact match by task\n\n" + markdown(header, rows)


def _ranks(scores: Json) -> str:
    rows = []
    for policy, cell in _cells(scores):
        ranks = cell["ranks"]
        if ranks is not None:
            found = [*(ranks["recall"][str(k)] for k in RECALLS), ranks["tau"]]
            marks = ["-" if value is None else f"{value:.3f}" for value in found]
            rows.append([policy["name"], tokens(cell["length"]), str(ranks["prompts"]), *marks])
    if not rows:
        return ""
    header = ["policy", "context", "prompts", *(f"recall@{k}" for k in RECALLS), "Kendall τ"]
    after = (
        " With the question after eviction the true scores are those of the answer's rows alone; modules "
        "trained with method.response=question_answer foretell the rows of question and answer together."
        if scores["question"] == "after"
        else ""
    )
    return (
        "## Ranking beside the true scores\n\nNeither side pooled; mean over layers and KV heads. The last "
        f"{scores['rank_skip']} positions of a prompt, which a policy's window holds unscored, are left "
        "out for all; recall at k is of prompts with more than k positions left. Scores that depend on the "
        f"budget are those of the first.{after}\n\n" + markdown(header, rows)
    )


def _memory(scores: Json) -> str:
    rows = []
    for policy, cell in _cells(scores):
        if policy["kind"] == FULL:
            continue
        for row in cell["budgets"]:
            sizes = [f"{row[key] / 1e6:.2f}" for key in ("bytes_before", "bytes_after")]
            kept = [f"{row['kept_rows']:.1f}", f"{100 * row['kept_share']:.1f}%"]
            rows.append([policy["name"], tokens(cell["length"]), row["budget"], *kept, *sizes])
    header = ["policy", "context", "budget", "rows kept", "share", "cache MB before", "after"]
    return "## Memory, mean of a prompt (room for the answer included)\n\n" + markdown(header, rows)


def _times(scores: Json, timings: Json) -> str:
    if not timings["rows"]:
        return ""
    rows = []
    for row in timings["rows"]:
        times = [f"{1e3 * row[key]:.2f}" for key in ("first_token_s", "full_s", "overhead_s")]
        share = f"{100 * row['overhead_share']:.2f}%"
        count = str(len(row["times"]["full_s"]))
        rows.append([row["name"], tokens(row["length"]), row["times"]["budget"], count, *times, share])
    header = [
        "policy",
        "context",
        "budget",
        "batches",
        "ms",
        "full cache ms",
        "overhead ms",
        "share",
    ]
    return (
        f"## Time to the first token\n\nMedians over batches of {timings['batch']}, eviction included; full "
        f"cache and policy in turn on the same prompts ({timings.get('device', '')}). Operations are "
        "launched one by one, and what that costs is included; `longtrain bench suite=eviction` measures "
        "it apart.\n\n" + markdown(header, rows)
    )


def _by_budget(cell: Json, scores: Json, figure: str, *, digits: int = 3, short: bool = False) -> list[str]:
    """A figure at each budget; the full cache has one for all."""
    rows = cell["budgets"] * (len(scores["budgets"]) if len(cell["budgets"]) == 1 else 1)
    if not short:
        return [interval(row[figure], digits) for row in rows]
    return ["-" if row[figure]["value"] is None else f"{row[figure]['value']:.{digits}f}" for row in rows]


def _columns(scores: Json) -> list[str]:
    return [f"budget {budget}" for budget in scores["budgets"]]


def _cells(scores: Json) -> Iterator[tuple[Json, Json]]:
    return ((policy, cell) for policy in scores["policies"] for cell in policy["lengths"])


def _at(scores: Json, length: int) -> Iterator[tuple[Json, Json]]:
    return ((policy, cell) for policy, cell in _cells(scores) if cell["length"] == length)


def _places(scores: Json) -> list[float]:
    """Where budgets stand on an axis: rows, or percent."""
    return [float(budget.removesuffix("%")) for budget in scores["budgets"]]


def _budget_name(scores: Json) -> str:
    shares = any(budget.endswith("%") for budget in scores["budgets"])
    return "budget, share of the prompt" if shares else "budget, rows of each KV head"


def _styles(policies: Sequence[Json]) -> dict[str, Json]:
    """Line and marker of each policy, the same in every picture: artifacts squares, the oracle grey."""
    from matplotlib import colormaps

    colours = [i for i in (*range(0, 20, 2), *range(1, 20, 2)) if i // 2 != 7]  # without the greys
    styles: dict[str, Json] = {}
    for at, policy in enumerate(one for one in policies if one["kind"] not in BOUNDS):
        marker = "s" if policy["kind"] == ARTIFACT else "o"
        styles[policy["name"]] = {
            "color": colormaps["tab20"](colours[at % len(colours)]),
            "marker": marker,
        }
    grey = {"color": "grey", "marker": "o", "linestyle": "--"}
    return {**styles, **{one["name"]: grey for one in policies if one["kind"] in BOUNDS}}


def _panels(count: int) -> tuple[Any, Sequence[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.2 + 4.2 * count, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def _png(figure: Any) -> bytes:
    """The picture, with one legend for all panels beside them."""
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110, metadata={"Software": None})
    return picture.getvalue()
