"""Attack folders of every kind and count what comes of it: `python -m tests.hostile --cases 3000 --seed 0`.

Outcomes:

    refused   one line that says what is wrong
    same      what is read is what was written, or a part of it in its order where lines or files of a journal
              are gone: what is missing is worked out again
    other     something else is read without a word
    lost      what was whole before is gone, or half of something new is in its place
    bare      an exception that nobody has put into a sentence
    hang      nothing for ten seconds

The status is 0 where the last four are zero.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from longtrain.errors import LongtrainError

from .attacks import ATTACKS
from .scenarios import SCENARIOS
from .victims import VICTIMS, Victim

SECONDS = 10
OUTCOMES = ("refused", "same", "other", "lost", "bare", "hang")
WRONG = OUTCOMES[2:]


@dataclass(frozen=True)
class Case:
    """What was done to one file, and what came of it."""

    kind: str
    attack: str
    what: str
    outcome: str
    said: str


class Hung(BaseException):
    """A reader did not come back."""


@contextmanager
def _in_time() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attacked(kind: str, victim: Victim, sound: Path, whole: Any, rng: random.Random) -> Case | None:
    """One case: a copy of a sound folder, one file of it attacked, and read.

    Args:
        kind: the victim's name.
        victim: how it is read.
        sound: a folder that nobody changes.
        whole: what is read of it.
        rng: chooses the file and what is done to it.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "x"
        shutil.copytree(sound, folder, symlinks=True)
        files = [
            path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not any(fnmatch(path.name, one) for one in victim.unread)
        ]
        path, name = rng.choice(files), rng.choice(sorted(ATTACKS))
        done = ATTACKS[name](path, rng)
        if not done:
            return None
        outcome, said = _outcome(victim, folder, whole)
        return Case(kind, name, f"{path.relative_to(folder)}: {done}", outcome, said)


def played(kind: str, turn: int, rng: random.Random) -> Case | None:
    """One case of a scenario, if it is played in this turn."""
    scenario = SCENARIOS[kind]
    if turn % scenario.every:
        return None
    with tempfile.TemporaryDirectory() as place:
        return Case(kind, *scenario.play(Path(place), rng))


def _outcome(victim: Victim, folder: Path, whole: Any) -> tuple[str, str]:
    try:
        with _in_time():
            found = victim.read(folder)
    except LongtrainError as error:
        said = str(error)
        return ("refused" if said and "\n" not in said and "weights_only=False" not in said else "bare"), said
    except ValueError as error:  # of `read_pickled`, whose callers name the file
        return ("refused" if victim is VICTIMS["torch.save"] else "bare"), repr(error)
    except OSError as error:
        return ("refused" if victim is VICTIMS["torch.save"] else "bare"), repr(error)
    except Hung:
        return "hang", ""
    except BaseException as error:
        return "bare", repr(error)
    if found == whole or (victim.part and found == [one for one in whole if one in found]):
        return "same", ""
    return "other", ""


def run(kinds: Sequence[str], cases: int, seed: int) -> list[Case]:
    """So many cases over some kinds in turn."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found: list[Case] = []
    with tempfile.TemporaryDirectory() as place:
        sound = {}
        for kind in kinds:
            if kind in SCENARIOS:
                continue
            folder = Path(place) / kind.replace(" ", "_")
            VICTIMS[kind].make(folder)
            sound[kind] = folder, VICTIMS[kind].read(folder)
        number = 0
        while len(found) < cases:
            kind = kinds[number % len(kinds)]
            rng = random.Random(f"{seed}/{number}")
            if kind in SCENARIOS:
                case = played(kind, number // len(kinds), rng)
            else:
                case = attacked(kind, VICTIMS[kind], *sound[kind], rng)
            number += 1
            if case is not None:
                found.append(case)
    logging.disable(logging.NOTSET)
    return found


def table(cases: Sequence[Case]) -> str:
    """Counts of outcomes by kind."""
    counts = Counter((case.kind, case.outcome) for case in cases)
    kinds = list(dict.fromkeys(case.kind for case in cases))
    lines = [f"{'':<26}" + "".join(f"{outcome:>9}" for outcome in OUTCOMES)]
    for kind in kinds:
        lines.append(f"{kind:<26}" + "".join(f"{counts[kind, outcome]:>9}" for outcome in OUTCOMES))
    total = Counter(case.outcome for case in cases)
    lines.append(f"{f'all {len(cases)}':<26}" + "".join(f"{total[outcome]:>9}" for outcome in OUTCOMES))
    return "\n".join(lines)


def main() -> None:
    """Run, print the table, and the cases that must not be."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    kinds = [*VICTIMS, *SCENARIOS]
    parser.add_argument("--kind", action="append", choices=kinds, help="only this; may be repeated")
    parser.add_argument("--json", type=Path, help="write the counts there too")
    asked = parser.parse_args()
    began = time.monotonic()
    found = run(asked.kind or kinds, asked.cases, asked.seed)
    sys.stdout.write(table(found) + "\n")
    if asked.json:
        counts = {kind: Counter(case.outcome for case in found if case.kind == kind) for kind in kinds}
        about = {"command": "python -m tests.hostile " + " ".join(sys.argv[1:]), "cases": len(found)}
        about |= {"seconds": round(time.monotonic() - began), "counts": counts}
        asked.json.write_text(json.dumps(about, indent=1) + "\n")
    wrong = [case for case in found if case.outcome in WRONG]
    for case in wrong:
        said = f"{case.outcome}: {case.kind}: {case.attack} {case.what}: {case.said}"
        sys.stdout.write(said[:400] + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
