"""A joint step beside each member alone: losses, gradients, figures, rates, and passes of the target."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from longtrain import methods
from longtrain.data.packing.batch import Batch
from longtrain.errors import ConfigError
from longtrain.methods.joint.config import Config
from longtrain.methods.joint.shared import together
from longtrain.targets.loading import random_target
from longtrain.targets.step import OutputRequest

OFFSETS = {"anchor_offset": True, "offset_max_tokens": 200, "anchors": 2}
SMALL = {
    "longspec": {"window": 9, "max_depth": 3, "chunk_tokens": 16, "guard_every": 0},
    "eagle3": {"layers": [0, 1], "draft_vocab_size": 31, "depths": 3, "chunk_tokens": 16, "window": 8},
    "lookaheadkv": {"n_lookahead": 4, "lora_rank": 3, "embedding_lr_scale": 3.0},
}
DSPARK = {"n_layers": 2, "windows": [9, None], "target_kv": True, "markov_rank": 5, "chunk_tokens": 16}


class Counting:
    """A target that counts its packed passes."""

    def __init__(self, real):
        self.real, self.wants = real, []

    def __getattr__(self, name):
        return getattr(self.real, name)

    def packed(self, ids_T, pos_T, bounds, outputs, **more):
        self.wants.append(outputs)
        return self.real.packed(ids_T, pos_T, bounds, outputs, **more)


@pytest.fixture(scope="module")
def target():
    return random_target("llama_micro", seed=1, dtype=torch.float64, device="cpu")


@pytest.fixture(scope="module")
def batch(target):
    """Four documents: prompts with answers of 5, 12, no and 20 tokens; two rows are in the step."""
    gen = torch.Generator().manual_seed(3)
    bounds, masks = [0], []
    for prompt, answer in ((18, 5), (40, 12), (15, 0), (22, 20)):
        bounds.append(bounds[-1] + prompt + answer)
        masks.append(torch.arange(prompt + answer) >= prompt)
    ids = torch.randint(2, target.info.vocab_size, (bounds[-1],), generator=gen)
    return Batch(ids, tuple(bounds), torch.cat(masks), seed=7, tokens_in_step=61, documents_in_step=5)


def joint(target, members, **more):
    config = Config(members=members, **more)
    torch.manual_seed(0)
    spec = methods.get("joint")
    module = spec.build(config, target.info).double()
    with torch.no_grad():
        for name, value in module.named_parameters():
            value.add_(0.2 * torch.randn_like(value) if "norm" not in name else 0)  # LoRA begins with zeros
    return spec.objective(module, target, config)


def alone(objective, name, target):
    """The same module as `objective` has, in the method's own objective."""
    spec, one = methods.get(name), objective.members[name]
    module = copy.deepcopy(objective.module[name])
    module.fresh = False  # its weights stay as they are
    return spec.objective(module, target, one.config)


def mean(objective, batch):
    """The loss as the trainer divides it, and the gradients."""
    loss = objective(batch)
    (loss.total / (batch.documents_in_step if objective.per_document else batch.tokens_in_step)).backward()
    return loss, {name: value.grad for name, value in objective.module.named_parameters()}


def close(got, outputs):
    return float((got - outputs).norm()) <= 1e-10 * float(outputs.norm())


@pytest.mark.parametrize(
    "members",
    [
        SMALL,
        {name: {**SMALL[name], **OFFSETS} for name in ("longspec", "eagle3")},
        {"longspec": {**SMALL["longspec"], "objective": "ce", "kv_source_layer": 0, "chunk_tokens": 0}}
        | {"lookaheadkv": {**SMALL["lookaheadkv"], "suffix_window": 6, "budgets": [4]}},
        {"eagle3": {**SMALL["eagle3"], "chunk_tokens": 0, "window": 0}, "lookaheadkv": SMALL["lookaheadkv"]},
        {name: {**one, **OFFSETS} for name, one in SMALL.items() if name != "lookaheadkv"}
        | {"dspark": {**DSPARK, **OFFSETS}},
    ],
    ids=["three", "two with offsets", "the pass stops early", "not in chunks", "three drafts"],
)
def test_each_member_has_the_loss_and_gradient_of_training_alone_from_one_pass(target, batch, members):
    counting = Counting(target)
    objective = joint(counting, members)
    counting.wants.clear()  # a warm start asks too
    loss, grads = mean(objective, batch)
    assert len(counting.wants) == 1
    total = 0.0
    for name in members:
        one = alone(objective, name, target)
        its, wanted = mean(one, batch)
        total += float(its.total.detach()) / (
            batch.documents_in_step if one.per_document else batch.tokens_in_step
        )
        assert torch.equal(loss.metrics[f"{name}/loss"][0], its.metrics["loss"][0])
        metrics = {key for key in loss.metrics if key.startswith(f"{name}/")}
        assert metrics == {f"{name}/{key}" for key in its.metrics}
        for key, pair in its.metrics.items():
            assert all(map(torch.equal, loss.metrics[f"{name}/{key}"], pair)), key
        assert any(float(grad.norm()) > 1e-6 for grad in wanted.values())
        assert all(close(grads[f"{name}.{key}"], grad) for key, grad in wanted.items())
    count = batch.documents_in_step if objective.per_document else batch.tokens_in_step
    assert float(loss.total.detach()) / count == pytest.approx(total, rel=1e-10)
    assert {name.split(".")[0] for name in grads} == set(members)


def test_steps_together_are_the_steps_alone(target, batch):
    """To the digit where both count labels; 1e-9 where a loss by documents is scaled."""
    objective = joint(target, SMALL)
    ones = {name: alone(objective, name, target) for name in SMALL}
    rows = [replace(batch, seed=seed, ids_T=batch.ids_T.roll(seed)) for seed in range(3)]
    for one in (objective, *ones.values()):
        optimizer = torch.optim.AdamW(one.module.parameters(), lr=1e-2)
        for row in rows:
            optimizer.zero_grad()
            mean(one, row)
            optimizer.step()
    for name, one in ones.items():
        for key, value in one.module.named_parameters():
            assert torch.allclose(objective.module[name].get_parameter(key), value, rtol=0, atol=1e-9), key
    pair = {name: SMALL[name] for name in ("longspec", "eagle3")}
    objective = joint(target, pair)
    for name in pair:
        _, wanted = mean(alone(objective, name, target), batch)
        objective.module.zero_grad()
        _, grads = mean(objective, batch)
        assert all(torch.equal(grads[f"{name}.{key}"], grad) for key, grad in wanted.items())


def test_a_row_without_answers_leaves_the_others_their_pass(target, batch):
    """LookaheadKV then asks for none, and validation has no gradients."""
    counting = Counting(target)
    objective = joint(counting, SMALL)
    counting.wants.clear()
    empty = replace(batch, loss_mask_T=torch.zeros_like(batch.loss_mask_T))
    loss = objective(empty)
    assert len(counting.wants) == 1 and loss.tokens == 0 and float(loss.total.detach()) == 0
    with torch.inference_mode():
        loss = objective.eval()(batch)
    assert len(counting.wants) == 2 and not loss.total.requires_grad and loss.tokens == 37
    outputs = alone(objective, "lookaheadkv", target).eval()(batch)  # with its figures of a validation
    assert {f"lookaheadkv/{key}" for key in outputs.metrics} <= set(loss.metrics) and len(outputs.metrics) > 2


def test_under_autocast_each_member_stands_in_its_own_modes(batch):
    """In bf16 the drafts compute under autocast and LookaheadKV without it, as alone."""
    target = random_target("llama_micro", seed=1, dtype=torch.bfloat16, device="cpu")
    objective = joint(target, SMALL)
    objective.module.float()
    with torch.autocast("cpu", torch.bfloat16):
        got = objective(batch)
        for name in SMALL:
            outputs = alone(objective, name, target)(batch)
            assert torch.equal(got.metrics[f"{name}/loss"][0], outputs.metrics["loss"][0]), name


def test_rates_follow_the_member_and_its_own_patterns(target):
    objective = joint(target, SMALL, lr_scales={"lookaheadkv": 0.5, "eagle3": 2})
    assert list(objective.lr_multipliers.items()) == [
        ("eagle3.*", 2.0),
        ("lookaheadkv.lookahead_embeddings", 1.5),
        ("lookaheadkv.*", 0.5),
    ]
    assert objective.parts == ("longspec", "eagle3", "lookaheadkv")
    assert isinstance(objective.module, nn.ModuleDict) and objective.per_document


def test_wants_together():
    early, late = OutputRequest("none", stop_at_layer=1, kv=(1,)), OutputRequest("none", stop_at_layer=3)
    assert together([early, late]) == OutputRequest("none", stop_at_layer=3, kv=(1,))
    assert together([late, OutputRequest("none", (2, -1))]) == OutputRequest("none", (-1, 2))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"members": {"medusa": {}}}, "method.members.medusa: no method of this name trains a module"),
        ({"members": {"quantspec": {}}}, "known: longspec, eagle3, lookaheadkv"),
        ({"members": {"eagle3": {"windw": 3}}}, "unknown key 'method.members.eagle3.windw'; known: layers"),
        ({"members": {"eagle3": {"window": 5}}}, "method.members.eagle3.window=5; allowed: 0, or more than"),
        ({"members": {"eagle3": {"window": -5}}}, "method.members.eagle3.window=-5; allowed: a whole number"),
        (
            {"members": {"eagle3": "x"}},
            "method.members.eagle3=x; allowed: a mapping of keys to values, or null",
        ),
        ({"members": {}}, "leaves out every method"),
        ({"members": ["eagle3", "eagle3"]}, "allowed: a mapping"),
        ({"lr_scales": {"pretrain": 2}}, "unknown key 'method.lr_scales.pretrain'; known: longspec, eagle3"),
        ({"lr_scales": {"eagle3": 0}}, "method.lr_scales.eagle3=0; allowed: a number, above 0"),
        ({"members": {"longspec": OFFSETS, "lookaheadkv": {}}}, "one set of positions"),
        (
            {"members": {"longspec": OFFSETS, "eagle3": {**OFFSETS, "anchors": 4}}},
            "longspec has anchors=2 and eagle3 4",
        ),
    ],
)
def test_refusals_are_one_line(settings, said):
    with pytest.raises(ConfigError) as caught:
        Config(**settings)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_what_a_member_refuses_of_the_target_names_its_key(target):
    far = {**SMALL["longspec"], "anchor_offset": True, "offset_max_tokens": 999_999}
    with pytest.raises(ConfigError, match=r"^method\.members\.longspec\.offset_max_tokens=999999 is beyond"):
        joint(target, {"longspec": far})


def test_members_that_place_tokens_differently_are_refused(target, batch, monkeypatch):
    """Also where settings do not tell: the first row is compared."""
    objective = joint(target, SMALL)
    monkeypatch.setattr(
        "longtrain.methods.lookaheadkv.objective.positions", lambda bounds: torch.ones(132).long()
    )
    with pytest.raises(ConfigError, match="longspec and lookaheadkv cannot train on the same sequences"):
        objective(batch)
    assert all(seat.ask is None for seat in objective.shared.seats.values())


def test_dspark_is_trained_where_it_is_named():
    """By default there are the three of before, so that older recipes stay as they are."""
    assert list(Config().chosen()) == ["longspec", "eagle3", "lookaheadkv"]
    assert list(Config(members={"dspark": {"block_size": 5}}).chosen()) == ["dspark"]
    with pytest.raises(ConfigError, match=r"method\.members\.dspark\.block_size=2"):
        Config(members={"dspark": {"block_size": 2}})
