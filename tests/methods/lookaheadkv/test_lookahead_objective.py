"""The loss and its gradient against the equations written out, and what becomes of odd rows."""

from __future__ import annotations

import lookahead_equations as equations
import pytest

from longtrain.methods.lookaheadkv.config import Config
from longtrain.methods.lookaheadkv.objective import LookaheadObjective
from longtrain.methods.lookaheadkv.samples import samples

PAIRS = [(37, 4), (9, 0), (20, 11), (1, 2), (45, 1)]


def gradients(loss, module):
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def check_gradient(target, module, config, batch):
    loss = LookaheadObjective(module, target, config)(batch)
    got = gradients(loss.total, module)
    found = samples(batch)
    wanted = sum(
        equations.document_loss(target, batch.ids_T[s.start : s.stop], s.length, module, config)
        for s in found
    )
    want = gradients(wanted, module)
    assert float(loss.total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-10)
    assert set(want) == set(dict(module.named_parameters())) and set(got) == set(want)
    for name, grad in want.items():
        assert grad.norm() > 0, name
        assert (got[name] - grad).norm() / grad.norm() < 1e-8, name
    return loss


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_gradient_is_that_of_naive_concatenation(three_layers, make_module, make_batch, family):
    config = Config(n_lookahead=5, lora_rank=3, lora_alpha=6.0)
    target = equations.exact(three_layers(family))
    loss = check_gradient(target, make_module(target, config), config, make_batch(target, PAIRS))
    assert loss.tokens == 18
    assert float(loss.figures["loss"][0] / loss.figures["loss"][1]) == pytest.approx(
        float(loss.total.detach()) / 4
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_targets": "qv"},
        {"lora_targets": "none"},
        {"lora_targets": ["o", "gate"]},
        {"budgets": [4, 8, 30], "budget_weight": 0.7},
        {"suffix_window": 8},
    ],
    ids=str,
)
def test_gradient_under_options(three_layers, make_module, make_batch, changes):
    config = Config(n_lookahead=5, lora_rank=3, **changes)
    target = equations.exact(three_layers("qwen3"))
    check_gradient(target, make_module(target, config), config, make_batch(target, PAIRS))
