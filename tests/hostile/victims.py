"""What is attacked: a folder of each kind that longtrain writes, and what a reader takes from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from longtrain import methods, provenance
from longtrain.artifact import Artifact
from longtrain.data.chat.prompts import Answers
from longtrain.data.packing.prepared import Prepared, PreparedWriter
from longtrain.errors import ArtifactError
from longtrain.evaluation.harness.results_journal import ResultsJournal
from longtrain.features.shards import FeatureFiles
from longtrain.files import write_files
from longtrain.jobs import export
from longtrain.pickled import read_pickled_tensors
from longtrain.targets.loading import random_target
from longtrain.targets.model import Target
from longtrain.targets.shapes import SHAPES
from longtrain.training import checkpoint
from longtrain.training.tensor_file import pieces_of

SETTINGS = {"protocol": {"seed": 0}, "target": "abc"}
SERVED = {"variant": "embedding", "n_kv_heads": 1, "mapping": "calibrated"}
"""A retrieval head that SGLang's interface can serve."""
TRAINED = ("longspec", "eagle3", "lookaheadkv", "kvzap", "specontext", "indexer")
"""Methods whose artifacts are made with their default settings, for a tiny target."""


@dataclass(frozen=True)
class Victim:
    """A kind of folder.

    Args:
        make: writes one.
        read: everything that a user gets of one, as a value that can be compared.
        part: whether a reader may give a part of what was written, each record whole: the lines of a journal
            that a kill left, or the features of one rank.
        unread: files that people read and longtrain does not.
    """

    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    part: bool = False
    unread: tuple[str, ...] = ()


def hashed(tensors: Any) -> dict[str, str]:
    """What tensors are, as values that can be compared."""
    found = {}
    for name, tensor in dict(tensors).items():
        raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        found[name] = f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(raw).hexdigest()}"
    return found


@cache
def _target() -> Target:
    return random_target({**SHAPES["llama_micro"], "num_hidden_layers": 6}, seed=0)


def module_artifact(name: str, *, seed: int = 1) -> Artifact:
    """An artifact of a fresh module with its method's default settings."""
    torch.manual_seed(seed)
    spec = methods.get(name)
    config = spec.config()
    module = spec.build(config, _target().info)
    facts = {"step": 4, "data": {"name": "text", "sources": [{"id": "org/a", "license": "mit"}]}}
    return Artifact.from_module(name, config, module=module, target=_target(), provenance=facts)


def _artifact(name: str) -> Victim:
    def make(folder: Path) -> None:
        module_artifact(name).save(folder)

    def read(folder: Path) -> Any:
        found = Artifact.load(folder)
        found.build(_target())
        return [found.method, found.config, found.target.to_json(), hashed(found.tensors), found.provenance]

    return Victim(make, read, unread=("README.md", "local.json", "evidence.json", "*.png"))


def _engine_folder(method: str, form: str, **fields: Any) -> Victim:
    """A folder that engines serve, which is loaded in an artifact's place."""

    def make(folder: Path) -> None:
        torch.manual_seed(1)
        spec = methods.get(method)
        config = spec.config(**fields)
        module = spec.build(config, _target().info)
        formats = spec.formats
        assert formats is not None
        facts = {"step": 4, "data": {"stages": [{"doc_tokens": 128}]}}
        write_files(folder, formats.write(form, module.state_dict(), config, _target(), facts, folder.name))

    def read(folder: Path) -> Any:
        formats = methods.get(method).formats
        assert formats is not None
        if not formats.reads(folder):
            raise ArtifactError(f"{folder} holds nothing that {method} reads")
        found = formats.read(folder, None)
        return [found.config, found.target.to_json(), hashed(found.tensors)]

    return Victim(make, read, unread=("README.md",))


def _make_results_journal(folder: Path) -> None:
    with ResultsJournal(folder, "full", SETTINGS) as journal:
        for number in range(6):
            journal.put(f"task:{number}", {"records": [{"score": number / 7, "tokens": [1, 2, number]}]})


def _read_results_journal(folder: Path) -> Any:
    done = ResultsJournal(folder, "full", SETTINGS, write=False).done
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
    return [saved.step, saved.facts, hashed(checkpoint.trained_tensors(path))]


def _make_run(folder: Path) -> None:
    """A run of joint training that has ended, as `export` finds it."""
    torch.manual_seed(1)
    spec = methods.get("joint")
    config = spec.config()
    method = {"name": "joint", **json.loads(json.dumps(asdict(config)))}
    pieces = {checkpoint.WEIGHTS: pieces_of(spec.build(config, _target().info).state_dict())}
    facts = checkpoint.flat({"method": method, "trainer": {"max_steps": 3}})
    about = {"step": 3, "facts": facts}
    assert checkpoint.write(folder / "train" / "checkpoints", about, pieces, writer=True) is None
    settings = {"method": method, "target": {"path": "tiny"}, "seed": 0}
    provenance.write(folder / "train", settings, data={"name": "d", "sha256": "0"}, target={}, init=None)


def _read_run(folder: Path) -> Any:
    trained = folder / "train"
    path = checkpoint.find(trained / "checkpoints", "auto")
    if path is None:
        raise ArtifactError(f"nothing was trained in {folder}")
    saved = checkpoint.read(path)
    asked: Any = SimpleNamespace(method=None)
    settings = export._settings(trained, asked)
    config = export._config(methods.get(settings["method"]["name"]), settings["method"])
    export._same_settings(saved, settings["method"], trained)
    facts = export._facts(trained, settings, home=folder, step=saved.step, trust=False)
    del facts["export"]  # of this moment
    return [asdict(config), facts, hashed(checkpoint.trained_tensors(path))]


def _make_features(folder: Path) -> None:
    for rank in range(2):
        shards = FeatureFiles(folder, rank=rank, shard_bytes=1500)
        shards.claim()
        for number in (2 * rank, 2 * rank + 1):
            stored = {"k": torch.full((10, 2, 4), float(number)).bfloat16()}
            shards.add(f"{number:040d}", stored, kind="row", outputs="kv=1", name=f"doc{number}")
        shards.close()


def _read_features(folder: Path) -> Any:
    shards = FeatureFiles(folder)
    keys = [f"{number:040d}" for number in range(4)]
    return [[key, hashed(shards.read(key, key))] for key in keys if key in shards]


def _make_pickled(folder: Path) -> None:
    folder.mkdir(parents=True)
    torch.save({"a": torch.arange(32.0).view(4, 8), "b": torch.ones(3).bfloat16()}, folder / "x.bin")


VICTIMS: dict[str, Victim] = {
    "results journal": Victim(_make_results_journal, _read_results_journal, part=True),
    "answers": Victim(_make_answers, _read_answers, part=True),
    "prepared data": Victim(_make_prepared, _read_prepared),
    "checkpoints": Victim(_make_checkpoints, _read_checkpoints),
    "joint run": Victim(_make_run, _read_run),
    "features of two ranks": Victim(_make_features, _read_features, part=True),
    "torch.save": Victim(_make_pickled, lambda folder: hashed(read_pickled_tensors(folder / "x.bin"))),
    "speculators folder": _engine_folder("eagle3", "speculators", layers=[1, 2, 4]),
    "flat folder": _engine_folder("eagle3", "flat", layers=[1, 2, 4]),
    "sglang folder": _engine_folder("specontext", "sglang", **SERVED),
    **{f"artifact of {name}": _artifact(name) for name in TRAINED},
}
"""Name of a kind -> how one is made and read."""
