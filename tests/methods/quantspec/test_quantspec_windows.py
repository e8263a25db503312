"""QuantSpec on targets with sliding windows: full layers are quantised, the others keep their entries."""

import pytest
import torch

from longtrain.cache.base import KVCache
from longtrain.cache.hierarchical import HierarchicalCache
from longtrain.cache.layered import LayeredCache
from longtrain.cache.quantised import LayeredDraftView
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConflictError, DataError, TargetMismatchError
from longtrain.kernels.hierarchical import reference
from longtrain.kernels.hierarchical.layout import BLOCK, Split, new_planes
from longtrain.methods.named import Named
from longtrain.methods.target_cache import named_cache
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest, TokenBatch
from tests.helpers import Recall, attached, token_ids

FULL = (1, 3)
SHAPE = {
    **SHAPES["gemma3_micro"],
    "num_hidden_layers": 5,
    "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "max_position_embeddings": 4096,
}


def made(**changes):
    """A target in fp64, whose attention is sharp."""
    target = random_target({**SHAPE, **changes}, seed=3, dtype=torch.float64)
    with torch.no_grad():
        for layer in target.model.model.layers:
            layer.self_attn.q_norm.weight.add_(1.0)
    return target


@pytest.fixture(scope="module")
def target():
    return made()


class Spelled(KVCache):
    """One sequence: blocks are read back from codes where QuantSpec does so, and masks are written out."""

    def __init__(self, bits):
        self.bits, self.held, self.tail, self.blocks = bits, {}, {}, 0
        self.len_B = torch.zeros(1, dtype=torch.int64)

    def write(self, layer, k_BGTD, v_BGTD):
        self.tail[layer] = torch.stack((k_BGTD[0], v_BGTD[0]))

    def attend(self, layer, q_BHTD, *, mask, scale):
        return self.attend_window(layer, q_BHTD, mask=mask, scale=scale, window=0)

    def attend_window(self, layer, q_BHTD, *, mask, scale, window):
        old = self.held.get(layer, self.tail[layer][:, :, :0])
        if self.blocks and not window:
            old = torch.cat((self.read_back(old), old[:, :, self.blocks * BLOCK :]), 2)
        k, v = torch.cat((old, self.tail[layer]), 2)
        apart = torch.arange(k.shape[1] - q_BHTD.shape[2], k.shape[1])[:, None] - torch.arange(k.shape[1])
        seen = (apart >= 0) & ((apart < window) | (window == 0))
        logits = (q_BHTD[0] @ k.mT * scale).masked_fill(~seen, -torch.inf)
        return (logits.softmax(-1) @ v)[None], None

    def read_back(self, kv):
        """The first blocks as their codes say; one KV head."""
        size = {"n_layers": 1, "batch": 1, "n_kv_heads": 1, "head_dim": kv.shape[-1]}
        planes = new_planes(**size, blocks=self.blocks, split=Split.FLOOR, device="cpu").layer(0)
        k, v = kv[:, None, :, : self.blocks * BLOCK]
        first_B = torch.zeros(1, dtype=torch.int64)
        reference.quantise_blocks(k, v, planes, first_B, first_B + self.blocks)
        return torch.stack([x[0] for x in reference.dequantise(planes, self.bits)]).to(kv.dtype)

    def commit(self, path_BP, n_B):
        first = not self.held
        self.held = {
            layer: torch.cat((self.held.get(layer, new[:, :, :0]), new), 2)
            for layer, new in self.tail.items()
        }
        self.len_B = self.len_B + n_B
        rest = int(self.len_B) - self.blocks * BLOCK
        self.blocks += max(0, rest // BLOCK - 1) if first else int(rest >= 2 * BLOCK)

    def bytes(self):
        return 0


@pytest.mark.corners
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("size", [1, 7, 8, 9, 24])
@pytest.mark.parametrize("length", [50, 370])
@torch.no_grad()
def test_steps_are_those_of_entries_that_are_read_back_and_masks_that_are_written_out(
    target, name, size, length
):
    """The longer text has a block from the start, and another one is due at 384 tokens."""
    total = length + 24
    ids_BT = torch.tensor(token_ids(total, least=2))
    cache = named_cache(Named(name, {}), target)(1, total, 64)
    assert isinstance(cache, LayeredCache) and cache.full.planes.k_upper.shape[0] == len(FULL)
    found = []
    for one in (cache, Spelled(8 if name == "int8" else 4)):
        rows = []
        for first in (0, *range(length, total, size)):
            rows_BT = ids_BT[:, first : first + size if first else length]
            pos_BT = torch.arange(first, first + rows_BT.shape[1])[None]
            rows.append(target(TokenBatch(pos_BT, rows_BT), one, outputs=OutputRequest("all")).logits_BTV)
            one.commit(None, torch.tensor([rows_BT.shape[1]]))
        found.append(torch.cat(rows, 1))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)  # norms run in fp32


@pytest.mark.parametrize(
    "keys",
    [pytest.param({}, marks=pytest.mark.slow), {"split": "rtn", "weight_bits": 16}, {"kv_bits": 8}],
    ids=["both", "KV only", "weights only"],
)
def test_batches_sampled_and_greedy_are_those_of_plain_decoding_on_this_cache(target, keys):
    engine = Engine(target, attached("quantspec", target, **keys))
    for temperature, texts in ((0.0, token_ids(50, 255, 380)), (1.0, token_ids(250))):
        how = {
            "max_new_tokens": 8,
            "sampling": Sampling(temperature=temperature, seed=5),
            "ignore_eos": True,
        }
        plain = engine.generate(texts, shape=PLAIN, **how)
        drafted = engine.generate(texts, shape=TreeShape((1,) * 4), **how)
        assert drafted.tokens == plain.tokens
        assert drafted.stats.tau > (1.5 if keys.get("weight_bits") == 16 else 1.1) or temperature


@torch.no_grad()
def test_a_draft_that_reads_all_bits_computes_what_the_target_does(target):
    """Chains across the window's edge, one draft step after the other: the layers with a window are exact."""
    engine = Engine(target, attached("quantspec", target, weight_bits=4, kv_bits=8, weight_group=32))
    cache = engine.new_cache(2, 400, 16)
    view = LayeredDraftView(cache, target.info.windows, 8)
    n_B, ids_BT = (
        torch.tensor([290, 5]),
        torch.tensor([token_ids(290, least=2)[0], token_ids(290, seed=2)[0]]),
    )
    target(TokenBatch(torch.arange(290).expand(2, -1), ids_BT, n_B=n_B), cache)
    cache.commit(None, n_B)
    for round_ in range(2):
        chain_BT = torch.tensor(token_ids(12, 12, seed=5 + round_, least=2))
        view.restart()
        steps = []
        for at in range(12):
            rows = TokenBatch(view.len_B[:, None].clone(), chain_BT[:, at : at + 1])
            steps.append(target(rows, view, outputs=OutputRequest("all")).logits_BTV)
            view.commit(None, torch.ones(2, dtype=torch.int64))
        pos_BT = cache.len_B[:, None] + torch.arange(12)
        whole = target(TokenBatch(pos_BT, chain_BT), cache, outputs=OutputRequest("all")).logits_BTV
        torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-5, rtol=1e-5)
        cache.commit(None, torch.tensor([7, 3]))


def test_trees_of_another_draft_and_heads_of_256():
    target = made(
        head_dim=256, query_pre_attn_scalar=256, layer_types=SHAPE["layer_types"][:3], num_hidden_layers=3
    )
    parts = attached("quantspec", target, draft=False)
    texts = token_ids(250, 40, least=2)
    plain = Engine(target, parts).generate(texts, max_new_tokens=16, ignore_eos=True)
    for other, shape in (
        (Parts(draft=Recall(plain.tokens), name="recall"), TreeShape((2, 3, 3))),
        (attached("magicdec", target, cache="hierarchical"), TreeShape((1,) * 4)),
    ):
        engine = Engine(target, parts.merge(other) if other.cache is None else other)
        assert engine.generate(texts, max_new_tokens=16, ignore_eos=True, shape=shape).tokens == plain.tokens


def test_numbers_without_a_code_are_told_with_their_layer_and_do_no_harm():
    target = made()
    call = {"max_new_tokens": 4, "ignore_eos": True}
    engine = Engine(target, attached("quantspec", target))
    before = engine.generate(token_ids(300), **call).tokens
    weight = target.model.model.layers[3].self_attn.v_proj.weight
    with torch.no_grad():
        kept = weight[5].clone()
        weight[5] = float("nan")
        with pytest.raises(DataError, match="values of layer 3 hold NaN"):
            engine.generate(token_ids(300), **call)
        weight[5] = kept
    assert engine.generate(token_ids(300), **call).tokens == before


def test_what_cannot_be_is_refused_in_one_line(target):
    all_near = random_target({**SHAPES["mistral_micro"], "sliding_window": 8})
    for refused in (
        lambda: attached("quantspec", all_near),
        lambda: named_cache(Named("int8", {}), all_near),
        lambda: named_cache(Named("elastic", {}), target),
    ):
        with pytest.raises(TargetMismatchError, match="sliding windows") as caught:
            refused()
        assert "\n" not in str(caught.value)
    with pytest.raises(ConflictError, match="capture=True, but this LayeredCache"):
        Engine(target, attached("quantspec", target), capture=True).generate(token_ids(30), max_new_tokens=4)


def test_the_cache_of_the_call_before_is_freed_although_a_draft_refers_to_it(target):
    engine = Engine(target, attached("quantspec", target))
    first = engine.new_cache(1, 300, 4)
    second = engine.new_cache(1, 300, 4)
    assert first.full.ring.k.untyped_storage().nbytes() == 0 < second.full.ring.k.untyped_storage().nbytes()


def test_without_windows_the_cache_is_the_hierarchical_one():
    target = random_target({**SHAPE, "model_type": "llama", "rope_parameters": {"rope_theta": 1e4}})
    assert type(attached("quantspec", target).cache(1, 300, 4)) is HierarchicalCache
