"""Recipes fitted to a target: lengths to its window, text where none is given, memory to what is free."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from longtrain.assets import MANIFEST, asset_dir
from longtrain.errors import ArtifactError
from longtrain.files import as_json, read_json
from longtrain.prompt import following, memory
from longtrain.prompt.checks import NO_CUDA

Run = Callable[..., subprocess.CompletedProcess[str]]
GIB = 2**30
SMALL = ("longspec", "eagle3", "dspark", "lookaheadkv", "specontext", "kvzap", "joint")


@pytest.fixture
def window_1k(tmp_path: Path) -> Path:
    """The bundled target's files with a window of 1024 positions."""
    folder = tmp_path / "model"
    shutil.copytree(asset_dir("bundled") / "tiny", folder)
    config = read_json(folder / "config.json")
    (folder / "config.json").write_bytes(as_json({**config, "max_position_embeddings": 1024}))
    return folder


@pytest.mark.parametrize("recipe", SMALL)
def test_a_small_recipe_follows_the_window(recipe: str, window_1k: Path, run: Run) -> None:
    done = run("+recipe=" + recipe + "_small", f"target.path={window_1k}", "trainer=cpu", "dry_run=true")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "fitted to the target's window of 1024" in line]
    assert len(said) == 1 and "doc_tokens 1024 (was 16384)" in said[0] and "lengths " in said[0]
    assert sum("five novels" in line for line in done.stderr.splitlines()) == 1


def test_lengths_leave_room_for_what_is_written(window_1k: Path) -> None:
    cfg = _cfg(window_1k, suite={"name": "acceptance", "lengths": ["512", "2k", "8k"], "max_new_tokens": 128})
    line, faults = following.fit_lengths(cfg, ["eval"], [])
    assert list(cfg.suite.lengths) == [512, 768] and not faults  # 1024 - 128 = 896, a multiple of 256 below
    assert line == "fitted to the target's window of 1024 tokens: lengths [512,768] (was [512,2048,8192])"


def test_an_artifact_says_the_window_of_a_target_that_is_not_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "draft"
    folder.mkdir(parents=True)
    target = {"name": "folder-of-another-machine", "max_positions": 1024}
    (folder / MANIFEST).write_bytes(as_json({"target": target}))
    suite = {"name": "acceptance", "lengths": ["2k"], "max_new_tokens": 128}
    cfg = _cfg(None, suite=suite, artifact="draft", home=str(tmp_path))
    line, faults = following.fit_lengths(cfg, ["eval"], [])
    assert list(cfg.suite.lengths) == [768] and line and not faults


def test_a_gguf_file_that_cannot_be_read_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    file = tmp_path / "cut.gguf"
    file.write_bytes(b"GGUF")
    cfg = _cfg(file, suite={"name": "acceptance", "lengths": ["2k"], "max_new_tokens": 128})
    with pytest.raises(ArtifactError, match=r"cut.gguf cannot be read as a target .*if it was cut short"):
        following.fit_lengths(cfg, ["eval"], [])


def test_a_target_that_is_not_supported_is_refused_before_training(window_1k: Path, run: Run) -> None:
    config = read_json(window_1k / "config.json")
    (window_1k / "config.json").write_bytes(as_json({**config, "model_type": "gemma2"}))
    done = run("+recipe=longspec_local", f"target.path={window_1k}", "trainer=cpu", "dry_run=true")
    assert done.returncode == 1 and "(gemma2) " in done.stderr and "supported: llama, qwen2" in done.stderr


def test_a_typed_text_without_the_kinds_of_a_recipe_is_taken_whole(tmp_path: Path, run: Run) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("x = 1")
    words = ["eval", "+recipe=quickstart", "artifact=tiny_longspec", "suite.text=code", "dry_run=true"]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert "suite.text=code has no text of suite.kinds=[book], so all of it is taken" in done.stderr
    done = run(*words, "suite.kinds=[book]")
    assert done.returncode == 1
    assert (
        "no text of suite.kinds=['book'] at code; kinds there: code; pass suite.kinds=[code]" in done.stderr
    )
    (tmp_path / "code" / "book.txt").write_text("It was a dark night.")
    assert "so all of it is taken" not in run(*words).stderr


def test_a_length_that_fits_stays(window_1k: Path) -> None:
    cfg = _cfg(window_1k, suite={"name": "needle", "lengths": ["512", "976"], "max_new_tokens": 48})
    assert following.fit_lengths(cfg, ["eval"], []) == (None, [])
    assert list(cfg.suite.lengths) == ["512", "976"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lengths=[2k]"], ["lengths=2048 is beyond", "pass at most 896"]),
        (["method.offset_max_tokens=1025"], ["method.offset_max_tokens=1025 is beyond", "pass at most 1024"]),
        (
            ["data.stages=[{fraction: 1.0, sequence_tokens: 4096, doc_tokens: 2048}]", "lengths=[4k]"],
            ["data.stages.doc_tokens=2048 is beyond", "lengths=4096 is beyond"],
        ),
    ],
)
def test_a_typed_length_beyond_the_window_is_refused(
    words: list[str], says: list[str], window_1k: Path, tmp_path: Path, run: Run
) -> None:
    done = run(
        "+recipe=longspec_small", f"target.path={window_1k}", "trainer=cpu", f"home={tmp_path}", *words
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and len(lines) == len([word for word in says if "is beyond" in word])
    assert all(word in done.stderr for word in says)
    assert not (tmp_path / "data").exists() and not (tmp_path / "runs").exists()


def test_all_faults_are_told_at_once(window_1k: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr("longtrain.prompt.checks.ctypes.CDLL", _no_driver)
    words = ["lengths=[2k]", "method.offset_max_tokens=4096", "optim.lr=-1", "data.books=/no/such/folder"]
    lines = run("+recipe=longspec_small", f"target.path={window_1k}", *words).stderr.splitlines()
    assert all(line.startswith("longtrain: error: ") for line in lines)
    wanted = [
        "lengths=2048",
        "method.offset_max_tokens=4096",
        "optim.lr=-1",
        NO_CUDA.format("cuda"),
        "/no/such",
    ]
    assert len(lines) == len(wanted) and all(any(word in line for line in lines) for word in wanted)


def test_a_mixture_without_files_has_a_name_of_its_own(tmp_path: Path) -> None:
    cfg = _cfg(None, data=_mixture())
    line = following.shipped_text(cfg, ["train"], [])
    assert line and "bundled:train" in line
    assert (cfg.data.books, cfg.data.name) == ("bundled:train", "small_bundled")
    given = _cfg(None, data={**_mixture(), "books": str(tmp_path)})
    assert following.shipped_text(given, ["train"], []) is None and given.data.name == "small"


def test_an_evaluation_reads_what_was_prepared_of_the_users_files(tmp_path: Path) -> None:
    made = tmp_path / "data" / "small-01234567"
    made.mkdir(parents=True)
    (made / "manifest.json").write_text("{}")
    cfg = _cfg(None, data=_mixture(), home=str(tmp_path))
    assert following.shipped_text(cfg, ["eval"], []) is None and cfg.data.name == "small"


@pytest.mark.parametrize(
    ("word", "yes"),
    [
        ("data.stages=[]", True),
        ("data.stages.0.doc_tokens=4", True),
        ("+data={stages: []}", False),
        ("data=small", False),
        ("data.val_sequences=2", False),
    ],
)
def test_what_counts_as_typed(word: str, yes: bool) -> None:
    assert following.typed("data.stages", [word]) is yes


class TestMemory:
    def test_rows_become_shorter_and_a_step_takes_more_of_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cfg = _trained(monkeypatch, free=1.1 * GIB)
        (line,) = memory.fit_memory(cfg, ["train"], [])
        rows = cfg.data.stages[0].sequence_tokens
        assert rows < 32768 and rows * cfg.trainer.accumulate_grad_batches == 32768
        assert rows >= cfg.data.stages[0].doc_tokens
        assert line.startswith("fitted to 1.1 GiB of free memory:") and f"[{rows}] (was [32768])" in line

    def test_what_fits_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cfg = _trained(monkeypatch, free=500 * GIB)
        assert memory.fit_memory(cfg, ["train"], []) == [] and cfg.data.stages[0].sequence_tokens == 32768

    def test_what_is_typed_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cfg = _trained(monkeypatch, free=1.1 * GIB)
        words = ["data.stages=[...]", "method.chunk_tokens=0"]
        assert memory.fit_memory(cfg, ["train"], words) == [] and cfg.data.stages[0].sequence_tokens == 32768

    def test_prompts_of_an_evaluation_fit_the_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cfg = _trained(monkeypatch, free=500 * GIB)
        cfg.suite = {"name": "acceptance", "lengths": [8192], "max_new_tokens": 128, "batch": 50}
        monkeypatch.setattr(memory, "_free", lambda device, cfg: 2 * GIB)
        (line,) = memory.fit_memory(cfg, ["eval"], [])
        # keys and values of a token, fp32: 2 x 6 layers x 2 heads x 64 numbers x 4 bytes = 6144; two caches
        weights = 4 * (4096 * 384 + 6 * (384 * 64 * (8 + 2 + 2 + 8) + 3 * 384 * 704))
        assert cfg.suite.batch == int((2 * GIB / 1.05 - weights) / (2 * 6144)) // 8320
        assert line.endswith(f"suite.batch {cfg.suite.batch} (was 50)")

    def test_a_run_that_goes_on_keeps_its_rows(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        cfg = _trained(monkeypatch, free=500 * GIB)
        cfg.run_dir = str(tmp_path)
        folder = tmp_path / "train"
        (folder / "checkpoints" / "last.ckpt").mkdir(parents=True)
        kept = OmegaConf.to_container(cfg)
        assert isinstance(kept, dict)
        kept["data"]["stages"][0]["sequence_tokens"], kept["trainer"]["accumulate_grad_batches"] = 8192, 4
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(kept)))
        assert memory.fit_memory(cfg, ["train"], []) == []
        assert (cfg.data.stages[0].sequence_tokens, cfg.trainer.accumulate_grad_batches) == (8192, 4)


def _no_driver(name: str) -> None:
    raise OSError(name)


def _mixture() -> dict[str, Any]:
    return {
        "name": "small",
        "books": None,
        "sources": [{"text": "${data.books}", "kind": "book", "optional": True}],
    }


def _cfg(target: Path | None, **values: Any) -> DictConfig:
    return OmegaConf.create(
        {
            "target": {"path": None if target is None else str(target), "shape": None, "max_positions": None},
            "method": None,
            "data": None,
            "suite": {"name": "acceptance"},
            "artifact": None,
            "dry_run": False,
            "home": ".",
            **values,
        }
    )


def _trained(monkeypatch: pytest.MonkeyPatch, *, free: float) -> DictConfig:
    monkeypatch.setattr(memory, "_trains_on", lambda cfg: torch.device("cpu"))
    monkeypatch.setattr(memory, "_free", lambda device, cfg: free)
    return OmegaConf.create(
        {
            "target": {
                "path": "tiny", "shape": None, "max_positions": None, "dtype": "float32", "device": "cpu",
                "shard": None,
            },
            "method": {"name": "eagle3", "draft_vocab_size": 0, "depths": 5, "chunk_tokens": 2048},
            "data": {"stages": [{"fraction": 1.0, "sequence_tokens": 32768, "doc_tokens": 2048}]},
            "trainer": {
                "accelerator": "cpu", "devices": 1, "num_nodes": 1, "precision": "32-true",
                "strategy": "auto",
                "accumulate_grad_batches": 1, "sequences_per_step": None, "gradient_clip_val": 1.0,
            },
            "features": {"mode": "online"},
            "optim": {"name": "adamw"},
            "suite": {"name": "training"},
            "run_dir": "/nonexistent",
            "resume": "auto",
            "artifact": None,
        }
    )  # fmt: skip
