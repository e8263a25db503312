"""Eviction on a target with sliding windows: full layers lose entries, others keep what is seen later."""

import pytest
import torch

from longtrain.cache.base import Tree
from longtrain.cache.evicted import compact
from longtrain.cache.layered import LayeredCache
from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Budget, Keep
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import TargetMismatchError
from longtrain.methods.policies.attention_free import Random, StreamingLLM
from longtrain.methods.policies.h2o import H2O
from longtrain.methods.policies.laq import LAQ
from longtrain.methods.policies.oracle import Oracle
from longtrain.methods.policies.pyramidkv import PyramidKV
from longtrain.methods.policies.snapkv import TOVA, SnapKV
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest, TokenBatch
from tests.helpers import Recall, attached, token_ids

SHAPE = {
    **SHAPES["gemma3_micro"],
    "num_hidden_layers": 5,
    "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
    "query_pre_attn_scalar": 16,
}
FULL, WINDOW, LENGTHS = (1, 3), 8, (21, 5, 40)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def target():
    return random_target(SHAPE, seed=3, dtype="float64")


def read(target, room):
    """A cache of prompts of these lengths."""
    n_B = torch.tensor(LENGTHS)
    ids_BT = torch.randint(2, 97, (3, max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    cache = target.new_cache(3, max(LENGTHS) + room, 0)
    target(TokenBatch(torch.arange(max(LENGTHS)).expand(3, -1), ids_BT, n_B=n_B), cache)
    cache.commit(None, n_B)
    return cache


def kept_all():
    """Every entry of every prompt, in the layers that see the whole text."""
    idx_S = torch.arange(max(LENGTHS)).expand(len(FULL), 3, 2, -1)
    n_LBG = torch.tensor(LENGTHS)[None, :, None].expand(len(FULL), -1, 2)
    return Keep(idx_S * (idx_S < n_LBG[..., None]), n_LBG.contiguous())


@torch.no_grad()
def test_with_all_entries_kept_every_step_is_that_of_the_whole_cache(target):
    """Steps of trees, with paths of other lengths accepted in each sequence."""
    whole = read(target, 60)
    small = compact(read(target, 60), kept_all(), LENGTHS, room=60)
    assert isinstance(small, LayeredCache) and small.near.k_LBGSD.shape[0] == 3
    seen = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
    for step in range(12):
        ids_BN = torch.randint(2, 97, (3, 4), generator=torch.Generator().manual_seed(step))
        pos_BN = whole.len_B[:, None] + seen.sum(-1) - 1
        rows = TokenBatch(pos_BN, ids_BN, mask=Tree(seen.expand(3, -1, -1)))
        one, other = (
            target(rows, cache, outputs=OutputRequest("all")).logits_BTV for cache in (whole, small)
        )
        torch.testing.assert_close(other, one, **CLOSE)
        path_BP, n_B = torch.tensor([[0, 1, 3], [0, 2, 0], [0, 0, 0]]), torch.tensor([3, 2, 1 - step % 2])
        whole.commit(path_BP, n_B)
        small.commit(path_BP, n_B)
        assert torch.equal(small.len_B, whole.len_B)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(Budget(10), window=4, kernel=3),
        TOVA(Budget(10)),
        PyramidKV(Budget(12), window=4, kernel=3),
        H2O(Budget(10), window=4, chunk=7),
        LAQ(Budget(10), window=4, kernel=3, n_tokens=3),
        Oracle(Budget(10), n_tokens=5),
        StreamingLLM(Budget(10)),
        Random(Budget(10), window=4),
    ],
    ids=lambda policy: policy.name,
)
def test_a_draft_on_the_evicted_cache_gives_the_text_of_plain_decoding_on_it(target, policy, batch):
    prompts = token_ids(*LENGTHS, least=2)[-batch:]
    plain = Engine(target, Parts(evictor=policy, name=policy.name)).generate(
        prompts, max_new_tokens=20, ignore_eos=True
    )
    assert plain.kept is not None and plain.kept.n_LBG.shape[0] == len(FULL)
    parts = Parts(evictor=policy, draft=Recall(plain.tokens), name=policy.name)
    for shape in (TreeShape((1, 1, 1)), TreeShape((2, 3, 3))):
        drafted = Engine(target, parts).generate(prompts, max_new_tokens=20, ignore_eos=True, shape=shape)
        assert drafted.tokens == plain.tokens and drafted.stats.tau > 1.3


def test_the_share_is_that_of_all_entries_which_are_needed(target):
    (prompt,) = token_ids(200, least=2)
    parts = Parts(evictor=SnapKV(Budget(20), window=4, kernel=3), name="snapkv")
    stats = Engine(target, parts).generate([prompt], max_new_tokens=8, ignore_eos=True).stats
    slot = 2 * 2 * 16 * 8  # keys and values of 2 heads of 16 numbers of 8 bytes
    nodes, room = 1, 8
    full = slot * (2 * 200 + 3 * WINDOW + 5 * (room + nodes))
    held = slot * (2 * 20 + 3 * (WINDOW - 1) + 5 * (room + nodes))
    assert abs(stats.cache_bytes_full - full) < slot and abs(stats.cache_bytes - held) < slot
    assert stats.kept_entries == [20.0]
    assert target.info.entries(200) == 2 * 200 + 3 * WINDOW
    assert target.info.entries(200, kept=20) == 2 * 20 + 3 * WINDOW


def test_what_evictors_do_not_take_is_refused_in_one_line():
    snapkv, prompts = Parts(evictor=SnapKV(Budget(20)), name="snapkv"), token_ids(60)
    for shape, message in (
        ({**SHAPES["mistral_micro"], "sliding_window": 8}, "2 of 2 layers"),
        (SHAPES["gemma3_micro"], "head_dim"),
        (
            {**SHAPES["gemma3_micro"], "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2},
            "head_dim",
        ),
    ):
        with pytest.raises(TargetMismatchError, match=message) as caught:
            Engine(random_target(shape), snapkv).generate(prompts, max_new_tokens=2)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rule", ["window", "quest", "oracle", "previous", "clusterkv", "shadowkv"])
def test_layers_without_a_window_read_selected_entries(target, rule):
    """With room for all entries the text is the target's own; with less, a draft gives plain decoding's."""
    prompts = token_ids(60, 41, least=2)
    full = Engine(target).generate(prompts, max_new_tokens=16, ignore_eos=True).tokens
    keys = {"every": 4, "sinks": 2, "window": 4}
    for rows in (200, 16):
        parts = attached("sparse", target, {"budget_tokens": rows, **keys}, rule=rule)
        plain = Engine(target, parts).generate(prompts, max_new_tokens=16, ignore_eos=True).tokens
        assert plain == full or rows == 16
        drafts = parts.merge(Parts(draft=Recall(plain), name="recall"))
        out = Engine(target, drafts).generate(
            prompts, max_new_tokens=16, ignore_eos=True, shape=TreeShape((1, 1, 1))
        )
        assert out.tokens == plain


def test_rules_that_follow_all_layers_are_refused(target):
    for rule in ("reused", "shared_oracle"):
        with pytest.raises(TargetMismatchError, match=rf"rule {rule} is not built for .* 3 of 5"):
            attached("sparse", target, {"budget_tokens": 16}, rule=rule)
