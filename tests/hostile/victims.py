"""What is attacked: a folder of each kind that longtrain writes, and what a reader takes from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longtrain import methods
from longtrain.artifact import Artifact
from longtrain.data.chat.prompts import Answers
from longtrain.data.rows.prepared import Prepared, PreparedWriter
from longtrain.evaluation.harness.ledger import Ledger
from longtrain.features.shards import FeatureFiles
from longtrain.pickled import read_pickled_tensors
from longtrain.targets.loading import random_target
from longtrain.targets.model import Target
from longtrain.training import checkpoint
from longtrain.training.tensor_file import pieces_of

SETTINGS = {"protocol": {"seed": 0}, "target": "abc"}
TRAINED = ("longspec", "eagle3", "lookaheadkv", "kvzap", "specontext", "indexer")
"""Methods whose artifacts are made with their default settings, for a tiny target."""


@dataclass(frozen=True)
class Victim:
    """A kind of folder.

    Args:
        make: writes one.
        read: everything that a user gets of one, as a value that can be compared.
        prefix: whether a reader may give the beginning of what was written, where the end is cut off: the
            lines of a journal that a kill left.
        unread: files that people read and longtrain does not.
    """

    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    prefix: bool = False
    unread: tuple[str, ...] = ()


def _hashed(tensors: Any) -> dict[str, str]:
    found = {}
    for name, tensor in dict(tensors).items():
        raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        found[name] = f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(raw).hexdigest()}"
    return found


@cache
def _target() -> Target:
    return random_target("llama_micro", seed=0)


def _artifact(name: str) -> Victim:
    def make(folder: Path) -> None:
        torch.manual_seed(1)
        spec = methods.get(name)
        config = spec.config()
        module = spec.build(config, _target().info)
        facts = {"step": 4, "data": {"name": "text", "sources": [{"id": "org/a", "license": "mit"}]}}
        Artifact.from_module(name, config, module=module, target=_target(), provenance=facts).save(folder)

    def read(folder: Path) -> Any:
        found = Artifact.load(folder)
        found.build(_target())
        return [found.method, found.config, found.target.to_json(), _hashed(found.tensors), found.provenance]

    return Victim(make, read, unread=("README.md", "local.json", "evidence.json", "*.png"))


def _make_ledger(folder: Path) -> None:
    with Ledger(folder, "full", SETTINGS) as ledger:
        for number in range(6):
            ledger.put(f"task:{number}", {"records": [{"score": number / 7, "tokens": [1, 2, number]}]})


def _read_ledger(folder: Path) -> Any:
    done = Ledger(folder, "full", SETTINGS, write=False).done
    return [[key, done[key]] for key in done]


def _make_answers(folder: Path) -> None:
    folder.mkdir(parents=True)
    answers = Answers(folder / "a.jsonl", {})
    for number in range(6):
        answers.add([[number, 7]], [[number, 5, 6]])


def _read_answers(folder: Path) -> Any:
    found = Answers(folder / "a.jsonl", {})
    if found._journal is not None:
        found._journal.close()
    return [[key, ids] for key, ids in found.done.items()]


def _make_prepared(folder: Path) -> None:
    folder.mkdir(parents=True)
    writer = PreparedWriter(folder, 1000)
    for number in range(4):
        writer.add(np.arange(20) + number, np.ones(20), name=f"d{number}", kind="text", val=number == 3)
    source = {"source": {"reader": "text", "where": "x"}, "inputs": {"files": []}}
    writer.close({"weights": [1.0], "pad_id": 0, "sources": [source], "fingerprint": "f", "name": "x"})


def _read_prepared(folder: Path) -> Any:
    found = Prepared.open(folder)
    arrays = [found.ids, found.mask, found.start, found.length, found.labels, found.kind, found.val]
    return [json.dumps(found.manifest, sort_keys=True), found.names, [array.tolist() for array in arrays]]


def _make_checkpoints(folder: Path) -> None:
    for step in (1, 2):
        gen = torch.Generator().manual_seed(step)
        pieces = pieces_of({"a": torch.randn(8, 4, generator=gen), "b": torch.ones(3)})
        about = {"step": step, "facts": {"method.name": "x", "trainer.max_steps": 9}}
        assert checkpoint.write(folder, about, {checkpoint.WEIGHTS: pieces}, writer=True) is None


def _read_checkpoints(folder: Path) -> Any:
    path = checkpoint.find(folder, "auto")
    assert path is not None
    saved = checkpoint.read(path)
    return [saved.step, saved.facts, _hashed(checkpoint.trained_tensors(path))]


def _make_features(folder: Path) -> None:
    shards = FeatureFiles(folder, shard_bytes=1500)
    for number in range(4):
        stored = {"k": torch.full((10, 2, 4), float(number)).bfloat16()}
        shards.add(f"{number:040d}", stored, kind="row", want="kv=1", name=f"doc{number}")
    shards.close()


def _read_features(folder: Path) -> Any:
    shards = FeatureFiles(folder)
    keys = [f"{number:040d}" for number in range(4)]
    return [[key, _hashed(shards.read(key, key))] for key in keys if key in shards]


def _make_pickled(folder: Path) -> None:
    folder.mkdir(parents=True)
    torch.save({"a": torch.arange(32.0).view(4, 8), "b": torch.ones(3).bfloat16()}, folder / "x.bin")


VICTIMS: dict[str, Victim] = {
    "ledger": Victim(_make_ledger, _read_ledger, prefix=True),
    "answers": Victim(_make_answers, _read_answers, prefix=True),
    "prepared data": Victim(_make_prepared, _read_prepared),
    "checkpoints": Victim(_make_checkpoints, _read_checkpoints),
    "features": Victim(_make_features, _read_features, prefix=True),
    "torch.save": Victim(_make_pickled, lambda folder: _hashed(read_pickled_tensors(folder / "x.bin"))),
    **{f"artifact of {name}": _artifact(name) for name in TRAINED},
}
"""Name of a kind -> how one is made and read."""
