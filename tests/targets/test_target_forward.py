import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from longtrain.cache.base import Causal, Tree
from longtrain.errors import ConfigError
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES as SHAPE_TABLE
from longtrain.targets.step import OutputRequest, TokenBatch

SHAPES = ["llama_micro", "qwen2_micro", "qwen3_micro", "mistral_micro", "gemma3_micro"]
# Norms and rotary angles run in fp32 inside these models, whatever their dtype: inputs that differ by 1e-16
# may round apart there, by 6e-8 relative.
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module", params=SHAPES)
def target(request):
    return random_target(request.param, dtype="float64")


@pytest.fixture(scope="module")
def llama():
    return random_target("llama_micro", dtype="float64")


def stock_logits(target, ids_T):
    """The same weights through transformers' own attention."""
    target.model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            return target.model(input_ids=ids_T[None], use_cache=False).logits[0]
    finally:
        target.model.set_attn_implementation("longtrain")


def random_ids(*shape, seed=0):
    return torch.randint(2, 97, shape, generator=torch.Generator().manual_seed(seed))


def prefill(target, ids_BT, n_B):
    cache = target.new_cache(len(ids_BT), 64, 12)
    pos_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
    step = target(TokenBatch(pos_BT, ids_BT, n_B=n_B), cache, outputs=OutputRequest("last"))
    cache.commit(None, n_B)
    return cache, step


@torch.no_grad()
def test_prefill_equals_transformers(target):
    ids_BT = random_ids(2, 13)
    cache = target.new_cache(2, 32, 0)
    pos_BT = torch.arange(13).expand(2, -1)
    step = target(TokenBatch(pos_BT, ids_BT), cache, outputs=OutputRequest("all"))
    for row, ids_T in zip(step.logits_BTV, ids_BT, strict=True):
        torch.testing.assert_close(row, stock_logits(target, ids_T), **CLOSE)


@torch.no_grad()
def test_a_ragged_batch_decodes_as_each_sequence_alone(target):
    n_B = torch.tensor([11, 5, 1])
    ids_BT, more_BT = random_ids(3, 11), random_ids(3, 6, seed=1)
    cache, step = prefill(target, ids_BT, n_B)
    wholes = [torch.cat([ids_BT[b, : n_B[b]], more_BT[b]]) for b in range(3)]
    expected = [stock_logits(target, whole) for whole in wholes]
    got = [step.logits_BTV[:, 0]]
    for t in range(6):
        step = target(TokenBatch(cache.len_B[:, None], more_BT[:, t : t + 1]), cache)
        got.append(step.logits_BTV[:, 0])
        cache.commit(None, torch.ones_like(n_B))
    for b in range(3):
        mine = torch.stack([rows[b] for rows in got])
        torch.testing.assert_close(mine, expected[b][n_B[b] - 1 :], **CLOSE)


@torch.no_grad()
def test_tree_rows_equal_each_path_alone(target):
    parents = [-1, 0, 0, 1, 1, 2, 4]
    depth = torch.tensor([0, 1, 1, 2, 2, 2, 3])
    visible = torch.eye(7, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        visible[node] |= visible[parent]
    n_B = torch.tensor([9, 4])
    ids_BT, tree_BN = random_ids(2, 9), random_ids(2, 7, seed=2)
    cache, _ = prefill(target, ids_BT, n_B)
    rows = TokenBatch(cache.len_B[:, None] + depth, tree_BN, mask=Tree(visible.expand(2, -1, -1)))
    step = target(rows, cache, outputs=OutputRequest("all"))
    for b in range(2):
        for node in range(7):
            path = [i for i in range(7) if visible[node, i]]
            whole = torch.cat([ids_BT[b, : n_B[b]], tree_BN[b, path]])
            torch.testing.assert_close(step.logits_BTV[b, node], stock_logits(target, whole)[-1], **CLOSE)


@torch.no_grad()
def test_commit_of_a_path_equals_recomputing_it(target):
    visible = torch.eye(5, dtype=torch.bool)
    for node, parent in ((1, 0), (2, 0), (3, 2), (4, 3)):
        visible[node] |= visible[parent]
    n_B = torch.tensor([6, 3])
    ids_BT, tree_BN = random_ids(2, 6), random_ids(2, 5, seed=3)
    cache, _ = prefill(target, ids_BT, n_B)
    depth = torch.tensor([0, 1, 1, 2, 3])
    target(TokenBatch(cache.len_B[:, None] + depth, tree_BN, mask=Tree(visible.expand(2, -1, -1))), cache)
    path_BP, accepted_B = torch.tensor([[0, 2, 3, 4], [0, 1, 0, 0]]), torch.tensor([4, 2])
    cache.commit(path_BP, accepted_B)
    after_BT = random_ids(2, 1, seed=4)
    step = target(TokenBatch(cache.len_B[:, None], after_BT), cache)
    for b in range(2):
        path = tree_BN[b, path_BP[b, : accepted_B[b]]]
        whole = torch.cat([ids_BT[b, : n_B[b]], path, after_BT[b]])
        torch.testing.assert_close(step.logits_BTV[b, 0], stock_logits(target, whole)[-1], **CLOSE)


@torch.no_grad()
def test_packed_equals_each_document_alone(target):
    bounds = (0, 5, 6, 17)
    ids_T = random_ids(17)
    pos_T = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])
    packed = target.packed(ids_T, pos_T, bounds, OutputRequest("none", hidden=(-1,), kv=(1,)))
    k_TGD, v_TGD = packed.kv[1]
    for start, stop in pairwise(bounds):
        doc = slice(start, stop)
        expected = stock_logits(target, ids_T[doc])
        torch.testing.assert_close(target.head(packed.hidden[-1][doc]), expected, **CLOSE)
        cache = target.plain_cache(1, 64, 12)
        target(TokenBatch(pos_T[None, doc], ids_T[None, doc]), cache, outputs=OutputRequest("none"))
        stored = cache.k_LBGSD[1, 0, :, : stop - start].transpose(0, 1)
        torch.testing.assert_close(k_TGD[doc], stored, **CLOSE)
        stored = cache.v_LBGSD[1, 0, :, : stop - start].transpose(0, 1)
        torch.testing.assert_close(v_TGD[doc], stored, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True])
def test_a_packed_row_gives_any_layers_as_separate_forwards_do(fused):
    """Three hidden states and two layers' K and V at once, as a draft of several layers needs them."""
    four = random_target({**SHAPE_TABLE["llama_micro"], "num_hidden_layers": 4}, dtype="float64")
    if fused:
        four.fuse()
    bounds, ids_T = (0, 5, 17), random_ids(17)
    pos_T = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])
    packed = four.packed(ids_T, pos_T, bounds, OutputRequest("none", hidden=(0, 2, -1), kv=(1, 3)))
    assert set(packed.hidden) == {0, 2, -1} and set(packed.kv) == {1, 3}
    for start, stop in pairwise(bounds):
        doc, n_B = slice(start, stop), torch.tensor([stop - start])
        cache = four.plain_cache(1, 32, 0)
        rows = TokenBatch(pos_T[None, doc], ids_T[None, doc])
        alone = four(rows, cache, outputs=OutputRequest("none", hidden=(0, 2, -1)))
        cache.commit(None, n_B)
        for layer, hidden_TE in packed.hidden.items():
            torch.testing.assert_close(hidden_TE[doc], alone.hidden[layer][0], **CLOSE)
        for layer, kv in packed.kv.items():
            for mine_TGD, stored_LBGSD in zip(kv, (cache.k_LBGSD, cache.v_LBGSD), strict=True):
                stored_TGD = stored_LBGSD[layer, 0, :, : stop - start].transpose(0, 1)
                torch.testing.assert_close(mine_TGD[doc], stored_TGD, **CLOSE)
    first = four.packed(ids_T, pos_T, bounds, OutputRequest("none", hidden=(0,), kv=(1, 2), stop_at_layer=2))
    assert set(first.hidden) == {0} and torch.equal(first.hidden[0], packed.hidden[0])
    assert torch.equal(first.kv[1][0], packed.kv[1][0])


@torch.no_grad()
def test_stopping_at_a_layer_gives_the_same_keys_and_runs_nothing_after(target):
    ids_T, pos_T = random_ids(8), torch.arange(8)
    whole = target.packed(ids_T, pos_T, (0, 8), OutputRequest("none", hidden=(-1,), kv=(1,)))
    ran = []
    handles = [target.model.model.layers[1].mlp.register_forward_hook(lambda *_: ran.append("mlp"))]
    handles.append(target.model.model.norm.register_forward_hook(lambda *_: ran.append("norm")))
    try:
        early = target.packed(ids_T, pos_T, (0, 8), OutputRequest("none", stop_at_layer=1, kv=(1,)))
        cache = target.plain_cache(1, 16, 0)
        target(TokenBatch(pos_T[None], ids_T[None]), cache, outputs=OutputRequest("none", stop_at_layer=1))
    finally:
        for handle in handles:
            handle.remove()
    assert ran == []
    assert not early.hidden
    assert all(torch.equal(x, y) for x, y in zip(early.kv[1], whole.kv[1], strict=True))
    torch.testing.assert_close(cache.k_LBGSD[1, 0, :, :8].transpose(0, 1), whole.kv[1][0], **CLOSE)
    after = target.packed(ids_T, pos_T, (0, 8))  # leaving early leaves nothing behind
    assert torch.equal(after.hidden[-1], whole.hidden[-1])


@torch.no_grad()
def test_hidden_states_are_layer_outputs(llama):
    ids_BT, pos_BT = random_ids(2, 6), torch.arange(6).expand(2, -1)
    step = llama(
        TokenBatch(pos_BT, ids_BT), llama.new_cache(2, 8, 0), outputs=OutputRequest("all", hidden=(0, 1, -1))
    )
    assert not llama.model.model.layers[0]._forward_hooks
    normed = llama.model.model.norm(step.hidden[1])
    torch.testing.assert_close(step.hidden[-1], normed)
    torch.testing.assert_close(llama.head(step.hidden[-1]), step.logits_BTV)
    llama.model.set_attn_implementation("sdpa")
    expected = llama.model(input_ids=ids_BT, use_cache=False, output_hidden_states=True).hidden_states[1]
    llama.model.set_attn_implementation("longtrain")
    torch.testing.assert_close(step.hidden[0], expected, **CLOSE)


@torch.no_grad()
def test_embeddings_instead_of_ids(llama):
    ids_BT, pos_BT = random_ids(1, 6), torch.arange(6)[None]
    by_ids = llama(TokenBatch(pos_BT, ids_BT), llama.new_cache(1, 8, 0))
    by_rows = llama(TokenBatch(pos_BT, embeds_BTE=llama.embed(ids_BT)), llama.new_cache(1, 8, 0))
    assert torch.equal(by_ids.logits_BTV, by_rows.logits_BTV)


@torch.no_grad()
def test_the_head_runs_over_wanted_rows_only(llama, monkeypatch):
    seen = []
    head = type(llama).head
    monkeypatch.setattr(type(llama), "head", lambda self, h: seen.append(tuple(h.shape)) or head(self, h))
    pos_BT, ids_BT, n_B = torch.arange(6).expand(2, -1), random_ids(2, 6), torch.tensor([6, 2])
    last = llama(TokenBatch(pos_BT, ids_BT, n_B=n_B), llama.new_cache(2, 8, 0)).logits_BTV
    every = llama(
        TokenBatch(pos_BT, ids_BT), llama.new_cache(2, 8, 0), outputs=OutputRequest("all")
    ).logits_BTV
    none = llama(TokenBatch(pos_BT, ids_BT), llama.new_cache(2, 8, 0), outputs=OutputRequest("none"))
    llama.packed(ids_BT[0], pos_BT[0], (0, 6))
    assert seen == [(2, 1, 48), (2, 6, 48)]
    assert none.logits_BTV is None
    torch.testing.assert_close(last[:, 0], torch.stack([every[0, 5], every[1, 1]]))


def test_the_target_stays_frozen_and_in_eval_mode(llama):
    assert not any(p.requires_grad for p in llama.parameters())
    llama.train()
    assert not llama.training and not llama.model.training


def test_gradients_flow_through_a_packed_row_to_its_embeddings(llama, monkeypatch):
    """Needed by whoever trains soft tokens; no in-place write of a cache may stand in the way."""
    leaf = llama.embed(random_ids(5)).clone().requires_grad_()
    monkeypatch.setattr(type(llama), "embed", lambda self, ids: leaf)
    hidden_TE = llama.packed(random_ids(5), torch.arange(5), (0, 5)).hidden[-1]
    (grad,) = torch.autograd.grad(hidden_TE[3].sum(), leaf)
    assert grad[:4].abs().sum(-1).min() > 0 and not grad[4].any()


@pytest.mark.parametrize(
    "outputs",
    [
        OutputRequest("last", stop_at_layer=1),
        OutputRequest("none", (-1,), 1),
        OutputRequest("none", (1,), 1),
        OutputRequest("none", (2,)),
        OutputRequest("none", stop_at_layer=9),
        OutputRequest("none", kv=(0,)),
    ],
)
def test_wants_that_cannot_be_had_are_refused(llama, outputs):
    rows = TokenBatch(torch.arange(3)[None], random_ids(1, 3))
    with pytest.raises(ConfigError, match="allowed"):
        llama(rows, llama.new_cache(1, 8, 0), outputs=outputs)


def test_packed_rows_that_make_no_sense_are_refused(llama):
    ids_T, pos_T = random_ids(4), torch.arange(4)
    for outputs in (
        OutputRequest(),
        OutputRequest("none", kv=(-1,)),
        OutputRequest("none", kv=(1,), stop_at_layer=0),
    ):
        with pytest.raises(ConfigError, match="allowed"):
            llama.packed(ids_T, pos_T, (0, 4), outputs)


def test_a_model_called_past_its_target_says_so(llama):
    with pytest.raises(ConfigError, match="called directly"):
        llama.model(input_ids=random_ids(1, 3), use_cache=False)


def test_rope_is_the_targets_own_with_its_scaling():
    scaled = random_target(
        {
            "model_type": "llama", "vocab_size": 9, "hidden_size": 32, "intermediate_size": 32,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
        }
    )  # fmt: skip
    pos_BT = torch.tensor([[0, 3, 40]])
    cos, sin = scaled.rope(pos_BT)
    angle = pos_BT[..., None] / 4.0 * 100.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(cos, torch.cat([angle, angle], -1).cos())
    torch.testing.assert_close(sin, torch.cat([angle, angle], -1).sin())
    assert scaled.info.rope["factor"] == 4.0


def test_casting_a_target_does_not_round_its_rotary_angles():
    """A trainer's bf16 plug-in casts every submodule; bf16 frequencies would be wrong by radians at 8K."""
    target, pos_BT = random_target("llama_micro"), torch.tensor([[1, 700, 8000]])
    before = target.rope(pos_BT)
    torch.nn.ModuleDict({"target": target}).to(torch.bfloat16)
    assert target.dtype == torch.bfloat16
    for mine, theirs in zip(target.rope(pos_BT), before, strict=True):
        assert torch.equal(mine, theirs.bfloat16())


def test_layer_state_has_hugging_face_names():
    names = set(random_target("qwen3_micro").layer_state(1))
    assert {"self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight"} <= names
    assert {"self_attn.q_norm.weight", "self_attn.k_norm.weight", "post_attention_layernorm.weight"} <= names


def test_importing_the_target_patches_no_class_of_transformers():
    """In a fresh process: every attribute of the model modules is the same object before and after."""
    program = """
import importlib
names = [f"transformers.models.{m}.modeling_{m}" for m in ("llama", "qwen2", "qwen3", "mistral")]
names.append("transformers.modeling_utils")
modules = [importlib.import_module(n) for n in names]
def snapshot():
    return {
        (m.__name__, name, leaf): value
        for m in modules for name, cls in vars(m).items() if isinstance(cls, type)
        for leaf, value in vars(cls).items()
    } | {(m.__name__, name): v for m in modules for name, v in vars(m).items()}
before = snapshot()
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
masks = set(ALL_MASK_ATTENTION_FUNCTIONS)
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES as SHAPE_TABLE
random_target("llama_micro")
after = snapshot()
changed = [k for k in after if callable(after[k]) and before.get(k) is not after[k]]
assert not changed, changed
assert set(ALL_MASK_ATTENTION_FUNCTIONS) == masks and "longtrain" not in masks
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu_bf16_stays_near_the_cpu(shape):
    near = random_target(shape, dtype="float32")
    far = random_target(shape, dtype="bfloat16", device="cuda")
    far.load_state_dict(near.state_dict())
    ids_T, pos_T = random_ids(40), torch.cat([torch.arange(25), torch.arange(15)])
    packed = near.packed(ids_T, pos_T, (0, 25, 40)).hidden[-1]
    other = far.packed(ids_T.cuda(), pos_T.cuda(), (0, 25, 40)).hidden[-1].float().cpu()
    assert (packed - other).norm() <= 0.05 * packed.norm()
    cache = far.new_cache(1, 40, 0)
    for row in range(25):
        rows = TokenBatch(pos_T[None, row : row + 1].cuda(), ids_T[None, row : row + 1].cuda(), mask=Causal())
        step = far(rows, cache, outputs=OutputRequest("none", (-1,)))
        cache.commit(None, torch.ones(1, dtype=torch.int64, device="cuda"))
    assert (packed[24] - step.hidden[-1][0, 0].float().cpu()).norm() <= 0.05 * packed[24].norm()
