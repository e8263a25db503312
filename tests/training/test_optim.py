import copy

import pytest
import torch
from torch import nn

from longtrain.errors import ConfigError
from longtrain.training import strategy
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
    with pytest.raises(ConfigError, match=r"'porj\.\*' matches no.* write ~optim\.lr_multipliers"):
        Optim(lr_multipliers={"porj.*": 0.1}).build(params(), max_steps=10)
    many = nn.ModuleDict({f"layer{n}": nn.LayerNorm(2) for n in range(5)} | {"head": nn.Linear(2, 2)})
    says = r"'lm_head\*' matches no.*; nearest of 12: head\.weight, head\.bias, (layer\S+[,;] ){4}write"
    with pytest.raises(ConfigError, match=says):
        Optim(lr_multipliers={"lm_head*": 0.1}).trainable(many.named_parameters())


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


def test_only_muon_has_momentum():
    says = r"optim\.momentum=0\.9; allowed: 0\.95 where optim\.name=adamw, which has betas in its place"
    with pytest.raises(ConfigError, match=says):
        Optim(momentum=0.9)
    assert Optim(name="muon", momentum=0.9).momentum == 0.9


def test_nothing_to_train_is_an_error():
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    with pytest.raises(ConfigError, match="no trainable"):
        Optim().build([("x", frozen)], max_steps=1)


def test_muon_trains_hidden_matrices_and_adamw_the_rest_and_both_go_on_from_their_state():
    def made(seed=0):
        torch.manual_seed(seed)
        return nn.ModuleDict({"lm_head": nn.Linear(4, 6), "norm": nn.LayerNorm(4), "proj": nn.Linear(4, 4)})

    def step(module, optimizer, schedule):
        x = torch.arange(8.0).view(2, 4).sin()
        optimizer.zero_grad()
        (module["lm_head"](module["norm"](module["proj"](x))) ** 2).sum().backward()
        optimizer.step()
        schedule.step()

    settings = Optim(name="muon", lr=0.1, warmup_steps=2, weight_decay=0.1)
    module = made()
    optimizer, schedule = settings.build(module.named_parameters(), max_steps=10)
    reference = torch.optim.Muon(
        [made()["proj"].weight], lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    (weight,) = reference.param_groups[0]["params"]
    step(module, optimizer, schedule)
    weight.grad = module["proj"].weight.grad.clone()
    reference.step()
    assert torch.equal(module["proj"].weight, weight)  # the first step has half the rate
    kept = {name: sorted(optimizer.state[p]) for name, p in module.named_parameters()}
    assert kept["proj.weight"] == ["momentum_buffer"]
    assert kept["lm_head.weight"] == kept["proj.bias"] == ["exp_avg", "exp_avg_sq", "step"]
    reference = made(1)
    reference.load_state_dict(module.state_dict())
    again, rates = settings.build(reference.named_parameters(), max_steps=10)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    rates.load_state_dict(schedule.state_dict())
    for one in ((module, optimizer, schedule), (reference, again, rates)):
        step(*one)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_are_those_that_the_optimizer_stores(name):
    module = nn.ModuleDict({"lm_head": nn.Linear(4, 6), "norm": nn.LayerNorm(4), "proj": nn.Linear(4, 4)})
    settings = Optim(name=name)
    optimizer, _ = settings.build(module.named_parameters(), max_steps=1)
    sum(value.sum() for value in module.parameters()).backward()
    optimizer.step()
    stored = [one for state in optimizer.state.values() for key, one in state.items() if key != "step"]
    counted = settings.moments(module.to("meta").named_parameters())
    assert counted == sum(one.numel() for one in stored)
    assert counted == 2 * 58 - (16 if name == "muon" else 0)


def test_muon_without_matrices_or_under_zero_is_refused():
    norm = nn.LayerNorm(4)
    with pytest.raises(ConfigError, match=r"optim\.name=muon trains matrices, and the module has none"):
        Optim(name="muon").build(norm.named_parameters(), max_steps=1)
    with pytest.raises(ConfigError, match=r"optim\.name=muon needs whole matrices.*optim\.name=adamw"):
        strategy.check(
            {"_target_": "lightning.pytorch.strategies.DeepSpeedStrategy", "stage": 2}, optimizer="muon"
        )
    strategy.check("ddp", optimizer="muon")
