"""What every method owes the toolkit; a new folder under `methods/` is tested here without being named."""

from __future__ import annotations

import copy

import pytest
import torch

from longtrain import methods
from longtrain.artifact import Artifact
from longtrain.data.packing.batch import Batch
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.methods.spec import MethodSpec, Objective
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.tokenizer import read_tokenizer

SPECS = [methods.get(name) for name in methods.names()]
LEARNED = [spec for spec in SPECS if spec.objective is not None and spec.data is None]
ATTACHED = [spec for spec in SPECS if spec.attach is not None and spec.objective is not None]
UNTRAINED = [spec for spec in SPECS if spec.attach is not None and spec.objective is None]


def ids(spec):
    return spec.name


@pytest.fixture(scope="module")
def target():
    tokenizer = read_tokenizer("tiny")[0]  # some methods have the target asked for something
    found = random_target({**SHAPES["qwen3_micro"], "vocab_size": len(tokenizer)}, seed=4)
    found.tokenizer = tokenizer
    return found


@pytest.fixture
def batch(target):
    """Three documents, each a prompt and a response that follows from it."""
    gen = torch.Generator().manual_seed(1)
    texts, mask = [], []
    for length in (40, 25, 60):
        texts.append(torch.randint(2, 30, (length,), generator=gen))
        mask.append(torch.arange(length) >= length - 8)
    bounds = (0, 40, 65, 125)
    return Batch(
        torch.cat(texts),
        bounds,
        torch.cat(mask),
        seed=2,
        tokens_in_step=24,
        documents_in_step=3,
        names=("a", "b", "c"),
    )


def test_there_are_methods_to_test():
    assert len(SPECS) >= 4 and len(LEARNED) >= 2 and len(ATTACHED) >= 2 and len(UNTRAINED) >= 1


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_it_is_what_its_folder_says(spec):
    assert isinstance(spec, MethodSpec) and methods.get(spec.name) is spec
    assert spec.config is methods.config_class(spec.name) and spec.config() == spec.config()
    assert "arXiv" in spec.paper or spec.attach is None


@pytest.mark.parametrize("spec", ATTACHED, ids=ids)
def test_it_builds_without_memory(spec, target):
    with torch.device("meta"):
        module = spec.build(spec.config(), target.info)
    assert all(tensor.is_meta for tensor in module.state_dict().values()) and module.state_dict()


def per_count(spec, objective, batch):
    """The loss as the trainer divides it."""
    loss = objective(batch)
    return loss, loss.total / (batch.documents_in_step if objective.per_document else batch.tokens_in_step)


@pytest.mark.parametrize("spec", LEARNED, ids=ids)
def test_only_its_own_tensors_train_and_one_batch_is_learned(spec, target, batch):
    torch.manual_seed(0)
    config = spec.config()
    module = spec.build(config, target.info)
    objective = spec.objective(module, target, config)
    assert isinstance(objective, Objective)
    before = copy.deepcopy(target.state_dict())
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss, mean = per_count(spec, objective, batch)
        assert loss.tokens > 0 and loss.total.ndim == 0 and torch.isfinite(loss.total)
        optimizer.zero_grad()
        mean.backward()
        losses.append(float(mean.detach()))
        trained = [name for name, p in module.named_parameters() if p.grad is not None]
        assert trained == [name for name, _ in module.named_parameters()]
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.grad is None for p in target.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize("spec", LEARNED, ids=ids)
def test_figures_are_sums_and_counts_without_gradients(spec, target, batch):
    config = spec.config()
    objective = spec.objective(spec.build(config, target.info), target, config)
    for mode in (True, False):
        loss = objective.train(mode)(batch)
        for name, (total, count) in loss.metrics.items():
            assert not total.requires_grad and total.ndim == 0 and float(count) >= 0, name


@pytest.mark.parametrize("spec", ATTACHED, ids=ids)
def test_export_and_load_are_bit_equal_and_the_engine_takes_the_parts(spec, target, tmp_path):
    torch.manual_seed(0)
    config = spec.config()
    module = spec.build(config, target.info)
    made = Artifact.from_module(spec.name, config, module=module, target=target)
    assert made.golden is not None
    back = Artifact.load(made.save(tmp_path / "made"))
    state = module.state_dict()
    assert back.tensors.keys() == state.keys()
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in state.items())
    keys = {**spec.golden_keys, **({"budget_ratio": None, "budget_tokens": 24} if spec.golden_keys else {})}
    parts = back.attach(target, **keys)
    prompts = [list(range(2, 80)), list(range(20, 50))]
    tokens = Engine(target, parts).generate(prompts, max_new_tokens=6, ignore_eos=True).tokens
    assert [len(row) for row in tokens] == [6, 6]
    if parts.evictor is parts.selector is None:
        assert tokens == Engine(target).generate(prompts, max_new_tokens=6, ignore_eos=True).tokens


@pytest.mark.parametrize("spec", UNTRAINED, ids=ids)
def test_without_training_it_has_no_tensors_and_repeats_its_own_plain_decoding(spec):
    shape = {**SHAPES["llama_micro"], "head_dim": 64, "hidden_size": 64, "intermediate_size": 96}
    target = random_target(shape, seed=4, dtype=torch.float64)
    config = spec.config()
    module = spec.build(config, target.info)
    assert not module.state_dict() and spec.data is None and spec.export is None
    engine = Engine(target, spec.attach(module, target, config, {}))
    prompts = [list(range(2, 80)), list(range(20, 50))]
    drafted, plain = (
        engine.generate(prompts, max_new_tokens=6, ignore_eos=True, shape=shape).tokens
        for shape in (None, PLAIN)
    )
    assert drafted == plain and [len(row) for row in drafted] == [6, 6]
