"""Drafts for a target with sliding windows and scaled embeddings: greedy texts are plain decoding's."""

from dataclasses import replace

import pytest
import torch

from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.methods.dspark import config as dspark
from longtrain.methods.dspark.modules import DSparkDraft
from longtrain.methods.dspark.objective import DSparkObjective
from longtrain.methods.dspark.spec import SPEC as DSPARK
from longtrain.methods.dspark.target_keys import TargetKeys
from longtrain.methods.longspec.config import Config, source_layer
from longtrain.methods.rope import ModuleRope, rotary_of
from longtrain.targets.info import draft_rope
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from tests.helpers import attached, noisy, token_ids

DRAFTS = {
    "longspec": {"window": 12},
    "eagle3": {"window": 12, "depths": 4},
    "dspark": {"mask_token": 5},
}


@pytest.fixture(scope="module")
def target():
    return random_target("gemma3_micro", seed=3, dtype="float64")


@pytest.mark.corners
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("name", DRAFTS)
def test_sixty_greedy_texts_equal_plain_decoding(target, name, capture):
    prompts = token_ids(*(3 + 4 * (i % 10) for i in range(30)), least=2)
    plain = Engine(target).generate(prompts, max_new_tokens=16, ignore_eos=True).tokens
    parts = attached(name, target, **DRAFTS[name])
    noisy(parts.draft.draft)
    for shape in (TreeShape((1, 1, 1)), TreeShape((2, 3))):
        if name == "dspark" and not shape.is_chain:
            continue
        out = Engine(target, parts, capture=capture).generate(
            prompts, max_new_tokens=16, ignore_eos=True, shape=shape
        )
        assert out.tokens == plain


def test_longspec_reads_the_last_layer_that_sees_the_whole_text(target):
    info = target.info
    assert source_layer(Config(), info) == 1 == source_layer(Config(kv_source_layer=1), info)
    for layer in (0, 2, -3, 3):
        with pytest.raises(ConfigError, match=r"gemma3_micro allows -1, 1 \(layers that see"):
            source_layer(Config(kv_source_layer=layer), info)
    shape = {**SHAPES["gemma3_micro"], "model_type": "exaone4"}
    del shape["rope_parameters"], shape["query_pre_attn_scalar"]
    with pytest.raises(ConfigError, match="allows none"):
        source_layer(Config(), random_target(shape).info)


def test_dspark_reads_the_last_layer_that_sees_the_whole_text(target):
    keys = {"n_layers": 2, "windows": [12, None], "target_kv": True, "markov_rank": 4}
    config = dspark.Config(**keys, mask_token=5)
    draft = DSparkDraft(config, target.info).double()
    assert DSparkObjective(draft, target, config).outputs.kv == (1,)
    runtime = DSPARK.attach(draft.requires_grad_(False), target, config, {}).draft
    Engine(target, Parts(draft=runtime)).generate([[3, 4, 5]], max_new_tokens=4, shape=TreeShape((1, 1)))
    assert [store.layer for store in runtime.stores if isinstance(store, TargetKeys)] == [1]
    near = replace(target.info, layers=tuple(replace(one, window=8) for one in target.info.layers))
    with pytest.raises(
        ConfigError, match=r"method.target_kv=true; target gemma3_micro has no layer that sees"
    ):
        DSPARK.check_target(config, near)


def test_the_embeddings_of_drafts_are_those_of_the_first_layer(target):
    ids = torch.tensor([3, 50])
    scaled = target.embed_weight[ids] * target.embed_scale
    assert target.embed_scale == pytest.approx(48**0.5)
    torch.testing.assert_close(scaled, target.embed(ids))
    half = random_target("gemma3_micro", dtype="bfloat16")
    assert half.embed_scale == 6.9375 and torch.equal(
        half.embed_weight[ids] * half.embed_scale, half.embed(ids)
    )


def test_a_draft_has_one_plain_rotary_embedding(target):
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 3, 3],
    }
    assert draft_rope(rope) == {"rope_type": "default", "rope_theta": 1e4}
    config, pos = Config(), torch.arange(9)
    config.rope, config.head_dim = None, 0  # type: ignore[attr-defined]
    own, _ = rotary_of(config, target.info)(pos, torch.float64)
    torch.testing.assert_close(ModuleRope(config, target)(pos)[0], own, atol=1e-6, rtol=0)
    torch.testing.assert_close(target.rope(pos[None])[0][0], own, atol=1e-6, rtol=0)
    partial = replace(target.info, rope={**target.info.rope, "partial_rotary_factor": 0.5})
    assert torch.equal(rotary_of(config, partial)(pos, torch.float64)[0], own)


def test_an_indexer_is_not_built_for_windows(target):
    with pytest.raises(TargetMismatchError, match="an indexer is not built for sliding windows"):
        Engine(target, attached("indexer", target))
