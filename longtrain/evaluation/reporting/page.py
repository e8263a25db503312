"""`report.html`: one page with its data, scripts and styles inside, which asks the network for nothing.

All that comes from outside (outputs, names, settings) travels as JSON that cannot end its element, and
becomes text nodes in the browser; no part of it is ever read as markup.
"""

from __future__ import annotations

import html
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from longtrain.errors import ConfigError

Json = dict[str, Any]

EXAMPLES_BYTES = 12_000_000
"""Most bytes of examples inside a page: a browser still opens it at once."""
RUN_SCRIPTS = ("core.js", "tables.js", "plots.js", "examples.js", "start.js")
COMPARE_SCRIPTS = ("core.js", "tables.js", "compare.js")
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def check_plotly() -> None:
    """Refuse now what `page` could not do after hours of work.

    Raises:
        ConfigError: plotly is not installed.
    """
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError("report=html needs plotly; run: pip install 'longtrain[report]'")


def page(
    results: Json,
    examples: Iterable[Json],
    *,
    timings: Json | None = None,
    examples_bytes: int = EXAMPLES_BYTES,
) -> bytes:
    """The page of a run.

    Args:
        results: of `results.assemble`.
        examples: of `outcomes.examples`; more than fit are thinned out, evenly over the tasks.
        timings: `{"speed": [...]}` to show, if speed was measured.
        examples_bytes: most bytes of examples.

    Raises:
        ConfigError: plotly is not installed.
    """
    check_plotly()
    from plotly.offline import get_plotlyjs

    every = list(examples)
    shown = thinned(every, examples_bytes)
    data = {"results": results, "timings": timings, "examples": shown, "examples_total": len(every)}
    return _filled(f"{results['title']}: {results['target']['name']}", data, [get_plotlyjs()], RUN_SCRIPTS)


def compare_page(compared: Json) -> bytes:
    """The page of a comparison, of `compare.compare`."""
    return _filled(f"Comparison: {compared['suite']}", {"results": compared}, [], COMPARE_SCRIPTS)


def thinned(examples: Sequence[Json], most_bytes: int) -> list[Json]:
    """As many examples as fit, in their order: the same share of every task, spread over it, at least one."""
    sizes = [len(as_script(example)) for example in examples]
    total = sum(sizes)
    if total <= most_bytes:
        return list(examples)
    by_task: dict[str, list[int]] = {}
    for place, example in enumerate(examples):
        by_task.setdefault(example["task"], []).append(place)
    share = most_bytes / total
    while True:
        kept = [
            places[(2 * i + 1) * len(places) // (2 * count)]
            for places in by_task.values()
            for count in [max(1, int(share * len(places)))]
            for i in range(count)
        ]
        if sum(sizes[place] for place in kept) <= most_bytes or len(kept) == len(by_task):
            return [examples[place] for place in sorted(kept)]
        share *= 0.9


def as_script(value: Any) -> str:
    """JSON that may stand in a script element: ASCII, without `<`, `>` and `&`."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _filled(title: str, data: Mapping[str, Any], libraries: Sequence[str], scripts: Sequence[str]) -> bytes:
    code = [*libraries, *(_asset(name) for name in scripts)]
    parts = {
        "title": html.escape(title),
        "style": _asset("page.css"),
        "data": as_script(data),
        "scripts": "\n".join(f"<script>{text}</script>" for text in code),
    }
    template = _asset("page.html")
    filled = re.sub(r"\[\[(\w+)\]\]", lambda match: parts[match[1]], template)
    return filled.encode("utf-8", "replace")


def _asset(name: str) -> str:
    return resources.files("longtrain.evaluation.reporting").joinpath("web", name).read_text("utf-8")
