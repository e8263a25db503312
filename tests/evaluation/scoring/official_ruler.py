"""RULER's scorer transcribed, and what it gives for answers that an evaluation stored.

`python tests/evaluation/scoring/official_ruler.py runs/NAME/eval/SUITE` prints both scores of every task of
the suites `ruler`, `needle` and `eviction`, and exits 1 where they are not the same.

Source: NVIDIA/RULER, scripts/eval/evaluate.py (`postprocess_pred`) and scripts/eval/synthetic/constants.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def official_post(text: str) -> str:
    text = text.strip()
    return re.compile(r"[\x00-\x1f]").sub("\n", text).strip()


def summed(values: Iterable[float]) -> float:
    """`sum` of the Pythons before 3.12, which do not correct for lost digits."""
    total = 0.0
    for value in values:
        total = total + value
    return total


def official_all(preds: Sequence[str], refs: Sequence[Sequence[str]]) -> float:
    parts = [
        summed([1.0 if r.lower() in pred.lower() else 0.0 for r in ref]) / len(ref)
        for pred, ref in zip(preds, refs, strict=True)
    ]
    return round(summed(parts) / len(preds) * 100, 2)


def official_part(preds: Sequence[str], refs: Sequence[Sequence[str]]) -> float:
    parts = [
        max([1.0 if r.lower() in pred.lower() else 0.0 for r in ref])
        for pred, ref in zip(preds, refs, strict=True)
    ]
    return round(summed(parts) / len(preds) * 100, 2)


def rescored(lines: Iterable[Mapping[str, Any]], system: str) -> dict[str, tuple[float, float]]:
    """(Stored score, the official scorer's) of each task and length, or kind of question, in percent.

    Quotations, which RULER does not have, are compared with runs of white space as one space.

    Args:
        lines: of `examples.jsonl`.
        system: whose answers.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        kind, length = line["facets"].get("task"), line["facets"].get("length")
        name = " ".join(str(part) for part in (line["task"], kind or length) if part)
        groups.setdefault(name, []).append(line)
    found = {}
    for name, some in groups.items():
        preds = [official_post(line["outputs"][system]["texts"][-1]) for line in some]
        if some[0]["facets"].get("task") == "quote":
            preds = [" ".join(text.split()) for text in preds]
        score = official_part if name.startswith("qa_") else official_all
        stored = round(summed(line["outputs"][system]["score"] for line in some) / len(some) * 100, 2)
        found[name] = (stored, score(preds, [line["references"] for line in some]))
    return found


def main(folder: str) -> int:
    text = (Path(folder) / "examples.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    equal = True
    sys.stdout.write("| system | task | stored | RULER's scorer |\n|---|---|---|---|\n")
    for system in lines[0]["outputs"]:
        for name, (stored, official) in rescored(lines, system).items():
            sys.stdout.write(f"| {system} | {name} | {stored:.2f} | {official:.2f} |\n")
            equal &= stored == official
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
