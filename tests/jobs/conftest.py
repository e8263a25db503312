"""A micro target with a byte tokenizer, a run that was trained on it, and composed configurations."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from byte_tokens import byte_tokenizer
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from longtrain import cli, methods, provenance
from longtrain.artifact import Artifact
from longtrain.assets import asset_dir
from longtrain.config import RunConfig
from longtrain.methods.longspec.config import Config
from longtrain.targets.loading import load_target
from longtrain.targets.shapes import SHAPES
from longtrain.training import checkpoint
from longtrain.training.tensor_file import pieces_of
from tests.helpers import HEADS_OF_64


@pytest.fixture(autouse=True)
def _blank_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take a third of the time of many jobs: they are blank, unless a test asks for `drawn` ones."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", lambda self, file, **_: file.write(b"a picture"))


@pytest.fixture
def drawn() -> None:
    """Pictures as they are."""


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SHAPES["llama_micro"], "vocab_size": 256, "eos_token_id": None})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory):
    """A folder with a micro target that has the bundled one's tokenizer and chat template.

    QuantSpec takes its heads.
    """
    folder, bundled = tmp_path_factory.mktemp("chat"), asset_dir("bundled") / "tiny"
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**HEADS_OF_64, "vocab_size": 4096, "eos_token_id": 3})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, folder)
    return folder


@pytest.fixture
def composed(tmp_path, target_folder):
    """`composed(job, *overrides)`: the configuration the command line would make, at home in `tmp_path`."""
    GlobalHydra.instance().clear()
    cli.mount()
    with initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):

        def make(job, *overrides):
            common = [f"target.path={target_folder}", "target.device=cpu", f"home={tmp_path}", "name=one"]
            return RunConfig.from_hydra(compose(job, overrides=[*common, *overrides]))

        yield make


@pytest.fixture
def trained(tmp_path, target_folder):
    """What a training run leaves behind, with a draft of known weights; gives the module."""
    target = load_target(target_folder)
    config = Config(window=16)
    torch.manual_seed(1)
    module = methods.get("longspec").build(config, target.info)
    folder = tmp_path / "runs" / "one" / "train"
    (folder / "checkpoints").mkdir(parents=True)
    method = {f"method.{key}": value for key, value in {"name": "longspec", **vars(config)}.items()}
    who = {"target.weights": target.info.weights_hash, "target.tokenizer": target.info.tokenizer_hash}
    about = {"step": 7, "facts": {**method, **who, "target.name": str(target_folder)}}
    weights = {checkpoint.WEIGHTS: pieces_of(module.state_dict())}
    assert checkpoint.write(folder / "checkpoints", about, weights, writer=True) is None
    settings = {"method": {"name": "longspec", **vars(config)}, "target": {"path": str(target_folder)}}
    provenance.write(folder, OmegaConf.to_container(OmegaConf.create(settings)), data={"name": "none"})
    (folder / "curves.png").write_bytes(b"a picture")
    return module


@pytest.fixture
def text(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "book_one.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 20)
    (folder / "tool.py").write_text("def f(x):\n    return x + 1\n\n" * 40)
    return folder


@pytest.fixture
def artifact(tmp_path, target_folder, trained):
    """The folder of the artifact `draft`."""
    target = load_target(target_folder)
    made = Artifact.from_module("longspec", Config(window=16), module=trained, target=target)
    return made.save(tmp_path / "checkpoints" / "draft")
