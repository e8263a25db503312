import pytest
import torch
from torch import nn

from longtrain.errors import ConfigError
from longtrain.training.optim import Optim


def params():
    return nn.ModuleDict({"norm": nn.LayerNorm(4), "proj": nn.Linear(4, 4)}).named_parameters()


def test_vectors_do_not_decay_and_matrices_do():
    optimizer, _ = Optim(weight_decay=0.1).build(params(), max_steps=10)
    decays = {
        tuple(p.shape): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert decays == {(4,): 0.0, (4, 4): 0.1}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


def test_multipliers_scale_the_rate_by_name():
    optimizer, _ = Optim(lr=1.0, warmup_ratio=0.0, lr_multipliers={"proj.*": 0.1}).build(
        params(), max_steps=10
    )
    rates = {(group["initial_lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert rates == {(1.0, 0.0), (0.1, 0.1), (0.1, 0.0)}
    with pytest.raises(ConfigError, match=r"'porj\.\*' matches no"):
        Optim(lr_multipliers={"porj.*": 0.1}).build(params(), max_steps=10)


def test_schedules_warm_up_peak_and_end():
    cosine = Optim(warmup_ratio=0.1, min_lr_ratio=0.1)
    rates = [cosine.factor(step, max_steps=100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55) and rates[100] == pytest.approx(0.1)
    linear = Optim(schedule="linear", warmup_steps=0)
    assert [linear.factor(step, max_steps=4) for step in range(5)] == [1, 0.75, 0.5, 0.25, 0]
    constant = Optim(schedule="constant", warmup_steps=2)
    assert [constant.factor(step, max_steps=4) for step in range(4)] == [0.5, 1, 1, 1]


@pytest.mark.parametrize("wrong", [{"schedule": "cosin"}, {"lr": 0}, {"warmup_ratio": 2}])
def test_wrong_values_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Optim(**wrong)


def test_nothing_to_train_is_an_error():
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    with pytest.raises(ConfigError, match="no trainable"):
        Optim().build([("x", frozen)], max_steps=1)
