"""Pictures of a run, drawn from its `metrics.csv`."""

from __future__ import annotations

import re
from pathlib import Path

from longtrain.training import table

SMOOTH = 0.02
"""Width of the running mean, as a share of the steps."""


def draw(metrics: Path, picture: Path) -> bool:
    """One panel for the loss and one for each family of figures (`acc_1`, `acc_2` share one), as a PNG.

    Args:
        metrics: `metrics.csv` of a run.
        picture: the PNG to write.

    Returns:
        False when there is nothing to draw.
    """
    rows = table.read(metrics)
    if not rows:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in rows[0] if name.startswith(("train/", "val/"))]
    panels: dict[str, list[str]] = {}
    for name in names:
        panels.setdefault(re.sub(r"[_/@.-]?(depth|d)?[_/]?\d+$", "", name.split("/", 1)[1]), []).append(name)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.1 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, members) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(lines, columns, place)
        for name in members:
            points = [(int(row["step"]), float(row[name])) for row in rows if row[name] not in ("", "nan")]
            steps, values = [step for step, _ in points], [value for _, value in points]
            if name.startswith("train/"):
                values = _running_mean(values, max(1, int(SMOOTH * len(values))))
            marker = "o" if name.startswith("val/") else ""
            axes.plot(steps, values, label=name, linewidth=1.2, marker=marker, markersize=3)
        axes.set_title(title)
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
        if len(members) > 1:
            axes.legend(fontsize=7)
    figure.savefig(picture, dpi=110)
    return True


def _running_mean(values: list[float], width: int) -> list[float]:
    """Mean of the last `width` values at each place."""
    return [
        sum(part) / len(part)
        for part in (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    ]
