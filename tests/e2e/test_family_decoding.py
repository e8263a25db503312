"""Every family of `tests/families.py` in the engine: speculative text is plain, and drafts rotate right."""

from __future__ import annotations

from functools import cache as once

import pytest
import torch

from longtrain import methods
from longtrain.decoding.engine import AUTO, PLAIN, Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError
from longtrain.evaluation.suites.acceptance import MASS_ROWS, attention_mass
from longtrain.features.target import keys_before_rope
from longtrain.kernels.fused_layer import rotated
from longtrain.methods.eagle3.config import Config as Eagle3Config
from longtrain.methods.longspec.config import Config as LongSpecConfig
from longtrain.methods.longspec.modules import LongSpecDraft
from longtrain.methods.longspec.runtime import LongSpecRuntime
from longtrain.methods.longspec.warm_start import warm_start
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.methods.prompt_lookup.joined import with_lookup
from longtrain.methods.rope import ModuleRope
from longtrain.targets.info import draft_rope
from longtrain.targets.loading import random_target
from longtrain.targets.step import OutputRequest
from tests.families import FAMILIES, usual
from tests.helpers import Recall, attached, noisy, token_ids
from tests.targets import test_window_layers as windows

SHAPES = {"chain": TreeShape((1, 1, 1)), "tree": TreeShape((2, 4, 3)), "auto": AUTO}
PARTLY = [name for name, keys in FAMILIES.items() if "partial_rotary_factor" in keys]


@once
def target(family):
    """In fp64, so that no tie is decided by the number of rows of a step."""
    return random_target(usual(family), seed=2, dtype=torch.float64)


def drafts(model, plain):
    """Parts by name; the third knows the text, with mistakes."""
    eagle3 = methods.get("eagle3")
    config = Eagle3Config(layers=[0, 1, 2], draft_vocab_size=40, depths=4)
    draft = noisy(eagle3.build(config, model.info).double())
    return {
        "eagle3": eagle3.attach(draft, model, config, {}),
        "prompt_lookup": attached("prompt_lookup", model),
        "recall": Parts(draft=Recall(plain), name="recall"),
        "longspec": Parts(draft=longspec(model), name="longspec"),
    }


def longspec(model):
    config = LongSpecConfig(window=16)
    draft = LongSpecDraft(config, model.info).double()
    warm_start(draft, model, config)
    return LongSpecRuntime(draft.requires_grad_(False), model, config)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_of_every_draft_is_the_plain_text(family):
    model, prompts = target(family), token_ids(3, 8, 17)
    how = {"max_new_tokens": 16, "ignore_eos": True}
    plain = Engine(model).generate(prompts, shape=PLAIN, **how).tokens
    accepted = {}
    kinds = {"eagle3": ("tree",), "prompt_lookup": ("chain",), "recall": tuple(SHAPES), "longspec": ("tree",)}
    for name, parts in drafts(model, plain).items():
        for kind in kinds[name]:
            made = Engine(model, parts).generate(prompts, shape=SHAPES[kind], **how)
            assert made.tokens == plain, (name, kind)
            accepted[name, kind] = made.stats.tau
    assert accepted["recall", "chain"] > 1.5 and accepted["prompt_lookup", "chain"] > 1.0


TRAINED = {"longspec": {}, "eagle3": {"depths": 4, "draft_vocab_size": 40}, "dspark": {"mask_token": 5}}
"""Method -> its settings; a LongSpec draft begins with the target's own queries."""
WITHOUT_A_SOURCE = {"mistral", "ministral3", "phi3", "exaone4"}
"""With windows in all layers, or full layers that know no positions: LongSpec refuses them."""


def trained(name, model):
    if name == "longspec":
        return Parts(draft=longspec(model), name=name)
    parts = attached(name, model, **TRAINED[name])
    noisy(parts.draft.draft)
    return parts


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("family", [*FAMILIES, *(f"{name} with windows" for name in windows.FAMILIES)])
def test_sixty_greedy_texts_of_a_draft_alone_and_with_look_up_are_the_plain_texts(family, name):
    """Prompts of 3 to 42 tokens, every second of which repeats itself; windows are of 8 tokens."""
    own = family.removesuffix(" with windows")
    model = target(family) if own == family else windows.made(own)
    prompts = token_ids(*(3 + 3 * (i % 7) for i in range(60)), least=2)
    prompts = [prompt * (1 + i % 2) for i, prompt in enumerate(prompts)]
    how = {"max_new_tokens": 12, "ignore_eos": True}
    if own != family and name == "longspec" and own in WITHOUT_A_SOURCE:
        with pytest.raises(ConfigError, match="allows none"):
            trained(name, model)
        return
    limits, alone = Limits(batch=60), trained(name, model)
    plain = Engine(model, limits=limits).generate(prompts, shape=PLAIN, **how).tokens
    for parts in (alone, with_lookup(alone, "auto")):
        for kind in ("chain",) if name == "dspark" else ("chain", "tree"):
            made = Engine(model, parts, limits=limits).generate(prompts, shape=SHAPES[kind], **how)
            assert made.tokens == plain, (parts.name, kind)
    assert 1.0 < made.stats.tau < 4.0


@pytest.mark.parametrize("family", FAMILIES)
def test_eviction_of_nothing_changes_nothing_and_of_more_keeps_the_budget(family):
    model, prompts = target(family), token_ids(40, 31)
    how = {"max_new_tokens": 6, "ignore_eos": True}
    whole = Engine(model).generate(prompts, **how)
    for budget in (64, 20):
        made = Engine(model, Parts(evictor=SnapKV(Budget(budget), window=8, kernel=5))).generate(
            prompts, **how
        )
        assert made.stats.kept_entries == [min(budget, len(prompt)) for prompt in prompts]
        assert budget < 40 or made.tokens == whole.tokens


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_longspec_draft_begins_with_the_targets_own_queries(family):
    """Norms, head norms, biases and rotation of the layers that it is copied from."""
    model = target(family)
    ids_T, T = torch.tensor(token_ids(12)[0]), 12
    config = LongSpecConfig(window=16)
    draft = LongSpecDraft(config, model.info).double()
    warm_start(draft, model, config)
    seen = {}
    pos_T = torch.arange(T)
    step = model.packed(
        ids_T,
        pos_T,
        (0, T),
        OutputRequest("none", hidden=(1,)),
        hook=lambda layer, q, k, v: seen.update({layer: (q[0].transpose(0, 1), k[0].transpose(0, 1))}),
    )
    cos, sin = model.rope(pos_T[None])
    rope = cos[0], sin[0]
    entry = draft.input_layernorm(model.embed(ids_T))
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(draft.self_attn.query(entry, rope), seen[0][0], **close)
    torch.testing.assert_close(draft.self_attn.keys_values(entry, rope)[0], seen[0][1], **close)
    entry = draft.post_self_attention_layernorm(step.hidden[1])
    torch.testing.assert_close(draft.cross_attn.query(entry, rope), seen[2][0], **close)


@torch.no_grad()
@pytest.mark.parametrize("family", PARTLY)
def test_stored_keys_are_rotated_as_the_target_does(family):
    """Features hold keys before RoPE."""
    model = target(family)
    ids_T, pos_T = torch.tensor(token_ids(9)[0]), torch.arange(9)
    with keys_before_rope(model, (1,)) as before:
        kv = model.packed(ids_T, pos_T, (0, 9), OutputRequest("none", kv=(1,))).kv
    cos, sin = model.rope(pos_T[None])
    again = rotated(before[1], (cos[0], sin[0]), neighbours=model.family.neighbours)
    torch.testing.assert_close(again, kv[1][0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", PARTLY)
def test_drafts_of_other_engines_rotate_whole_heads(family):
    """With the target's frequencies at the draft's own size, whatever part of a head the target rotates."""
    model = target(family)
    assert model.info.rope["partial_rotary_factor"] == 0.5
    cos, sin = ModuleRope(Eagle3Config(), model)(torch.arange(5))
    plain = random_target(usual("seed_oss"), dtype=torch.float64)
    for mine, theirs in zip((cos, sin), plain.rope(torch.arange(5)[None]), strict=True):
        assert mine.shape == (5, 16) and torch.equal(mine, theirs[0])
    assert draft_rope({**model.info.rope, "mrope_section": [2, 3, 3]}) == plain.info.rope


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_measured_with_the_targets_own_queries(family):
    """A share of attention outside of a window, against the model's eager attention weights."""
    model = target(family)
    prompt = token_ids(MASS_ROWS + 12)[0]
    found = attention_mass(model, prompt, layer=1, window=4)["outside"]
    model.model.set_attn_implementation("eager")
    if model.family.sinks:
        model.model.config.sliding_window = 128  # cleared where no layer has one
    try:
        weights = model.model(torch.tensor([prompt]), output_attentions=True).attentions[1][0]
    finally:
        model.model.set_attn_implementation("longtrain")
        model.model.config.sliding_window = None
    pos = torch.arange(len(prompt))
    outside = pos[None] < pos[-MASS_ROWS:, None] - 4
    expected = float((weights[:, -MASS_ROWS:] * outside).sum(-1).mean())
    assert found == pytest.approx(expected, abs=1e-5)
