"""Features that are read are those that were computed: bit for bit where bf16 holds them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from feature_rows import BOUNDS, WANT, positions

from longtrain.errors import ConfigError, DataError
from longtrain.features.forms import Form, from_8_bits, in_8_bits
from longtrain.features.shards import FeatureFiles
from longtrain.features.target import StoredTarget
from longtrain.losses import top_tokens
from longtrain.targets.step import OutputRequest

LABELLED = slice(0, BOUNDS[-2])


def same(got, outputs, rows=LABELLED):
    assert torch.equal(got.hidden[-1][rows], outputs.hidden[-1][rows])
    for one, other in zip(got.kv[1], outputs.kv[1], strict=True):
        assert torch.equal(one[rows], other[rows])


def test_bf16_gives_the_same_bits(family, batch, ask):
    outputs = family.packed(batch.ids_T, positions(BOUNDS), BOUNDS, WANT)
    same(ask(family, batch), outputs)
    read = ask(family, batch, compute=False)
    same(read, outputs)
    assert not read.hidden[-1][BOUNDS[-2] :].any()  # padding is not stored


def test_documents_may_move_and_meet_others(family, batch, ask):
    """Keys lie before RoPE, and a document's features are its own: any row and any positions serve."""
    ask(family, batch)
    order, bounds = [2, 0], (0, 27, 47)
    picks = torch.cat([torch.arange(BOUNDS[d], BOUNDS[d + 1]) for d in order])
    moved = replace(batch, ids_T=batch.ids_T[picks], loss_mask_T=batch.loss_mask_T[picks], bounds=bounds)
    pos_T = positions(bounds) + 1000
    got = ask(family, moved, compute=False, pos_T=pos_T)
    outputs = family.packed(moved.ids_T, pos_T, bounds, WANT)
    for one, other in zip((*got.kv[1], got.hidden[-1]), (*outputs.kv[1], outputs.hidden[-1]), strict=True):
        assert (one - other).norm() < 0.02 * other.norm()  # bf16 at other positions
    unturned = ask(family, moved, compute=False).kv[1][0]
    assert (got.kv[1][0] - unturned).abs().max() > 0.2  # the positions do count


def test_what_is_missing_alone_is_computed(target, batch, ask, tmp_path):
    first = replace(batch, ids_T=batch.ids_T[:33], loss_mask_T=batch.loss_mask_T[:33], bounds=BOUNDS[:3])
    ask(target, first)
    seen = []

    class Counting:
        def __getattr__(self, name):
            return getattr(target, name)

        def packed(self, ids_T, pos_T, bounds, outputs):
            seen.append(bounds)
            return target.packed(ids_T, pos_T, bounds, outputs)

    got = ask(Counting(), batch)
    assert seen == [(0, 27)]
    whole = target.packed(batch.ids_T, positions(BOUNDS), BOUNDS, WANT)
    torch.testing.assert_close(got.hidden[-1][LABELLED], whole.hidden[-1][LABELLED], rtol=0.05, atol=0.05)
    assert len(FeatureFiles(tmp_path / "f")) == 3


def test_8_bits_round_to_half_a_step_and_cut_nothing():
    x = (
        torch.randn(50, 3, 16, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-6, 6, 50)[:, None, None]
    )
    x[0] = 0
    codes, scale = in_8_bits(x)
    assert codes.dtype == torch.int8 and scale.shape == (50, 3) and scale.dtype == torch.bfloat16
    error = (from_8_bits(codes, scale, torch.float32) - x).abs()
    assert (error <= scale.float()[..., None] * 0.5001).all()
    assert codes.abs().amax() <= 127 and (codes[1:].abs().amax(-1) >= 124).all()  # the range is used


@pytest.mark.parametrize("form", [Form("int8"), Form("int8", 7), Form("bf16", 7)])
def test_other_forms_train_on_what_they_store(target, batch, ask, form):
    """So it makes no difference whether a run computed a document or read it."""
    computed, read = ask(target, batch, form=form), ask(target, batch, form=form, compute=False)
    whole = target.packed(batch.ids_T, positions(BOUNDS), BOUNDS, WANT)
    for one, other, truth in zip(computed.kv[1], read.kv[1], whole.kv[1], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one[LABELLED], truth[LABELLED], rtol=0.02, atol=0.04)
    assert (-1 in read.hidden) == (form.top_k == 0)
    if form.top_k:
        law = top_tokens(whole.hidden[-1], target.head_weight, 7)
        assert torch.equal(read.top.ids_TK[LABELLED], law.ids_TK[LABELLED])
        torch.testing.assert_close(read.top.logp_TK[LABELLED], law.logp_TK[LABELLED], rtol=1e-3, atol=0)


def test_the_lean_form_has_the_bytes_it_should(target, batch, ask, tmp_path):
    """2 x G x D codes and as many scales as heads; 7 tokens in a byte each (97 of them) and fp16."""
    found = {}
    for name, form in {"bf16": Form(), "lean": Form("int8", 7)}.items():
        ask(target, batch, form=form, folder=tmp_path / name)
        shards = FeatureFiles(tmp_path / name)
        place = next(iter(shards._found))
        stored = shards.read(place, "one")
        found[name] = sum(part.nbytes for part in stored.values()) / shards._found[place].tokens
    info = target.info
    kv = 2 * info.n_kv_heads * info.head_dim
    assert found["bf16"] == 2 * kv + 2 * info.hidden_size
    assert found["lean"] == kv + 2 * 2 * info.n_kv_heads + 7 * 3


def test_passes_that_cannot_be_stored_are_refused_in_a_line(target, batch, ask, tmp_path):
    ask(target, batch)
    with pytest.raises(DataError, match=r"features in .* lack document two of 13 tokens .*features=fill"):
        ask(
            target,
            replace(batch, ids_T=batch.ids_T.clone().index_fill_(0, torch.tensor([25]), 1)),
            compute=False,
        )
    with pytest.raises(
        ConfigError, match=r"hold hidden=-1 kv=1, and this method asks for kv=1; pass features.folder"
    ):
        ask(target, batch, outputs=OutputRequest("none", stop_at_layer=1, kv=(1,)))
    stand_in = StoredTarget(target, FeatureFiles(tmp_path / "f"), Form(), compute=True)
    with pytest.raises(ConfigError, match=r"watches every layer.*features=online"):
        stand_in.packed(batch.ids_T, positions(BOUNDS), BOUNDS, WANT, hook=lambda *_: None)


def test_a_second_question_about_a_row_goes_to_the_target_itself(target, batch, tmp_path):
    """LongSpec's guard compares positions; an answer from the store would always be 0."""

    class Guarded(torch.nn.Module):
        def __init__(self, target):
            super().__init__()
            self.target = target

        def forward(self, batch):
            self.target.packed(batch.ids_T, positions(BOUNDS), BOUNDS, WANT)
            return self.target.packed(batch.ids_T, positions(BOUNDS), BOUNDS).hidden[-1]

    for compute in (True, False):
        shards = FeatureFiles(tmp_path / "f")
        stand_in = StoredTarget(target, shards, Form("int8"), compute=compute)
        guarded = Guarded(stand_in)
        stand_in.follow(guarded)
        if not compute:
            with pytest.raises(ConfigError, match=r"asks the target itself for hidden=-1.*guard_every of 0"):
                guarded(batch)
            return
        truth = target.packed(batch.ids_T, positions(BOUNDS), BOUNDS).hidden[-1]
        assert torch.equal(guarded(batch), truth)
        shards.close()
