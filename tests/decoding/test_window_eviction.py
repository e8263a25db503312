"""Eviction on a target with sliding windows: full layers lose entries, others keep what is seen later."""

import pytest
import torch

from longtrain import methods
from longtrain.cache.base import KVCache, Tree
from longtrain.cache.evicted import compact
from longtrain.cache.layered import LayeredCache
from longtrain.costs.model import window_slots
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.evict import Budget, Keep
from longtrain.decoding.prefill import prefill
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
from tests.families import usual
from tests.helpers import Recall, attached, noisy, token_ids

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
    cache = target.plain_cache(3, max(LENGTHS) + room, 0)
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
    small = compact(read(target, 60), kept_all(), LENGTHS, room=60, nodes=4)
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


def made(policy, target):
    """A policy, or the evictor of a method by name, with random weights that all matter."""
    if not isinstance(policy, str):
        return policy
    spec, small = methods.get(policy), {"lookaheadkv": {"n_lookahead": 12}, "kvzap": {"hidden_dim": 8}}
    config = spec.config(**small[policy])
    return spec.attach(noisy(spec.build(config, target.info).double()), target, config, KEYS).evictor


KEYS = {"budget_tokens": 10, "adaptive": "layers"}


class Spelled(KVCache):
    """Every entry of one sequence, and attention under a mask that is written out."""

    def __init__(self, layers):
        self.held, self.tail, self.len_B = {}, {}, torch.zeros(1, dtype=torch.int64)
        self.layers, self.kept_LGS = layers, None

    def write(self, layer, k_BGTD, v_BGTD):
        self.tail[layer] = torch.stack((k_BGTD[0], v_BGTD[0]))

    def attend(self, layer, q_BHTD, *, mask, scale):
        return self.attend_window(layer, q_BHTD, mask=mask, scale=scale, window=10**6)

    def attend_window(self, layer, q_BHTD, *, mask, scale, window):
        k, v = torch.cat((self.held.get(layer, self.tail[layer][:, :, :0]), self.tail[layer]), 2)
        apart = torch.arange(k.shape[1] - q_BHTD.shape[2], k.shape[1])[:, None] - torch.arange(k.shape[1])
        seen = ((apart >= 0) & (apart < window)).repeat(len(k), 1, 1)
        if self.kept_LGS is not None and layer in self.layers:
            seen[:, :, : self.kept_LGS.shape[-1]] &= self.kept_LGS[self.layers.index(layer)][:, None]
        g = q_BHTD.shape[1] // len(k)
        k, v, seen = (x.repeat_interleave(g, 0) for x in (k, v, seen))
        logits = (q_BHTD[0] @ k.mT * scale).masked_fill(~seen, -torch.inf)
        return (logits.softmax(-1) @ v)[None], None

    def commit(self, path_BP, n_B):
        self.held = {
            layer: torch.cat((self.held.get(layer, new[:, :, :0]), new), 2)
            for layer, new in self.tail.items()
        }
        self.len_B = self.len_B + n_B

    def bytes(self):
        return 0


@pytest.mark.corners
@pytest.mark.parametrize("size", [1, 7, 8, 9, 50])
@pytest.mark.parametrize(
    "policy",
    [SnapKV(Budget(10), window=4, kernel=3), "lookaheadkv", "kvzap"],
    ids=lambda one: getattr(one, "name", one),
)
@torch.no_grad()
def test_steps_on_the_evicted_cache_are_those_of_masks_that_are_written_out(target, policy, size):
    ids_BT = torch.tensor(token_ids(100, least=2))
    read = prefill(
        target, target.plain_cache, [ids_BT[0, :50].tolist()], max_new_tokens=50, nodes=size,
        evictor=made(policy, target),
    )  # fmt: skip
    naive, found = Spelled(FULL), {}
    for name, cache in (("naive", naive), ("evicted", read.cache)):
        if name == "naive":
            target(TokenBatch(torch.arange(50)[None], ids_BT[:, :50]), cache)
            cache.commit(None, torch.tensor([50]))
            naive.kept_LGS = read.kept.mask(50)
        found[name] = []
        for first in range(50, 100, size):
            rows_BT = ids_BT[:, first : first + size]
            batch = TokenBatch(torch.arange(first, first + rows_BT.shape[1])[None], rows_BT)
            found[name].append(target(batch, cache, outputs=OutputRequest("all")).logits_BTV)
            cache.commit(None, torch.tensor([rows_BT.shape[1]]))
    assert int(read.kept.n_LBG.sum()) == 10 * 2 * len(FULL) and isinstance(read.cache, LayeredCache)
    torch.testing.assert_close(*(torch.cat(parts, 1) for parts in found.values()), **CLOSE)


@pytest.mark.parametrize("policy", ["lookaheadkv", "kvzap"])
@torch.no_grad()
def test_a_module_that_only_looks_on_changes_no_bit(target, policy):
    prompts, found = token_ids(*LENGTHS, least=2), []
    for evictor in (None, made(policy, target)):
        how = {"max_new_tokens": 4, "nodes": 1}
        read = prefill(target, target.plain_cache, prompts, evictor=evictor, **how)
        found.append((read.step.logits_BTV, Engine(target).generate(prompts, max_new_tokens=12).tokens))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    wide = Parts(evictor=made(policy, target).with_budget(Budget(64)), name=policy)
    for capture in (False, True):
        assert (
            Engine(target, wide, capture=capture).generate(prompts, max_new_tokens=12).tokens == found[0][1]
        )


@pytest.mark.corners
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
        "lookaheadkv",
        "kvzap",
    ],
    ids=lambda policy: getattr(policy, "name", policy),
)
def test_a_draft_on_the_evicted_cache_gives_the_text_of_plain_decoding_on_it(target, policy, batch):
    prompts = token_ids(*LENGTHS, least=2)[-batch:]
    policy = made(policy, target)
    plain = Engine(target, Parts(evictor=policy, name=policy.name)).generate(
        prompts, max_new_tokens=20, ignore_eos=True
    )
    assert plain.kept is not None and plain.kept.n_LBG.shape[0] == len(FULL)
    parts = Parts(evictor=policy, draft=Recall(plain.tokens), name=policy.name)
    static = Engine(target, parts, capture=True)
    for engine, shape in (
        (Engine(target, parts), TreeShape((1, 1, 1))),
        (Engine(target, parts), TreeShape((2, 3, 3))),
        (static, TreeShape((2, 3, 3))),
        (static, PLAIN),
    ):
        drafted = engine.generate(prompts, max_new_tokens=20, ignore_eos=True, shape=shape)
        assert drafted.tokens == plain.tokens and (drafted.stats.tau > 1.3 or shape is PLAIN)


def test_the_share_is_that_of_all_entries_which_are_needed(target):
    (prompt,) = token_ids(200, least=2)
    parts = Parts(evictor=SnapKV(Budget(20), window=4, kernel=3), name="snapkv")
    stats = Engine(target, parts).generate([prompt], max_new_tokens=8, ignore_eos=True).stats
    slot = 2 * 2 * 16 * 8  # keys and values of 2 heads of 16 numbers of 8 bytes
    nodes, room = 1, 8
    near = 3 * window_slots(WINDOW, nodes)
    full = slot * (2 * (200 + room + nodes) + near)
    held = slot * (2 * (20 + room + nodes) + near)
    assert abs(stats.cache_bytes_full - full) < slot and abs(stats.cache_bytes - held) < slot
    whole = Engine(target).generate([prompt], max_new_tokens=8, ignore_eos=True).stats
    assert whole.cache_bytes == stats.cache_bytes_full + 2 * 8, "two more lengths of a sequence"
    assert stats.kept_entries == [20.0]
    assert target.info.entries(200) == 2 * 200 + 3 * WINDOW
    assert target.info.entries(200, kept=20) == 2 * 20 + 3 * WINDOW


@torch.no_grad()
def test_scores_have_the_scale_of_the_targets_attention(monkeypatch):
    """Gemma 3 27B scales by another number than the size of its heads; so does this one."""
    target, prompt = random_target("gemma3_micro", seed=3, dtype="float64"), token_ids(30, least=2)[0]
    assert target.scaling(1) == 24**-0.5 != target.info.head_dim**-0.5
    seen, scores = [], SnapKV.scores
    monkeypatch.setattr(SnapKV, "scores", lambda *given: seen.append(scores(*given)) or seen[-1])
    parts = Parts(evictor=SnapKV(Budget(12), window=8, kernel=1), name="snapkv")
    Engine(target, parts).generate([prompt], max_new_tokens=2, ignore_eos=True)
    target.model.set_attn_implementation("eager")
    try:
        weights = target.model(torch.tensor([prompt]), output_attentions=True).attentions[1][0]
    finally:
        target.model.set_attn_implementation("longtrain")
    expected = weights[:, -8:, :22].mean(1).unflatten(0, (2, -1)).mean(1)
    torch.testing.assert_close(seen[0][0, 0, :, :22].double(), expected, rtol=1e-4, atol=1e-6)


def test_what_evictors_do_not_take_is_refused_in_one_line():
    h2o, prompts = Parts(evictor=H2O(Budget(20)), name="h2o"), token_ids(60)
    for shape, message in (
        ({**SHAPES["mistral_micro"], "sliding_window": 8}, "2 of 2 layers"),
        (SHAPES["gemma3_micro"], "head_dim"),
        (
            {**SHAPES["gemma3_micro"], "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2},
            "head_dim",
        ),
    ):
        with pytest.raises(TargetMismatchError, match=message) as caught:
            Engine(random_target(shape), h2o).generate(prompts, max_new_tokens=2)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "rule",
    [
        "window",
        "quest",
        "clusterkv",
        "shadowkv",
        *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("oracle", "previous")),
    ],
)
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


@pytest.mark.parametrize("variant", ["shifted", "embedding"])
def test_a_trained_selection_reads_entries_of_layers_without_a_window(target, variant):
    """With sets of their own, and with room for all entries the target's own text."""
    prompts = token_ids(60, 41, least=2)
    full = Engine(target).generate(prompts, max_new_tokens=16, ignore_eos=True).tokens
    settings = {"variant": variant, "sets": 2, "sinks": 2, "window": 4, "recall_entries": 16}
    keys = {"every": 4, "sinks": 2, "window": 4}
    for rows in (200, 12):
        parts = attached("specontext", target, {"budget_tokens": rows, **keys}, **settings)
        assert parts.selector.table_LG[list(FULL)].tolist() == [[0, 1], [2, 3]]
        plain = Engine(target, parts).generate(prompts, max_new_tokens=16, ignore_eos=True).tokens
        assert (plain == full) is (rows == 200)
        out = Engine(target, parts.merge(Parts(draft=Recall(plain), name="recall"))).generate(
            prompts, max_new_tokens=16, ignore_eos=True, shape=TreeShape((1, 1, 1))
        )
        assert out.tokens == plain and out.stats.tau > 1.2
    sinks = random_target(usual("gpt_oss"))
    with pytest.raises(TargetMismatchError, match="attention without sinks"):
        attached("specontext", sinks, {"budget_tokens": 12, **keys})
    with pytest.raises(TargetMismatchError, match=r"method\.sets=3; .* allows 1\.\.2"):
        attached("specontext", target, {"budget_tokens": 12, **keys}, **settings | {"sets": 3})


def test_rules_that_follow_all_layers_are_refused(target):
    for rule in ("reused", "shared_oracle"):
        with pytest.raises(TargetMismatchError, match=rf"rule {rule} is not built for .* 3 of 5"):
            attached("sparse", target, {"budget_tokens": 16}, rule=rule)
