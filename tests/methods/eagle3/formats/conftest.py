"""A small target, and folders of drafts of it."""

from __future__ import annotations

import pytest
from eagle3_folders import SHAPE, Folder, trained_draft

from longtrain.files import write_files
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.formats import FORMATS
from longtrain.targets.loading import random_target


@pytest.fixture(scope="session")
def target():
    return random_target(SHAPE, seed=0)


@pytest.fixture
def export(target, tmp_path):
    """`export(format, **hyperparameters)`: a folder as longtrain writes it; gives it and the module."""

    def make(form, **fields):
        config = Config(**{"layers": [1, 2, 4], "draft_vocab_size": 40, **fields})
        module = trained_draft(config, target.info)
        facts = {"step": 9, "data": {"stages": [{"doc_tokens": 128}]}}
        path = tmp_path / f"draft-{form}"
        write_files(path, FORMATS.write(form, module.state_dict(), config, target, facts, path.name))
        return Folder(path), module, config

    return make
