"""The loss: chunked against whole, packed against single documents, and what its figures mean."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional

from longtrain.data.packing import packed_sequences
from longtrain.errors import ConfigError
from longtrain.methods import get
from longtrain.methods.longspec import indices
from longtrain.methods.longspec.config import Config
from longtrain.methods.longspec.objective import LongSpecObjective
from longtrain.methods.longspec.spec import SPEC
from longtrain.targets.step import OutputRequest
from tests.helpers import gradient_distance
from tests.methods import drafts

gradients = partial(drafts.gradients, LongSpecObjective)
LENGTHS = [37, 3, 90, 1, 2, 61]


@pytest.mark.corners
@pytest.mark.parametrize("objective", ["kl", "ce"])
@pytest.mark.parametrize("chunk", [1, 16, 50])
def test_chunked_gradient_is_the_full_gradient_fp64(target, make_draft, make_batch, objective, chunk):
    config = Config(window=12, objective=objective, chunk_tokens=0, anchor_offset=True, guard_every=0)
    draft = make_draft(target, config)
    batch = make_batch(target, LENGTHS if chunk > 1 else [9, 1, 14])
    full, outputs = gradients(draft, target, config, batch, 0.3)
    part, got = gradients(draft, target, replace(config, chunk_tokens=chunk), batch, 0.3)
    assert set(outputs) == set(dict(draft.named_parameters()))
    assert gradient_distance(got, outputs) <= 1e-10
    torch.testing.assert_close(part.total, full.total, rtol=1e-12, atol=0)
    assert part.metrics.keys() == full.metrics.keys()
    for name, pair in part.metrics.items():
        assert [float(x) for x in pair] == pytest.approx([float(x) for x in full.metrics[name]]), name


def test_chunked_gradient_fp32_and_bf16(llama, make_draft, make_batch):
    config = Config(window=12, chunk_tokens=0)
    batch = make_batch(llama, LENGTHS)
    exact = gradients(make_draft(llama, config), llama, config, batch)[1]
    chunked = replace(config, chunk_tokens=16)

    single, draft = copy.deepcopy(llama).float(), make_draft(llama, config, torch.float32)
    full, part = (gradients(draft, single, c, batch)[1] for c in (config, chunked))
    assert gradient_distance(part, full) <= 1e-5

    half, draft = copy.deepcopy(llama).bfloat16(), make_draft(llama, config, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        full, part = (gradients(draft, half, c, batch)[1] for c in (config, chunked))
    assert 1e-4 < gradient_distance(full, exact) < 0.3  # bf16 it is
    assert gradient_distance(part, exact) <= 1.2 * gradient_distance(full, exact)


def test_packing_equals_single_documents(target, make_draft, make_batch, monkeypatch):
    config = Config(window=7, chunk_tokens=16)
    draft = make_draft(target, config)
    batch = make_batch(target, LENGTHS)
    shifts = iter([2, 5, 1, 1, 3, 4])
    packed_shifts = [2, 5, 1, 1, 3, 4]
    monkeypatch.setattr(indices, "draw_shifts", lambda n, **_: packed_shifts)
    whole, outputs = gradients(draft, target, config, batch)
    sums: dict[str, torch.Tensor] = {}
    total, hits = 0.0, 0.0
    for a, b in zip(batch.bounds, batch.bounds[1:], strict=False):
        shift = next(shifts)
        monkeypatch.setattr(indices, "draw_shifts", lambda n, shift=shift, **_: [shift])
        single = replace(batch, ids_T=batch.ids_T[a:b], bounds=(0, b - a), loss_mask_T=batch.loss_mask_T[a:b])
        loss, grads = gradients(draft, target, config, single)
        total, hits = total + loss.total.detach(), hits + loss.metrics["accuracy"][0]
        for name, grad in grads.items():
            sums[name] = sums.get(name, 0) + grad
    torch.testing.assert_close(whole.total.detach(), total, rtol=1e-12, atol=0)
    assert whole.metrics["accuracy"][0] == hits
    assert gradient_distance(sums, outputs) <= 1e-10


def test_labels_are_the_next_tokens_and_rows_without_keys_count(llama, make_draft, make_batch):
    config = Config(window=5, objective="ce", shift_weights=[0, 0, 0, 0, 1.0])  # shift 5 in all documents
    draft = make_draft(llama, config)
    batch = make_batch(
        llama, [3]
    )  # shorter than its shift: cross-attention gives zeros, the rows still count
    loss = LongSpecObjective(draft, llama, config)(batch)
    chunk = indices.make_chunk((0, 3), [5], 0, 3, window=5)
    assert chunk.spans == ((0, 0),)
    cos, sin = llama.rope(torch.arange(3)[None])
    kv = llama.packed(batch.ids_T, torch.arange(3), (0, 3), OutputRequest("none", kv=(1,))).kv[1]
    hidden = draft(llama.embed(batch.ids_T), (cos[0], sin[0]), kv, chunk)
    outputs = functional.cross_entropy(llama.head(hidden[:2]), batch.ids_T[1:], reduction="sum")
    torch.testing.assert_close(loss.total, outputs)
    assert loss.tokens == 2
    draft.cross_attn.o_proj.weight.data.mul_(3)  # read nothing, so changes nothing
    torch.testing.assert_close(LongSpecObjective(draft, llama, config)(batch).total, outputs)


def test_loss_mask_selects_rows_and_chunks(llama, make_draft, make_batch):
    config = Config(window=8, chunk_tokens=16)

    def answers(n):
        mask = torch.zeros(n, dtype=torch.bool)
        mask[20:26] = mask[100:104] = mask[n - 1] = True
        return mask

    batch = make_batch(llama, [50, 100], mask=answers)
    objective = LongSpecObjective(make_draft(llama, config), llama, config)
    row = objective._read(batch)
    assert [b - a for a, b in row.chunks] == [6, 4, 1]
    loss = objective(batch)
    assert loss.tokens == batch.tokens_in_step == 11
    everything = replace(config, chunk_tokens=0)
    whole = LongSpecObjective(objective.module, llama, everything)(batch)
    torch.testing.assert_close(loss.total, whole.total, rtol=1e-12, atol=0)


@pytest.mark.parametrize("chunk", [0, 16])
def test_a_row_without_labels_has_no_loss(llama, make_draft, make_batch, chunk):
    config = Config(window=8, chunk_tokens=chunk)
    batch = make_batch(llama, [20], mask=lambda n: torch.zeros(n, dtype=torch.bool))
    loss, grads = gradients(make_draft(llama, config), llama, config, batch)
    assert (float(loss.total.detach()), loss.tokens, grads) == (0, 0, {})


def test_weights_scale_rows(llama, make_draft, make_batch):
    batch = make_batch(llama, [30])
    for kind in ("kl", "ce"):
        config = Config(window=8, objective=kind)
        objective = LongSpecObjective(make_draft(llama, config), llama, config)
        plain = objective(batch).total
        double = objective(replace(batch, weights_T=torch.full((30,), 2.0))).total
        torch.testing.assert_close(double, 2 * plain)


def test_figures_pool_by_depth(llama, make_draft, make_batch):
    config = Config(window=8, max_depth=3)
    batch = make_batch(llama, [20] * 12)
    metrics = LongSpecObjective(make_draft(llama, config), llama, config)(batch).metrics
    assert set(metrics) == {"loss", "accuracy", "acc/depth_0", "acc/depth_1", "acc/depth_2"}
    depths = [metrics[f"acc/depth_{j}"] for j in range(3)]
    assert sum(int(n) for _, n in depths) == int(metrics["accuracy"][1]) == 12 * 19
    assert sum(float(s) for s, _ in depths) == float(metrics["accuracy"][0])
    shifts = indices.draw_shifts(12, weights=[1, 1, 1], seed=batch.seed)
    assert [int(n) for _, n in depths] == [19 * shifts.count(j) for j in (1, 2, 3)]
    config = replace(config, flash_noisy=False)
    assert "acc/depth_1" not in LongSpecObjective(make_draft(llama, config), llama, config)(batch).metrics


def test_offsets_beyond_the_context_are_refused(llama, make_draft):
    most = llama.info.max_positions
    config = Config(window=8, anchor_offset=True, offset_max_tokens=most + 1)
    with pytest.raises(ConfigError, match=rf"offset_max_tokens={most + 1} .*{most} positions"):
        LongSpecObjective(make_draft(llama, config), llama, config)
    for fine in (replace(config, offset_max_tokens=most), replace(config, anchor_offset=False)):
        LongSpecObjective(make_draft(llama, fine), llama, fine)


def test_guard_is_the_targets_own_loss_under_offsets(llama, make_draft, make_batch):
    config = Config(window=8, anchor_offset=True, offset_max_tokens=500, guard_every=3)
    objective = LongSpecObjective(make_draft(llama, config), llama, config)
    batch = make_batch(llama, [20, 30], seed=6)
    gap, count = objective(batch).metrics["guard/target_ce_delta"]
    offsets = packed_sequences.draw_offsets([20, 30], usable=500, seed=6)

    def own_loss(pos):
        hidden = llama.packed(batch.ids_T, pos, batch.bounds).hidden[-1]
        rows = batch.loss_mask_T.nonzero()[:, 0] - 1
        return functional.cross_entropy(llama.head(hidden[rows]), batch.ids_T[rows + 1], reduction="sum")

    shifted = packed_sequences.positions(batch.bounds, offsets=offsets, anchors=4)
    outputs = own_loss(shifted) - own_loss(packed_sequences.positions(batch.bounds))
    assert abs(float(outputs)) > 1e-6
    torch.testing.assert_close(gap, outputs, rtol=1e-9, atol=1e-12)
    assert int(count) == 48
    other = objective(replace(batch, seed=7)).metrics["guard/target_ce_delta"]
    assert [float(x) for x in other] == [0, 0]
    assert "guard/target_ce_delta" not in objective.eval()(batch).metrics


def test_nothing_global_is_drawn_and_seeds_repeat(llama, make_draft, make_batch):
    config = Config(window=8, anchor_offset=True)
    objective = LongSpecObjective(make_draft(llama, config), llama, config)
    batch = make_batch(llama, [20, 30])
    state = torch.get_rng_state()
    first, again = objective(batch).total, objective(batch).total
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.equal(first, objective(replace(batch, seed=4)).total)


def test_only_the_draft_trains_and_one_batch_can_be_learned(target, make_batch):
    config = Config(window=8, chunk_tokens=32, max_depth=2)
    single = copy.deepcopy(target).float()
    module = SPEC.build(config, single.info)
    objective = SPEC.objective(module, single, config)
    before = {name: p.clone() for name, p in single.named_parameters()}
    trained = {id(p) for p in objective.parameters() if p.requires_grad}
    assert trained == {id(p) for p in module.parameters()}
    batch = make_batch(single, [40, 40])
    optimizer = torch.optim.AdamW(module.parameters(), lr=6e-3)
    losses = []
    for _ in range(15):
        loss = objective(batch)
        optimizer.zero_grad()
        (loss.total / loss.tokens).backward()
        optimizer.step()
        losses.append(float(loss.total.detach()) / loss.tokens)
    assert losses[-1] < 0.2 * losses[0]
    assert all(torch.equal(p, before[name]) for name, p in single.named_parameters())


def test_ablation_without_cross_attention(llama, make_draft, make_batch):
    config = Config(window=8, cross_attention=False, objective="ce")
    draft = make_draft(llama, config)
    assert not any("cross_attn" in name for name, _ in draft.named_parameters())
    loss, grads = gradients(draft, llama, config, make_batch(llama, [30]))
    assert set(grads) == set(dict(draft.named_parameters()))
    assert torch.isfinite(loss.total)


def test_config_refuses_nonsense():
    assert get("longspec") is SPEC
    for keys, what in (
        ({"window": 0}, "window"),
        ({"objective": "mse"}, "objective"),
        ({"shift_weights": [1.0, 1.0]}, "shift_weights"),
        ({"shift_weights": [0.0] * 5}, "shift_weights"),
        ({"chunk_tokens": -1}, "chunk_tokens"),
    ):
        with pytest.raises(ConfigError, match=what):
            Config(**keys)


def test_layer_outside_the_target(llama):
    with pytest.raises(ConfigError, match="kv_source_layer=2"):
        SPEC.build(Config(kv_source_layer=2), llama.info)
