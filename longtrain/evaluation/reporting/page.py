"""`report.html` and `compare.html`: self-contained pages with tables, pictures and scripts.

They make no network requests. Untrusted text (outputs, names, settings) is escaped, or is JSON
that becomes text nodes in the browser; no part of it is parsed as markup.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from longtrain.evaluation.reporting.comparisons import compare_report, speed_report
from longtrain.evaluation.reporting.document import to_html
from longtrain.evaluation.reporting.tables import report

Json = dict[str, Any]

EXAMPLES_BYTES = 12_000_000
"""Maximum bytes of examples inside a page, so that browsers open it quickly."""
SCRIPTS = ("tables.js", "examples.js")
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def page(
    results: Json,
    examples: Iterable[Json],
    *,
    timings: Json | None = None,
    pictures: Mapping[str, bytes] | None = None,
) -> bytes:
    """The HTML page of a run.

    Args:
        results: the output of `results.assemble`.
        examples: the output of `examples.examples`; if they do not fit, they are thinned evenly over the
            tasks.
        timings: `{"speed": [...]}`, if speed was measured.
        pictures: file name -> PNG, the output of `pictures.pictures`.
    """
    every = list(examples)
    data = {
        "scale": results["scale"],
        "systems": [
            {key: system[key] for key in ("name", "kind", "family", "budget")}
            for system in results["systems"]
        ],
        "examples": thinned(every, EXAMPLES_BYTES),
        "examples_total": len(every),
    }
    parts = [*report(results, timings), *speed_report(results, timings or {}, title="Speed")]
    protocol = {key: results[key] for key in ("protocol", "target", "baseline", "bootstrap")}
    facts = {
        system["name"]: {"facts": system["facts"], "extra": system["extra"]} for system in results["systems"]
    }
    body = [
        to_html(parts),
        *(_picture(name, content) for name, content in (pictures or {}).items()),
        '<section id="examples"></section>',
        "<h2>Protocol</h2>",
        _details("Settings that were hashed, target and bootstrap", protocol),
        _details("Systems as they ran", facts),
    ]
    return _filled(f"{results['title']}: {results['target']['name']}", body, data)


def compare_page(compared: Json) -> bytes:
    """The HTML page of a comparison, the output of `compare.compare`."""
    return _filled(f"Comparison: {compared['suite']}", [to_html(compare_report(compared))], {"examples": []})


def thinned(examples: Sequence[Json], most_bytes: int) -> list[Json]:
    """As many examples as fit, in order: the same share of every task, evenly spaced, at least one."""
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
    """JSON that is safe inside a script element: ASCII, without `<`, `>` and `&`."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _picture(name: str, content: bytes) -> str:
    data = base64.b64encode(content).decode()
    return f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'


def _details(title: str, values: Any) -> str:
    """JSON values in a collapsible block."""
    text = html.escape(json.dumps(values, indent=2, ensure_ascii=False))
    return f"<details><summary>{html.escape(title)}</summary><pre>{text}</pre></details>"


def _filled(title: str, body: Sequence[str], data: Json) -> bytes:
    parts = {
        "title": html.escape(title),
        "style": _asset("page.css"),
        "body": "\n".join(body),
        "data": as_script(data),
        "scripts": "\n".join(f"<script>{_asset(name)}</script>" for name in SCRIPTS),
    }
    filled = re.sub(r"\[\[(\w+)\]\]", lambda match: parts[match[1]], _asset("page.html"))
    return filled.encode("utf-8", "replace")


def _asset(name: str) -> str:
    return resources.files("longtrain.evaluation.reporting").joinpath("web", name).read_text("utf-8")
