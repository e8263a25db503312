"""A small target, and folders of block drafts of it."""

from __future__ import annotations

import pytest
import torch

from longtrain.files import write_files
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.formats import FORMATS
from longtrain.methods.dspark.mask_token import choose_mask_token
from longtrain.methods.dspark.modules import DSparkDraft
from longtrain.targets.loading import random_target
from tests.methods.eagle3.formats.eagle3_folders import SHAPE, Folder


@pytest.fixture(scope="session")
def target():
    return random_target(SHAPE, seed=0)


@pytest.fixture(scope="session")
def trained_block_draft(target):
    """`make(**hyperparameters)`: a draft whose every tensor has moved from its start, and its settings."""

    def make(**fields):
        base = {"layers": [1, 3], "n_layers": 2, "block_size": 5, "markov_rank": 6, "mask_token": 7}
        config = Config(**{**base, **fields})
        gen = torch.Generator().manual_seed(1)
        module = DSparkDraft(config, target.info)
        with torch.no_grad():
            for name, tensor in module.named_parameters():
                fresh = torch.randn(tensor.shape, generator=gen)
                tensor.copy_(fresh * (0.15 if tensor.ndim == 2 else 0.2) + ("norm" in name))
        if module.factor_N is not None:
            module.factor_N.copy_(torch.rand(module.factor_N.shape, generator=gen) + 0.1)
        if module.draft_ids_K is not None:
            size = len(module.draft_ids_K)
            others = torch.randperm(target.info.vocab_size - 2, generator=gen)[: size - 1] + 2
            module.draft_ids_K.copy_(torch.cat((torch.tensor([1]), others)).sort().values)
        choose_mask_token(module, target, config)
        return module.eval(), config

    return make


@pytest.fixture
def export(target, tmp_path, trained_block_draft):
    """`export(format, **hyperparameters)`: a folder as longtrain writes it; gives it and the module."""

    def make(form, dtype=torch.float32, **fields):
        module, config = trained_block_draft(**fields)
        module = module.to(dtype)
        facts = {"step": 9, "data": {"stages": [{"doc_tokens": 128}]}}
        path = tmp_path / f"draft-{form}"
        write_files(path, FORMATS.write(form, module.state_dict(), config, target, facts, path.name))
        return Folder(path), module, config

    return make


@pytest.fixture
def foreign(export):
    """`foreign(format, changes, **hyperparameters)`: a folder as others write it; None takes a key out."""

    def make(form, changes, **fields):
        folder, module, _ = export(form, **fields)
        for file in (folder.path / "longtrain").iterdir():
            file.unlink()
        (folder.path / "longtrain").rmdir()
        config = folder.config
        changes = {"trained_by": None, "longtrain": None, **changes}
        for path, value in changes.items():
            *parts, key = path.split(".")
            place = config
            for part in parts:
                place = place[part]
            place.pop(key, None)
            if value is not None:
                place[key] = value
        folder.write(config=config)
        return folder.path, module

    return make
