"""A micro target that reads bytes, and suites small enough to run in a moment."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longtrain.decoding.evict import Budget
from longtrain.decoding.sampling import Sampling
from longtrain.evaluation.harness.session import Session
from longtrain.systems import Builder
from longtrain.targets.loading import load_target
from longtrain.targets.shapes import SHAPES
from tests.jobs.byte_tokens import byte_tokenizer

from .toys import suite


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SHAPES["llama_micro"], "vocab_size": 256, "eos_token_id": 7})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target(target_folder):
    return load_target(target_folder)


@pytest.fixture
def session(target, tmp_path):
    """`session(name, suite, entries, **changes)`: a session in a folder of its own."""

    def make(name="run", asked=None, entries=("snapkv",), budgets=(40,), **changes) -> Session:
        asked = asked or suite()
        builder = Builder(target, [Budget(b) for b in budgets], [], {}.__getitem__)
        made = Session(
            target=target,
            suite=asked,
            systems=builder.systems(entries),
            sampling=Sampling(),
            folder=tmp_path / name,
            home=tmp_path,
            batch=2,
            resamples=50,
        )
        return replace(made, **changes)

    return make
