from __future__ import annotations

import pytest
import torch

from longtrain import methods
from longtrain.artifact import Artifact
from longtrain.methods.longspec.config import Config
from longtrain.targets.loading import random_target


@pytest.fixture(scope="session")
def target():
    return random_target("llama_micro", seed=0)


@pytest.fixture(scope="session")
def config():
    return Config(window=16)


@pytest.fixture(scope="session")
def module(target, config):
    torch.manual_seed(3)
    draft = methods.get("longspec").build(config, target.info)
    with torch.no_grad():
        for tensor in draft.parameters():
            tensor.mul_(3)
    return draft


@pytest.fixture(scope="session")
def made(target, config, module):
    facts = {
        "argv": ["/somewhere/longtrain/__main__.py", "--config-name=train", "+recipe=x", "prompt=a b"],
        "data": {"sources": [{"id": "org/books", "license": "cc0-1.0", "kind": "book", "revision": "abc"}]},
    }
    return Artifact.from_module("longspec", config, module=module, target=target, provenance=facts)


@pytest.fixture
def folder(made, tmp_path):
    folder = made.save(tmp_path / "checkpoints" / "draft")
    Artifact.load(folder).describe(pictures={"training.png": b"not looked at"})
    return folder
