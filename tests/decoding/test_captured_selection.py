"""Decoding from chosen rows, captured: the texts of steps that are launched operator by operator."""

from __future__ import annotations

import pytest
import torch

from longtrain import methods
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.targets.loading import random_target
from tests.helpers import attached, everywhere, noisy

from .micro import prompts_of
from .micro import target as micro
from .tape import both, tapes  # noqa: F401 (a fixture)

PROMPTS = prompts_of(90, 7, 33)
WARM = Sampling(temperature=0.9, top_p=0.95, seed=3)
HEADS = [
    {"layers": [0, 1]},
    {"variant": "embedding", "sets": 2},
    {"variant": "lagged", "row": "feature"},
]
INDEX = {"dims": 16}


@pytest.fixture
def made(monkeypatch, tapes):  # noqa: F811
    """Recorded steps; the twin of tree attention does not look at the lengths."""
    monkeypatch.setattr("longtrain.cache.selected.tree_attention", everywhere)
    return tapes


def head(keys, target, *, rows=14, every=1, name="specontext") -> Parts:
    """A retrieval head, or an indexer, whose parts all matter."""
    spec = methods.get(name)
    config = spec.config(**keys)
    module = noisy(spec.build(config, target.info).to(target.device, target.dtype))
    limits = {"budget_tokens": rows, "sinks": 2, "window": 4, "every": every}
    return spec.attach(module, target, config, limits)


@pytest.mark.corners
@pytest.mark.parametrize("keys", HEADS, ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
def test_a_step_can_be_replayed(keys, sampling, made):
    """Texts below and above the budget; then the same graph again."""
    target = micro()
    options = {"max_new_tokens": 24, "sampling": sampling, "ignore_eos": True}
    found = both(target, head(keys, target), PROMPTS, **options)
    assert len(made) == 1
    assert found.tokens != Engine(target).generate(PROMPTS, **options).tokens


def test_layers_may_choose_within_a_recorded_step(made):
    """Each layer scores its own rows with its index."""
    target = micro()
    parts = head(INDEX, target, name="indexer")
    found = both(target, parts, PROMPTS, max_new_tokens=24, ignore_eos=True)
    assert len(made) == 1
    assert found.tokens != Engine(target).generate(PROMPTS, max_new_tokens=24, ignore_eos=True).tokens


def test_speculation_on_chosen_rows(made):
    """Sets that are good for some positions, a draft beside them, plain steps between."""
    target = micro()
    parts = head(HEADS[0], target, every=4).merge(attached("prompt_lookup", target))
    options = {"max_new_tokens": 24, "ignore_eos": True}
    plain = Engine(target, head(HEADS[0], target, every=4)).generate(PROMPTS, **options).tokens
    for shape in (TreeShape((1, 1, 1)), PLAIN):
        assert both(target, parts, PROMPTS, shape=shape, **options).tokens == plain


def test_one_graph_serves_texts_until_they_fit_the_budget(made):
    """Other prompts of the same kind take it again; where all fit, everything is read and another is made."""
    target = micro()
    static = Engine(target, head(HEADS[0], target, rows=60), capture=True)
    plain = Engine(target, head(HEADS[0], target, rows=60), capture=False)
    for prompts, count in ((prompts_of(90, 7), 1), (prompts_of(50, 70), 1), (prompts_of(9, 20), 2)):
        options = {"max_new_tokens": 20, "ignore_eos": True}
        found = static.generate(prompts, **options).tokens
        assert found == plain.generate(prompts, **options).tokens
        assert len(made) == count
    assert found == Engine(target).generate(prompts, **options).tokens


METHODS = [*(("specontext", keys) for keys in HEADS), ("indexer", INDEX)]


@pytest.mark.gpu
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(("name", "keys"), METHODS, ids=str)
def test_cuda_graphs_give_the_same_texts(name, keys, every):
    """In fp32: kernels that sum in another order move logits by 1e-6, and texts of 48 tokens stay."""
    target = random_target("llama_micro", dtype=torch.float32, device="cuda")
    for prompts in (PROMPTS, prompts_of(200)):
        parts = head(keys, target, every=every, name=name)
        both(target, parts, prompts, max_new_tokens=48, ignore_eos=True)
    auto = Engine(target, head(keys, target, every=every, name=name))
    auto.generate(PROMPTS, max_new_tokens=48, ignore_eos=True)
    assert auto._kept is not None and auto._kept.arena is not None


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "keys"), METHODS, ids=str)
def test_kernels_give_the_texts_of_a_cpu(name, keys):
    """The same weights in fp32: sums in another order move scores and logits by 1e-6."""
    target = random_target("llama_micro", dtype=torch.float32)
    options = {"max_new_tokens": 24, "ignore_eos": True}
    plain = Engine(target, head(keys, target, every=4, name=name)).generate(PROMPTS, **options).tokens
    target = target.to("cuda")
    parts = head(keys, target, every=4, name=name)
    assert Engine(target, parts).generate(PROMPTS, **options).tokens == plain
