"""Time of verifying checksums: `python -m benchmarks.checksum_time --target FOLDER --json FILE`.

Every kind of file with a checksum is loaded several times, while the hashing functions are timed. The result
is their share of the load's CPU time, which depends little on other programs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from longtrain import files, journals
from longtrain.artifact import Artifact
from longtrain.data.packing.prepared import Prepared, PreparedWriter
from longtrain.targets.loading import load_target


@contextmanager
def hashing() -> Iterator[list[float]]:
    """Context manager that yields a list of the CPU seconds of each hashing call inside."""
    taken: list[float] = []

    def timed(hash_of: Callable[..., str]) -> Callable[..., str]:
        def call(*what: Any) -> str:
            began = time.process_time()
            found = hash_of(*what)
            taken.append(time.process_time() - began)
            return found

        return call

    before = files.json_sha256, journals._sum
    files.json_sha256, journals._sum = (timed(one) for one in before)  # type: ignore[assignment]
    try:
        yield taken
    finally:
        files.json_sha256, journals._sum = before  # type: ignore[assignment]


def loads(target: str, place: Path) -> dict[str, Callable[[], object]]:
    """Return the timed loads by name."""
    tiny = load_target("tiny", dtype="bfloat16", device="cpu")
    data, journal = place / "data", place / "journal.jsonl"
    data.mkdir()
    writer = PreparedWriter(data, 1000)
    ids: np.ndarray = np.arange(10_000) % 900
    for number in range(400):
        writer.add(ids, ids >= 0, name=str(number), kind="t", val=False)
    source = {"source": {"reader": "text", "where": "x"}, "inputs": {"files": []}}
    writer.close({"weights": [1.0], "pad_id": 0, "sources": [source], "fingerprint": "f", "name": "x"})
    answer = {"system": "full", "example": "0", "text": "word " * 200, "tokens": list(range(256))}
    journal.write_bytes(b"".join(journals.with_checksum(answer) for _ in range(2000)))
    return {
        "an artifact (tiny_longspec)": lambda: Artifact.load("tiny_longspec"),
        "an artifact (tiny_lookaheadkv)": lambda: Artifact.load("tiny_lookaheadkv"),
        "the same, and its golden outputs": lambda: Artifact.load("tiny_lookaheadkv").build(tiny),
        "a target": lambda: load_target(target, dtype="float32", device="cpu"),
        "prepared data of 4M tokens": lambda: Prepared.open(data),
        "a journal of 2000 answers": lambda: list(journals.read_journal(journal, advice="")),
    }


def main() -> None:
    """Time every load, print the shares, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="tiny", help="a folder of a target, or a GGUF file")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as place:
        for what, load in loads(asked.target, Path(place)).items():
            load()
            whole, shares = [], []
            for _ in range(asked.runs):
                with hashing() as taken:
                    began = time.process_time()
                    load()
                    whole.append(time.process_time() - began)
                shares.append(sum(taken) / whole[-1])
            found[what] = {"cpu_s": statistics.median(whole), "share": statistics.median(shares)}
            sys.stdout.write(f"{what:<34} {found[what]['cpu_s']:>9.4f} s {found[what]['share']:>8.2%}\n")
    if asked.json:
        asked.json.write_text(json.dumps({"runs": asked.runs, "checksums": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
