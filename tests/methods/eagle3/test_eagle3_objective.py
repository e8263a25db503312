"""The loss: against the training-time test written out plainly, chunked against whole, and its figures."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from plain_test import training_time_test

from longtrain.data.packing import packed_sequences
from longtrain.errors import ConfigError
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.objective import Eagle3Objective
from longtrain.methods.rope import ModuleRope
from tests.helpers import gradient_distance
from tests.methods import drafts

gradients = partial(drafts.gradients, Eagle3Objective)
LENGTHS = [19, 3, 34, 1, 2, 21]
SMALL = Config(layers=[0, 1], draft_vocab_size=31, intermediate_size=40)
"""Seven depths, as in the paper, over two layers of a small target."""

VARIANTS = {
    "lk_hybrid": replace(SMALL, objective="lk_hybrid"),
    "kl, fc_norm, norm_output, offsets": replace(
        SMALL, objective="kl", fc_norm=True, norm_output=True, anchor_offset=True, offset_max_tokens=200
    ),
    "tv, one norm before fc, window and sinks": replace(
        SMALL, objective="tv", norm_before_fc=True, window=9, sinks=2
    ),
    "lk, normed residual, window, head frozen": replace(
        SMALL, objective="lk", norm_before_residual=True, window=8, head="frozen"
    ),
    "own rope, bias, qk norm, whole vocabulary, window, sinks and offsets": replace(
        SMALL,
        draft_vocab_size=0,
        attention_bias=True,
        qk_norm=True,
        head_dim=8,
        n_heads=6,
        n_kv_heads=3,
        rope={"rope_type": "default", "rope_theta": 500.0},
        own_embeddings=True,
        window=10,
        sinks=3,
        anchor_offset=True,
    ),
}


def some(n):
    """Labels here and there: whole stretches of rows predict nothing."""
    mask = torch.arange(n) % 7 < 4
    mask[5:17] = False
    return mask


def plain(module, target, config, batch):
    """Every document by itself."""
    offsets = None
    lengths = [b - a for a, b in zip(batch.bounds, batch.bounds[1:], strict=False)]
    if config.anchor_offset:
        usable = config.offset_max_tokens or target.info.max_positions
        offsets = packed_sequences.draw_offsets(lengths, usable=usable, seed=batch.seed)
    pos = packed_sequences.positions(batch.bounds, offsets=offsets, anchors=config.anchors)
    total, hits = torch.zeros((), dtype=torch.float64), {}
    for a, b in zip(batch.bounds, batch.bounds[1:], strict=False):
        part = slice(a, b)
        loss, found = training_time_test(
            module,
            target,
            config,
            batch.ids_T[part],
            pos[part],
            batch.loss_mask_T[part],
            ModuleRope(config, target),
        )
        total = total + loss
        hits |= {(a + row, depth): right for (row, depth), right in found.items()}
    return total, hits


@pytest.mark.parametrize("name", VARIANTS)
def test_chunked_equals_whole_and_the_plain_training_time_test_fp64(llama, make_draft, make_batch, name):
    config = VARIANTS[name]
    assert config.depths == 7
    draft = make_draft(llama, config)
    batch = make_batch(llama, LENGTHS, mask=some)
    whole, outputs = gradients(draft, llama, replace(config, chunk_tokens=0), batch, 0.3)
    part, got = gradients(draft, llama, replace(config, chunk_tokens=7), batch, 0.3)
    assert gradient_distance(got, outputs) <= 1e-10
    torch.testing.assert_close(part.total, whole.total, rtol=1e-12, atol=0)
    for figure, pair in part.metrics.items():
        assert [float(x) for x in pair] == pytest.approx([float(x) for x in whole.metrics[figure]]), figure
    expected, hits = plain(draft, llama, config, batch)
    torch.testing.assert_close(whole.total.detach(), expected.detach(), rtol=1e-10, atol=0)
    draft.zero_grad()
    (0.3 * expected).backward()
    plainly = {key: p.grad for key, p in draft.named_parameters() if p.grad is not None}
    assert gradient_distance(outputs, plainly) <= 1e-10
    frozen = {"lm_head.weight"} if config.head == "frozen" else set()
    assert set(outputs) == set(dict(draft.named_parameters())) - frozen
    assert [int(x) for x in whole.metrics["accuracy"]] == [sum(hits.values()), len(hits)]


def test_figures_count_chains_that_were_right_so_far(llama, make_draft, make_batch):
    """A draft that was fitted to the batch is right often enough to survive some depths."""
    config = replace(SMALL, depths=3, objective="kl", draft_vocab_size=0, chunk_tokens=16)
    target = copy.deepcopy(llama).float()
    draft = make_draft(target, config, torch.float32)
    batch = make_batch(target, [25, 20])
    objective = Eagle3Objective(draft, target, config)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    for _ in range(15):
        loss = objective(batch)
        optimizer.zero_grad()
        (loss.total / loss.tokens).backward()
        optimizer.step()
    _, hits = plain(draft.double(), llama, config, batch)
    loss = Eagle3Objective(draft, llama, config)(batch)
    gained, roots = 0, 0
    for depth in range(3):
        chains = [row for row, k in hits if k == depth and all(hits.get((row, m)) for m in range(depth))]
        right = sum(hits[row, depth] for row in chains)
        assert [int(x) for x in loss.metrics[f"acc/depth_{depth}"]] == [right, len(chains)]
        assert 0 < right <= len(chains)
        gained, roots = gained + right, roots or len(chains)
    assert [int(x) for x in loss.metrics["tau"]] == [gained + roots, roots]
    assert gained < 3 * roots
    assert loss.tokens == batch.tokens_in_step == int(loss.metrics["loss"][1])


def test_a_document_sees_only_itself_and_its_own_past(llama, make_draft, make_batch):
    config = replace(SMALL, chunk_tokens=16)
    objective = Eagle3Objective(make_draft(llama, config), llama, config)
    batch = make_batch(llama, [20, 30], mask=lambda n: torch.arange(n) < 20)
    first = objective(batch).total
    other = batch.ids_T.clone()
    other[20:] = other[20:].flip(0)
    torch.testing.assert_close(objective(replace(batch, ids_T=other)).total, first, rtol=1e-12, atol=0)
    other[18] += 1  # read by every depth that predicts the last label
    assert not torch.equal(objective(replace(batch, ids_T=other)).total, first)
    early = replace(batch, loss_mask_T=torch.arange(50) == 10)
    before = objective(early).total
    other = batch.ids_T.clone()
    other[10:] = other[10:].flip(0)
    torch.testing.assert_close(objective(replace(early, ids_T=other)).total, before, rtol=1e-12, atol=0)


def test_weights_scale_labels_and_no_labels_give_no_loss(llama, make_draft, make_batch):
    for chunk in (0, 16):
        config = replace(SMALL, chunk_tokens=chunk)
        objective = Eagle3Objective(make_draft(llama, config), llama, config)
        batch = make_batch(llama, [30])
        once, twice = (objective(replace(batch, weights_T=torch.full((30,), w))).total for w in (1.0, 2.0))
        torch.testing.assert_close(twice, 2 * once)
        torch.testing.assert_close(once, objective(batch).total)
        nothing = make_batch(llama, [20], mask=lambda n: torch.zeros(n, dtype=torch.bool))
        loss, grads = gradients(objective.module, llama, config, nothing)
        assert (float(loss.total.detach()), loss.tokens, grads) == (0, 0, {})


def test_autocast_gradients_are_near_the_exact_ones(llama, make_draft, make_batch):
    config = replace(SMALL, chunk_tokens=16, window=9, sinks=2)
    batch = make_batch(llama, LENGTHS)
    exact = gradients(make_draft(llama, config), llama, config, batch)[1]
    half, draft = copy.deepcopy(llama).bfloat16(), make_draft(llama, config, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        whole, part = (
            gradients(draft, half, replace(config, chunk_tokens=chunk), batch)[1] for chunk in (0, 16)
        )
    assert 1e-4 < gradient_distance(whole, exact) < 0.3  # bf16 it is
    assert gradient_distance(part, exact) <= 1.2 * gradient_distance(whole, exact)


def test_offsets_beyond_the_context_are_refused(llama, make_draft):
    most = llama.info.max_positions
    config = replace(SMALL, anchor_offset=True, offset_max_tokens=most + 1)
    with pytest.raises(ConfigError, match=rf"offset_max_tokens={most + 1} .*{most} positions"):
        Eagle3Objective(make_draft(llama, config), llama, config)
