"""Draw README's picture from its JSON files: `python docs/picture.py`."""

from __future__ import annotations

import json
from pathlib import Path

from longtrain.plots import label, panels, png

FOLDER = Path(__file__).parents[1] / "recipes" / "results" / "published"
PANELS = {
    "Qwen2.5-Coder-0.5B-Instruct": "qwen25_coder_05b/eagle3_speculation_mixed.json",
    "Qwen2.5-Coder-1.5B-Instruct": "qwen25_coder_15b/eagle3_speculation_muon.json",
}
SYSTEMS = {
    "e_mix tree 4-8-8-8": "EAGLE-3, tree",
    "lookup": "look-up alone, nothing trained",
    "joined tree 4-8-8-8": "EAGLE-3 with look-up, tree",
    "auto": "EAGLE-3 with look-up, decode=auto",
}
TASKS = ("gov_report", "qmsum", "multi_news", "lcc", "repobench-p")
WIDTH = 0.2
"""Width of a bar; the bars of a task are side by side around its place on the axis."""


def draw() -> bytes:
    """Return the speed over plain decoding by task, one panel for each target, as a PNG file."""
    figure, axes = panels(len(PANELS), size=(5.2, 3.3))
    for one, (title, file) in zip(axes, PANELS.items(), strict=True):
        results = json.loads((FOLDER / file).read_text(encoding="utf-8"))
        speeds = {(row["task"], row["system"]): row["speed"] for row in results["speed"]}
        pooled = {row["system"]: row["speed"] for row in results["speed_pooled"]}
        for number, (system, name) in enumerate(SYSTEMS.items()):
            places = [place + WIDTH * (number - (len(SYSTEMS) - 1) / 2) for place in range(len(TASKS) + 1)]
            heights = [*(speeds[task, system] for task in TASKS), pooled[system]]
            one.bar(places, heights, WIDTH, label=name)
        one.axhline(1, color="black", linestyle="--", linewidth=1)
        one.set_xticks(range(len(TASKS) + 1), [*TASKS, "all"], fontsize=8)
        one.set_ylim(0, 7)
        label(one, y="speed over plain decoding", title=title, legend=one is axes[0])
    return png(figure)


if __name__ == "__main__":
    (FOLDER / "speed.png").write_bytes(draw())
