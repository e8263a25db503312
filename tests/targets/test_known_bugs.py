"""Bugs that other toolkits had on these families, tried here; docs/targets.md lists them with numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from longtrain import methods
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.methods.eagle3.config import Config as Eagle3Config
from longtrain.methods.eagle3.config import layers_of
from longtrain.methods.rope import ModuleRope, rotary_of
from longtrain.targets.loading import random_target
from tests.families import EXPERTS, usual
from tests.helpers import token_ids
from tests.targets import test_families as families
from tests.targets import test_window_layers as windows


@torch.no_grad()
@pytest.mark.parametrize("family", ["mistral", "ministral3", "phi3", "gpt_oss"])
def test_a_window_of_8_tokens_has_8_tokens_with_the_last(family):
    """Of one layer; gpt-oss has a full layer too, whose values are nothing."""
    if family == "gpt_oss":
        kinds = ["sliding_attention", "full_attention"]
        shape = usual(family, num_hidden_layers=2, layer_types=kinds, sliding_window=8)
    else:
        shape = {**windows.shape_of(family, windows.random.Random(0)), "num_hidden_layers": 1}
    target = random_target(shape, dtype="float64")
    if family == "gpt_oss":
        for value in target.model.model.layers[1].self_attn.v_proj.parameters():
            value.zero_()
    ids_BT = windows.ids(1, 20)
    last = windows.rows_of(target, ids_BT, target.new_cache(1, 20, 0))[0, -1]
    for back in range(1, 20):
        other_BT = ids_BT.clone()
        other_BT[0, -1 - back] = (other_BT[0, -1 - back] + 1) % 97
        moved = windows.rows_of(target, other_BT, target.new_cache(1, 20, 0))[0, -1]
        assert torch.equal(moved, last) is (back >= 8), back


@torch.no_grad()
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_of_equal_score_are_the_same_in_a_pass_and_one_by_one(family):
    """All routers have every row twice, so that each choice is a tie or ends within one."""
    target = random_target(usual(family, num_experts_per_tok=3), dtype="float64")
    for name, value in target.model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            value[1::2] = value[::2]
    ids_BT = windows.ids(1, 24)
    with families.routed(target.model) as whole:
        together = families.run(target, ids_BT)
    with families.routed(target.model) as single:
        alone = families.run(target, ids_BT, tuple(range(1, 24)))
    layers = len(whole)
    for layer in range(layers):
        assert torch.equal(whole[layer], torch.cat(single[layer::layers]))
    torch.testing.assert_close(alone, together, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt_oss", "apertus"])
def test_drafts_rotate_by_the_scaled_table_of_the_target(family):
    """YaRN with its factor on cos and sin, and the factors of Llama 3; not plain frequencies."""
    target, pos_T = random_target(usual(family), dtype="float64"), torch.arange(0, 2000, 97)
    theirs = target.model.model.rotary_emb(torch.ones(1), pos_T[None])
    for found in (ModuleRope(Eagle3Config(), target)(pos_T), rotary_of(Eagle3Config(), target.info)(pos_T)):
        for mine, expected in zip(found, theirs, strict=True):
            half = expected[0].double()[:, : mine.shape[-1]]
            assert torch.allclose(mine.double()[:, : half.shape[-1]], half, rtol=1e-5, atol=1e-5)
    plain = 1e4 ** -(torch.arange(0, 16, 2) / 16) * pos_T[-1]
    assert not torch.allclose(theirs[0][0, -1, :8].double(), plain.cos().double(), atol=1e-2)


@torch.no_grad()
def test_scaled_tables_of_olmo3_are_for_full_layers_only():
    """Configs as they are published have one scaling; here the full layer's values are nothing, or not."""
    ids_BT, found = windows.ids(1, 40), {}
    for scaled in (False, True):
        shape = windows.shape_of("olmo3", windows.random.Random(0))
        del shape["rope_parameters"]
        shape |= {"num_hidden_layers": 2, "layer_types": windows.MIXED[:2], "rope_theta": 5e5}
        target = random_target(
            {**shape, "rope_scaling": {**windows.YARN} if scaled else None}, dtype="float64"
        )
        found[scaled, "both"] = windows.rows_of(target, ids_BT, target.new_cache(1, 40, 0))
        target.model.model.layers[1].self_attn.v_proj.weight.zero_()
        found[scaled, "windows"] = windows.rows_of(target, ids_BT, target.new_cache(1, 40, 0))
    assert torch.equal(found[False, "windows"], found[True, "windows"])
    assert not torch.allclose(found[False, "both"], found[True, "both"], atol=1e-3)


def test_layers_that_eagle3_reads_differ_on_shallow_targets_too():
    for n_layers in range(1, 80):
        layers = layers_of(Eagle3Config(), n_layers)
        assert sorted({*layers}) == [*layers] and len(layers) == min(3, max(n_layers - 1, 1))
        assert layers[0] >= 0 and layers[-1] < max(n_layers - 1, 1)
    info = random_target(usual("qwen3_moe")).info
    draft = methods.get("eagle3").build(Eagle3Config(), info)
    assert draft.fc.in_features == len(layers_of(Eagle3Config(), 3)) * info.hidden_size == 2 * 48


@pytest.mark.corners
@pytest.mark.parametrize("family", [*windows.FAMILIES, "gpt_oss"])
@pytest.mark.parametrize("cut", [3, 8, 30])
def test_a_text_that_goes_on_from_a_cached_prompt_is_that_of_the_whole(family, cut):
    """The prompt ends before, at and behind the edge of the window, and so does what is read after it."""
    if family == "gpt_oss":
        target = random_target(usual(family, layer_types=windows.MIXED, sliding_window=8), dtype="float64")
    else:
        target = windows.made(family)
    whole = token_ids(40, 35, least=2)
    how = {"max_new_tokens": 12, "ignore_eos": True, "shape": PLAIN}
    expected = Engine(target).generate(whole, **how).tokens
    prompts, after = [text[:cut] for text in whole], [text[cut:] for text in whole]
    assert Engine(target).generate(prompts, after=after, **how).tokens == expected


def test_tests_that_the_documentation_names_are_there():
    root = Path(__file__).parents[2]
    named = set(re.findall(r"`(test_\w+)`", (root / "docs" / "targets.md").read_text()))
    there = "".join(file.read_text() for file in (root / "tests").rglob("test_*.py"))
    assert len(named) > 15 and all(f"def {name}(" in there for name in named)
