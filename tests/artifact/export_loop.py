"""Exports, and loads of each as `eval` makes them: `python tests/artifact/export_loop.py TARGET --json FILE`.

An artifact that verified when it was exported must verify when it is loaded with the same weights. The target
of the exports runs the model's own decoder, that of the loads the fused one too, as on a GPU. TARGET is a
folder, a Hub id or `tiny`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mutations import METHODS, made_of

from longtrain import methods, tables
from longtrain.artifact import Artifact
from longtrain.artifact.golden.checks import Check
from longtrain.errors import ArtifactError
from longtrain.targets.loading import load_target

SEEDS = range(5)
DTYPES = ("bfloat16", "float32")


def cases(count: int) -> Iterator[tuple[int, str, str]]:
    """(seed, dtype, method), every one of them about as often."""
    for number in range(count):
        yield SEEDS[number % 5], DTYPES[number // 6 % 2], METHODS[number % 6]


def loop(where: str, *, count: int, device: str, only: tuple[str, ...] = METHODS) -> Iterator[dict[str, Any]]:
    """A line for each export: what its own comparisons found, and those of loads.

    Args:
        where: the target.
        count: exports.
        device: of all targets.
        only: methods that are exported; cases of others are left out.
    """
    chosen = [case for case in cases(count) if case[2] in only]
    for dtype in DTYPES:
        target = load_target(where, dtype=dtype, device=device)
        other = load_target(where, dtype=dtype, device=device).fuse()
        for seed, its_dtype, name in chosen:
            if its_dtype != dtype:
                continue
            began, keys = time.perf_counter(), dict(methods.get(name).golden_keys)
            line: dict[str, Any] = {"method": name, "dtype": dtype, "seed": seed, "refused": []}
            with tempfile.TemporaryDirectory() as home:
                made = made_of(name, target, seed=seed)
                made.attach(target, **keys)
                line["exported"] = made.verification.summary()
                folder = made.save(Path(home) / name)
                for who, at_hand in (("own decoder", target), ("fused decoder", other)):
                    artifact = Artifact.load(folder)
                    try:
                        artifact.attach(at_hand, **keys)
                    except ArtifactError as error:
                        line["refused"].append(f"{who}: {error}")
                    line[who] = _worst(artifact.verification.checks)
            yield {**line, "seconds": round(time.perf_counter() - began, 1)}


def _worst(checks: list[Check]) -> dict[str, Any]:
    """The comparison that came nearest to its limit."""
    measured = [check for check in checks if check.limit]  # a choice has none: not one entry may differ
    worst = max(measured, key=lambda check: check.error / check.limit)
    return {"share_of_limit": round(worst.error / worst.limit, 4), "check": str(worst)}


def main() -> None:
    """Run the loop; ends with an error where a load was refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    lines = []
    for line in loop(asked.target, count=asked.count, device=asked.device, only=tuple(asked.methods)):
        tables.print_lines(json.dumps(line))
        lines.append(line)
    machine = torch.cuda.get_device_name() if asked.device.startswith("cuda") else "CPU"
    refused = sum(bool(line["refused"]) for line in lines)
    found = {"target": Path(asked.target).name, "machine": machine, "exports": len(lines), "refused": refused}
    tables.print_lines(json.dumps(found))
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps({**found, "lines": lines}, indent=1) + "\n")
    if refused:
        raise SystemExit(f"{refused} of {len(lines)} loads were refused")


if __name__ == "__main__":
    main()
