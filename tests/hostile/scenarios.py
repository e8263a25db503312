"""What happens around files: names, links, two processes at once, kills, uploads that end early, ranks.

A scenario does one case in an empty folder and says what came of it, as `Case` has it. Nothing that was whole
before may be lost, and what is read afterwards is what one of those who wrote it has written.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longtrain.artifact import Artifact
from longtrain.data.packing.prepared import PREPARED, Prepared, PreparedWriter
from longtrain.errors import LongtrainError
from longtrain.evaluation.harness.results_journal import ResultsJournal
from longtrain.folders import finish_replacement, replaced_folder
from longtrain.settings import Name, convert
from longtrain.training import checkpoint
from longtrain.training.tensor_file import pieces_of
from tests.artifact.hub_server import Hub
from tests.helpers import PROCESSES
from tests.training import toy

from .victims import hashed, module_artifact

TakesAnswers = tuple[str, str, str, str]
"""(attack, what exactly, outcome, what was said)."""

FINE, REFUSED, BARE = 0, 3, 4
"""How a forked process ends: it did its work, refused it in one line, or raised something else."""
PATIENCE = 60.0
"""Seconds after which a process counts as hanging."""


@dataclass(frozen=True)
class Scenario:
    """What is done, and how often of its turns (a training takes seconds, a name microseconds).

    Args:
        play: (an empty folder, an RNG) -> what came of it.
        every: one turn in so many is played.
    """

    play: Callable[[Path, random.Random], TakesAnswers]
    every: int = 1


@cache
def _modules() -> tuple[Artifact, Artifact]:
    """Two artifacts of one kind that are not the same."""
    return module_artifact("indexer", seed=1), module_artifact("indexer", seed=2)


def _content(artifact: Artifact) -> Any:
    return hashed(artifact.tensors)


def _forked(work: Callable[[], Any]) -> int:
    """A process of its own that does some work and ends as `FINE`, `REFUSED` or `BARE`."""
    if child := os.fork():
        return child
    code = BARE
    try:
        work()
        code = FINE
    except LongtrainError as error:
        code = REFUSED if str(error) and "\n" not in str(error) else BARE
    finally:
        os._exit(code)


def _end(child: int) -> int | None:
    """How a forked process ended (negative: by which signal); None: it hung and was killed."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _outcome(ends: list[int | None], found: bool) -> str:
    """The outcome of processes that ended so, where what they left is right or not."""
    if None in ends:
        return "hang"
    if BARE in ends:
        return "bare"
    return "same" if found else "lost"


PARTS = (
    "a",
    "b.c",
    "..",
    ".",
    "",
    "~",
    "x" * 300,
    "é",
    " ",
    "-v",
    "a b",
    "\n",
    "\0",
    "*",
    "$HOME",
    "con",
    "%s",
)


def names(place: Path, rng: random.Random) -> TakesAnswers:
    """A name leads to a folder below its own place, or is refused."""
    what = rng.choice(("name=", "artifact="))
    name = rng.choice(("", "/", "~/")) + "/".join(rng.choice(PARTS) for _ in range(rng.randint(1, 4)))
    base = place / "runs"
    try:
        if what == "artifact=":
            Artifact.load(name, home=place)
            return what, repr(name), "other", "it loads something"
        folder = base / convert(name, Name, "name")
        folder.mkdir(parents=True)
    except LongtrainError as error:
        return what, repr(name), "refused" if "\n" not in str(error) else "bare", str(error)
    except Exception as error:
        return what, repr(name), "bare", repr(error)
    inside = base.resolve() in folder.resolve().parents and folder.name not in ("", ".", "..")
    return what, repr(name), "same" if inside else "other", str(folder)


WAYS = (
    "link to an artifact",
    "link to a folder of somebody else's",
    "link to a file",
    "dangling link",
    "link to itself",
    "a file",
    "a folder of somebody else's",
    ".x.old is a link",
    ".x.old is a file",
    ".x.new is a file",
    "link in the way there",
)


def links(place: Path, rng: random.Random) -> TakesAnswers:
    """An artifact is written where links and other people's files are; nothing of theirs changes."""
    one, two = _modules()
    theirs, way = place / "theirs", rng.choice(WAYS)
    (theirs / "thesis").mkdir(parents=True)
    (theirs / "thesis" / "text").write_text("years")
    folder = place / "checkpoints" / "x"
    folder.parent.mkdir()
    if way == "link to an artifact":
        one.save(place / "big")
        folder.symlink_to(place / "big")
    elif way == "link to a folder of somebody else's":
        folder.symlink_to(theirs / "thesis")
    elif way == "link to a file":
        folder.symlink_to(theirs / "thesis" / "text")
    elif way == "dangling link":
        folder.symlink_to(place / "gone" / "x")
    elif way == "link to itself":
        folder.symlink_to(folder)
    elif way == "a file":
        folder.write_text("years")
    elif way == "a folder of somebody else's":
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "text").write_text("years")
    elif way == "link in the way there":
        folder.parent.rmdir()
        (theirs / "disk").mkdir()
        folder.parent.symlink_to(theirs / "disk")
    else:
        one.save(folder)
        beside = folder.with_name(way.split()[0])
        if way.endswith("link"):
            beside.symlink_to(theirs / "thesis")
        else:
            beside.write_text("left")
    linked = folder.is_symlink()
    try:
        two.save(folder)
        outcome, said = ("same" if _content(Artifact.load(folder)) == _content(two) else "other"), ""
    except LongtrainError as error:
        outcome, said = "refused" if "\n" not in str(error) else "bare", str(error)
    except Exception as error:
        outcome, said = "bare", repr(error)
    texts = [theirs / "thesis" / "text"]
    texts += [folder] if way == "a file" else [folder / "deep" / "text"] if "deep" in said else []
    if any(text.read_text() != "years" for text in texts) or folder.is_symlink() != linked:
        outcome = "lost"
    return "save", way, outcome, said


def _prepare(folder: Path, shift: int) -> None:
    with replaced_folder(folder, PREPARED) as fresh:
        writer = PreparedWriter(fresh, 1000)
        for number in range(4):
            writer.add(np.arange(20) + number + shift, np.ones(20), name=f"d{number}", kind="text", val=False)
        source = {"source": {"reader": "text", "where": "x"}, "inputs": {"files": []}}
        writer.close({"weights": [1.0], "pad_id": 0, "sources": [source], "fingerprint": "f", "name": "x"})


def _first_id(folder: Path) -> int:
    finish_replacement(folder)
    return int(Prepared.open(folder).ids[0])


def two_processes(place: Path, rng: random.Random) -> TakesAnswers:
    """Two processes write one name at once; what is there then is that of one of them, whole."""
    what = rng.choice(("artifact", "data", "results"))
    folder, waits = place / "x", [rng.random() * 0.02 for _ in range(2)]
    modules = _modules()

    def work(number: int) -> None:
        time.sleep(waits[number])
        if what == "artifact":
            modules[number].save(folder)
        elif what == "data":
            _prepare(folder, 7 * number)
        else:
            with ResultsJournal(folder, "full", {}) as journal:
                for key in range(3):
                    journal.put(f"{number}:{key}", {"score": number})

    children = [_forked(lambda number=number: work(number)) for number in range(2)]
    ends = [_end(child) for child in children]
    if what == "results":
        done = set(ResultsJournal(folder, "full", {}, write=False).done)
        wrote = {f"{n}:{key}" for n, end in enumerate(ends) if end == FINE for key in range(3)}
        right = FINE in ends and wrote <= done
    elif what == "data":
        right = ends == [FINE, FINE] and _first_id(folder) in (0, 7)
    else:
        known = [_content(one) for one in modules]
        right = ends == [FINE, FINE] and _content(Artifact.load(folder)) in known
    left = [path.name for path in place.iterdir() if path.name.startswith(".x.")]
    return (
        what,
        f"{waits[0]:.4f} s and {waits[1]:.4f} s",
        _outcome(ends, right and not left),
        f"{ends} {left}",
    )


def kills(place: Path, rng: random.Random) -> TakesAnswers:
    """A process is killed while it writes again and again.

    What is read then is that of the last write that had come back, or of the one after it, and whole.
    """
    what, folder = rng.choice(("artifact", "data", "results", "checkpoints")), place / "x"
    modules, seconds = _modules(), rng.random() * 0.08
    done, tell = os.pipe()

    def tensors(step: int) -> dict[str, torch.Tensor]:
        return {"a": torch.full((64, 16), float(step))}

    def write(step: int) -> None:
        if what == "artifact":
            modules[step % 2].save(folder)
        elif what == "data":
            _prepare(folder, step)
        elif what == "results":
            with ResultsJournal(folder, "full", {}) as journal:
                journal.put(str(step), {"score": step})
        else:
            pieces = {checkpoint.WEIGHTS: pieces_of(tensors(step))}
            assert checkpoint.write(folder, {"step": step, "facts": {}}, pieces, writer=True) is None

    def found() -> Any:
        if what == "artifact":
            return _content(Artifact.load(folder))
        if what == "data":
            return _first_id(folder)
        if what == "results":
            return ResultsJournal(folder, "full", {}, write=False).done
        path = checkpoint.find(folder, "auto")
        assert path is not None
        return checkpoint.read(path).step, hashed(checkpoint.trained_tensors(path))

    def expected(step: int) -> Any:
        if what == "artifact":
            return _content(modules[step % 2])
        if what == "data":
            return step
        if what == "results":
            return {str(n): {"score": n} for n in range(step + 1)}
        return step, hashed(tensors(step))

    def work() -> None:
        for step in range(1, 900):
            write(step)
            os.write(tell, b".")

    write(0)
    child = _forked(work)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    ends = [_end(child)]
    os.close(tell)
    with os.fdopen(done, "rb") as stream:
        last = len(stream.read())
    when = f"after {seconds:.4f} s and {last} writes"
    try:
        right = found() in (expected(last), expected(last + 1))
        write(last + 2)  # and it goes on
    except LongtrainError as error:
        return what, when, "lost", str(error)
    return what, when, _outcome(ends, right), ""


def _push(folder: Path, url: str) -> None:
    """Push, with the client's settings changed in this process, which ends after it."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET, constants.ENDPOINT = False, True, url
    os.environ |= {"HF_ENDPOINT": url, "HF_TOKEN": "a_token_of_no_known_form"}
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 2)
    Artifact.load(folder).push("org/draft")


def push(place: Path, rng: random.Random) -> TakesAnswers:
    """An upload ends in the middle: the Hub has all of a push or none, and the next one goes on."""
    folder = _modules()[0].save(place / "x")
    hub, how = Hub(), rng.choice(("killed at a moment", "killed in an upload", "refused"))
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    seconds = rng.random() * 0.4
    try:
        hub.refuse = how == "refused"
        child = _forked(lambda: _push(folder, hub.url))
        if how == "killed in an upload":
            hub.second_upload = lambda: os.kill(child, signal.SIGKILL)
        elif how == "killed at a moment":
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        ends = [_end(child)]
        hub.refuse, hub.second_upload = False, lambda: None
        half = bool(hub.files) and set(hub.files) != _uploaded(folder)
        whole = _content(Artifact.load(folder)) == _content(_modules()[0])
        ends.append(_end(_forked(lambda: _push(folder, hub.url))))
        sent = {name: (folder / name).read_bytes() for name in _uploaded(folder)}
        right = whole and not half and ends[1] == FINE and hub.files == sent
        if how == "refused":
            right = right and ends[0] == REFUSED
    finally:
        hub.shutdown()
        hub.server_close()
    return how, f"after {seconds:.4f} s", _outcome(ends, right), f"{ends}"


def _uploaded(folder: Path) -> set[str]:
    """Files that a push sends: not those that a kill left half-written under a name with a dot before it."""
    return {path.name for path in folder.iterdir() if path.name != "local.json" and path.name[0] != "."}


TOY = ("noise=false", "steps=8", "accumulate=2", "checkpoint_every_steps=1", "val_every=4", "devices=2")


@cache
def _undisturbed() -> Any:
    """The weights that two ranks come to when nobody is killed."""
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        ends = [_ended(rank) for rank in _ranks(Path(place))]
        assert ends == [0, 0], ends
        return _weights(Path(place))


def _weights(folder: Path) -> Any:
    path = checkpoint.find(folder / "checkpoints", "auto")
    assert path is not None
    return checkpoint.read(path).step, hashed(checkpoint.trained_tensors(path))


def _ranks(folder: Path, *more: str) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(folder), *TOY, *more]
    found = [PROCESSES.Process(target=toy.rank, args=(number, port, words)) for number in range(2)]
    for one in found:
        one.start()
    return found


def _ended(rank: Any) -> int | None:
    rank.join(PATIENCE)
    if rank.exitcode is None:
        rank.kill()
        return None
    return int(rank.exitcode)


def two_ranks(place: Path, rng: random.Random) -> TakesAnswers:
    """One of two ranks that train together (gloo, CPU) is ended; the run goes on to the same weights."""
    name = rng.choice(("SIGKILL", "SIGTERM"))
    which, seconds = rng.randrange(2), rng.random() * 6
    running = _ranks(place, "sleep=0.05")
    time.sleep(seconds)
    if running[which].is_alive():
        os.kill(running[which].pid, getattr(signal, name))
    if not (place / "checkpoints").exists():  # not all had met: whoever starts ranks ends the others then
        running[which].join(10)
        for one in running:
            one.terminate()
    ends = [_ended(rank) for rank in running]
    ends += [_ended(rank) for rank in _ranks(place)]
    what = f"rank {which} after {seconds:.2f} s"
    if None in ends:
        return name, what, "hang", f"{ends}"
    return (
        name,
        what,
        "same" if ends[2:] == [0, 0] and _weights(place) == _undisturbed() else "lost",
        f"{ends}",
    )


SCENARIOS = {
    "names": Scenario(names),
    "links": Scenario(links),
    "two processes of a name": Scenario(two_processes),
    "kills": Scenario(kills),
    "push": Scenario(push, every=4),
    "two ranks": Scenario(two_ranks, every=20),
}
"""Name -> what happens."""
