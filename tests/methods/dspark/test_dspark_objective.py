"""The loss: against blocks written out plainly, chunked against whole, its masks, labels and metrics."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from plain_block import block_hidden, context_states, last_kv, selector_score, slot_logits

from longtrain.data.packing import packed_sequences
from longtrain.data.packing.batch import Batch
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.methods.dspark import objective as module
from longtrain.methods.dspark.anchors import anchors_of
from longtrain.methods.dspark.config import Config, layers_of
from longtrain.methods.dspark.loss import Weighing
from longtrain.methods.dspark.mask_token import choose_mask_token
from longtrain.methods.dspark.modules import DSparkDraft
from longtrain.methods.dspark.objective import DSparkObjective
from longtrain.methods.dspark.spec import SPEC
from longtrain.targets.loading import random_target
from longtrain.training.muon import is_hidden_matrix
from tests.helpers import gradient_distance
from tests.methods import drafts

gradients = partial(drafts.gradients, DSparkObjective)
LENGTHS = [19, 3, 34, 1, 2, 21]
SMALL = Config(layers=[0, 2], n_layers=2, block_size=5, markov_rank=6, intermediate_size=40, anchor_every=1)
VARIANTS = {
    "dspark": SMALL,
    "some blocks, own shape": replace(
        SMALL,
        anchor_every=3,
        n_heads=6,
        n_kv_heads=3,
        head_dim=8,
        rope={"rope_type": "default", "rope_theta": 500.0},
    ),
    "windows, markov, offsets": replace(
        SMALL, heads="markov", windows=[6, None], anchor_offset=True, offset_max_tokens=200
    ),
    "the target's keys": replace(SMALL, windows=[6, None], target_kv=True),
    "the target's keys, offsets": replace(
        SMALL, n_layers=3, windows=[None, 9, None], target_kv=True, anchor_offset=True, offset_max_tokens=200
    ),
    "dflash": replace(SMALL, heads="none", sample_from_anchor=False, n_layers=3, windows=[5, 9, None]),
    "a vocabulary of its own": replace(SMALL, draft_vocab_size=40, objective="lk_hybrid", anchor_every=2),
    "convolutions": replace(SMALL, conv_taps=3, conv_group=8, windows=[6, None]),
    "dflash2": replace(
        SMALL, heads="selector", selector_top=9, selector_weight=0.7, sample_from_anchor=False, conv_taps=2
    ),
    "selector, hybrid": replace(SMALL, heads="selector", selector_top=4, objective="lk_hybrid"),
}


def some(n):
    """Labels here and there: spans end, and whole stretches have none."""
    mask = torch.arange(n) % 9 < 6
    mask[5:17] = False
    return mask


def hybrid(q_K, p_K):
    """The loss of a slot over a vocabulary of the draft's own (`losses.draft`)."""
    known_K, accept = p_K / p_K.sum(), torch.minimum(q_K, p_K).sum()
    share = torch.exp(-3.0 * accept.detach())
    return share * (known_K * (known_K / q_K).log()).sum() + (1 - share) * (1 - accept)


def unary(draft, target, config, hidden, before, label, p_V):
    """The loss of a slot's logits without the selector, and that of its choice among the candidates."""
    logits = target.head_weight @ hidden
    q = logits.softmax(-1)
    if config.objective == "lk_hybrid":
        first = hybrid(q, p_V)
    else:
        first = -0.1 * q[label].log() + 0.9 * (q - p_V).abs().sum()
    tokens, best = logits.sort(descending=True).indices[: config.selector_top].tolist(), int(p_V.argmax())
    known = best in tokens
    tokens = tokens if known else [*tokens[:-1], best]
    scores = [selector_score(draft.candidate_selector, logits, hidden, before, token) for token in tokens]
    choice = torch.stack(scores).log_softmax(0)[tokens.index(best)]
    return first - config.selector_weight * choice, known


def plain(draft, target, config, batch):
    """Every block of every document by itself, from spec to sum."""
    total, hits, accepts, known = torch.zeros((), dtype=torch.float64), {}, {}, []
    bounds = batch.bounds
    lengths = [b - a for a, b in pairwise(bounds)]
    offsets = None
    if config.anchor_offset:
        usable = config.offset_max_tokens or target.info.max_positions
        offsets = packed_sequences.draw_offsets(lengths, usable=usable, seed=batch.seed)
    pos_T = packed_sequences.positions(bounds, offsets=offsets, anchors=config.anchors)
    chosen = anchors_of(
        batch.loss_mask_T, bounds, slots=config.block_size, every=config.anchor_every, seed=batch.seed
    )
    share = dict(zip(chosen.place_A.tolist(), chosen.share_A.tolist(), strict=True))
    weight = [torch.tensor(-k / config.block_decay).double().exp() for k in range(config.block_size)]
    for a, b in pairwise(bounds):
        ids, pos, mask = batch.ids_T[a:b], pos_T[a:b], batch.loss_mask_T[a:b]
        states, last = context_states(draft, target, ids, pos)
        kv = last_kv(target, ids, pos)
        for p in range(b - a):
            if a + p not in share:
                continue
            assert mask[p] and mask[p + 1]
            hidden = block_hidden(draft, target, config, states, pos, p, int(ids[p]), kv)
            for k in range(config.block_size):
                if p + k + 1 >= b - a or not mask[p + k + 1]:
                    break
                w = share[a + p] * weight[k] / sum(weight)
                q = slot_logits(draft, target, hidden[k : k + 1], ids[p + k : p + k + 1])[0].softmax(-1)
                p_V = (last[p + k] @ target.head_weight.T).softmax(-1)
                away = (q - p_V).abs().sum()
                if config.heads == "selector":
                    given = (hidden[k], int(ids[p + k]), int(ids[p + k + 1]), p_V)
                    loss, found = unary(draft, target, config, *given)
                    total, known = total + w * loss, [*known, found]
                    accept = torch.minimum(q, p_V).sum().detach()
                elif draft.draft_ids_K is None:
                    total = total + w * (-0.1 * q[ids[p + k + 1]].log() + 0.9 * away)
                    accept = (1 - away / 2).detach()
                else:
                    total = total + w * hybrid(q[draft.draft_ids_K], p_V[draft.draft_ids_K])
                    accept = torch.minimum(q, p_V).sum().detach()
                hits[a + p, k], accepts[a + p, k] = bool(q.argmax() == p_V.argmax()), float(accept)
                if draft.confidence_head is not None:
                    before = draft.markov_head.markov_w1(ids[p + k])
                    c = draft.confidence_head(hidden[k], before).sigmoid()
                    total = total - w * (accept * c.log() + (1 - accept) * (1 - c).log())
    return total, hits, accepts, known


@pytest.mark.parametrize("name", VARIANTS)
def test_chunked_equals_whole_and_blocks_written_out_fp64(llama, make_draft, make_batch, name):
    config = VARIANTS[name]
    draft = make_draft(llama, config)
    batch = make_batch(llama, LENGTHS, mask=some)
    whole, outputs = gradients(draft, llama, replace(config, chunk_tokens=0), batch, 0.3)
    part, got = gradients(draft, llama, replace(config, chunk_tokens=7), batch, 0.3)
    assert gradient_distance(got, outputs) <= 1e-12
    torch.testing.assert_close(part.total, whole.total, rtol=1e-12, atol=0)
    for metric, pair in part.metrics.items():
        same = pytest.approx([float(x) for x in whole.metrics[metric]])
        assert [float(x) for x in pair] == same, metric
    expected, hits, accepts, known = plain(draft, llama, config, batch)
    torch.testing.assert_close(whole.total.detach(), expected.detach(), rtol=1e-10, atol=0)
    draft.zero_grad()
    (0.3 * expected).backward()
    plainly = {key: p.grad for key, p in draft.named_parameters() if p.grad is not None}
    assert gradient_distance(outputs, plainly) <= 1e-10
    assert set(outputs) == set(dict(draft.named_parameters()))
    for k in range(config.block_size):
        alive = [p for p, slot in hits if slot == k and all(hits.get((p, m)) for m in range(k))]
        right = sum(hits[p, k] for p in alive)
        assert [int(x) for x in whole.metrics[f"acc/depth_{k}"]] == [right, len(alive)]
        shares = [share for (_, slot), share in accepts.items() if slot == k]
        given = [float(x) for x in whole.metrics[f"accept/depth_{k}"]]
        assert given == pytest.approx([sum(shares), len(shares)])
    assert whole.tokens == batch.tokens_in_step
    if known:  # some of the target's tokens are candidates and some replace the last one
        assert 0 < sum(known) < len(known)
        assert [int(x) for x in whole.metrics["candidate_recall"]] == [sum(known), len(known)]


def test_weights_of_labels_scale_their_slots(llama, make_draft, make_batch):
    """A label of weight 0 adds nothing, and the sum is linear in the weights."""
    draft, batch = make_draft(llama, SMALL), make_batch(llama, [30])
    objective = DSparkObjective(draft, llama, SMALL)
    one = torch.zeros(30)
    one[12] = 1.0
    parts = [float(objective(replace(batch, weights_T=w)).total.detach()) for w in (one, 1 - one, one + 1)]
    whole = float(objective(batch).total.detach())
    assert parts[0] > 0 and parts[0] + parts[1] == pytest.approx(whole, rel=1e-6)
    assert parts[2] == pytest.approx(whole + parts[0], rel=1e-6)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"objective": "lk_hybrid", "kl_decay": 2.0}, Weighing("lk_hybrid", 0.1, 0.9, 2.0)),
        ({"ce_weight": 0.3, "l1_weight": 0.5}, Weighing("ce_l1", 0.3, 0.5, 3.0)),
    ],
)
def test_the_slots_learn_by_the_chosen_loss(llama, make_draft, make_batch, monkeypatch, keys, expected):
    config, seen, real = replace(SMALL, **keys), [], module.slot_loss

    def spy(*args, **keys):
        seen.append(args[-1])
        return real(*args, **keys)

    monkeypatch.setattr(module, "slot_loss", spy)
    DSparkObjective(make_draft(llama, config), llama, config)(make_batch(llama, [24]))
    assert seen and set(seen) == {expected}


@pytest.mark.parametrize("taps", [0, 2])
def test_a_block_sees_nothing_at_or_after_its_anchor_but_the_anchor(llama, make_draft, taps):
    """Other tokens from p + 1 on, and other states from p on, leave a block's states as they are."""
    config, anchor = replace(SMALL, windows=[None, 7], conv_taps=taps), 12
    draft = make_draft(llama, config)
    gen = torch.Generator().manual_seed(2)
    ids = torch.randint(2, 97, (30,), generator=gen)
    objective = DSparkObjective(draft, llama, config)

    def hidden(ids_T, spoil=False):
        learn = torch.zeros(30, dtype=torch.bool)
        learn[anchor : anchor + 2] = True
        row = objective._read(Batch(ids_T, (0, 30), learn, seed=0, tokens_in_step=2))
        assert row.blocks.place_A.tolist() == [anchor]
        if spoil:
            for state in row.hidden.values():
                state[anchor:] = 1e3
        return objective._draft(row, slice(0, 1), tuple(objective._keys_values(row, row.low, row.high)))

    first, other = hidden(ids), ids.clone()
    other[anchor + 1 :] = other[anchor + 1 :].flip(0) + 1
    torch.testing.assert_close(hidden(other), first, rtol=0, atol=0)
    torch.testing.assert_close(hidden(ids, spoil=True), first, rtol=0, atol=0)
    other = ids.clone()
    other[anchor] = (other[anchor] + 5) % 97
    assert not torch.allclose(hidden(other), first)


def test_a_document_sees_only_itself(llama, make_draft, make_batch):
    objective = DSparkObjective(make_draft(llama, SMALL), llama, SMALL)
    batch = make_batch(llama, [20, 30], mask=lambda n: torch.arange(n) < 20)
    first = objective(batch).total
    other = batch.ids_T.clone()
    other[20:] = other[20:].flip(0)
    torch.testing.assert_close(objective(replace(batch, ids_T=other)).total, first, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shift", [0, 1])
def test_the_bigram_of_the_data_is_accepted_only_after_the_token_before(shift, make_batch):
    """A language in which each token determines the next; the Markov table is that rule, or one token off."""
    target = random_target("llama_micro", seed=1, dtype=torch.float64)
    size, config = target.info.vocab_size, replace(SMALL, layers=None, markov_rank=97, ce_weight=1.0)
    draft = DSparkDraft(config, target.info).double()
    choose_mask_token(draft, target, config)
    rule = torch.roll(torch.arange(size), -3)  # token i is followed by i + 3
    ids = [5]
    while len(ids) < 40:
        ids.append(int(rule[ids[-1]]))
    with torch.no_grad():
        draft.norm.weight.zero_()
        draft.markov_head.markov_w1.weight.copy_(torch.eye(size))
        table = torch.zeros(size, size)
        follows = rule[rule] if shift else rule
        table[follows, torch.arange(size)] = 60.0
        draft.markov_head.markov_w2.weight.copy_(table)
    batch = replace(make_batch(target, [40]), ids_T=torch.tensor(ids))
    loss = DSparkObjective(draft, target, replace(config, l1_weight=0.0, confidence_weight=0.0))(batch)
    mean = float(loss.total.detach()) / loss.tokens
    assert mean > 30 if shift else mean < 1e-6


def test_blocks_begin_at_two_labels_and_end_at_the_first_token_without_one():
    """Prompts, two answers with a break, a document's end, and a label alone, which begins nothing."""
    bounds = (0, 12, 20)
    mask = torch.zeros(20, dtype=torch.bool)
    mask[[3, 4, 5, 6, 9, 10, 11, 13, 15, 16]] = True
    found = anchors_of(mask, bounds, slots=4, every=1, seed=0)
    assert found.place_A.tolist() == [3, 4, 5, 9, 10, 15] and found.start_A.tolist() == [0] * 5 + [12]
    assert found.valid_AK.sum(1).tolist() == [3, 2, 1, 2, 1, 1] and found.share_A.tolist() == [1.0] * 6
    none = anchors_of(torch.zeros(20, dtype=torch.bool), bounds, slots=4, every=3, seed=0)
    assert len(none) == 0


def test_chosen_blocks_stand_for_all_and_depend_on_the_seed_alone():
    bounds, mask = (0, 50, 53, 120), torch.ones(120, dtype=torch.bool)
    mask[[0, 50, 53]] = False
    mask[70:80] = False
    every = [anchors_of(mask, bounds, slots=3, every=7, seed=seed) for seed in range(300)]
    whole = anchors_of(mask, bounds, slots=3, every=1, seed=0).place_A
    counts = torch.zeros(120)
    for found in every:
        assert float(found.share_A.sum()) == len(whole)
        assert found.place_A.tolist() == sorted(set(found.place_A.tolist()))
        assert set(found.place_A.tolist()) <= set(whole.tolist())
        counts.index_add_(0, found.place_A, found.share_A.float())
    expected = counts[whole] / 300  # in expectation each position counts once
    assert float((expected - 1).abs().max()) < 0.6 and float(expected.mean()) == pytest.approx(1.0)
    again = anchors_of(mask, bounds, slots=3, every=7, seed=5)
    assert torch.equal(again.place_A, every[5].place_A)
    assert not torch.equal(again.place_A, every[6].place_A)


def test_validation_takes_every_block(llama, make_draft, make_batch):
    config = replace(SMALL, anchor_every=4)
    objective, batch = DSparkObjective(make_draft(llama, config), llama, config), make_batch(llama, [41])
    blocks = [int(objective.train(mode)(batch).metrics["tau"][1]) for mode in (True, False)]
    assert blocks == [10, 39]


def test_a_batch_without_blocks_has_a_loss_of_zero(llama, make_draft, make_batch):
    batch = make_batch(llama, [9, 9], mask=lambda n: torch.arange(n) == 4)
    for chunk in (0, 8):
        config = replace(SMALL, chunk_tokens=chunk)
        loss = DSparkObjective(make_draft(llama, config), llama, config)(batch)
        loss.total.backward()
        assert float(loss.total.detach()) == 0 and loss.tokens == 1


def test_it_learns_and_drafts_more_than_one_token(llama, make_draft, make_batch):
    """One batch: loss falls, tau rises, the confidence comes near to what is accepted."""
    target = copy.deepcopy(llama).float()
    config = replace(SMALL, chunk_tokens=64)
    draft = DSparkDraft(config, target.info)
    objective = DSparkObjective(draft, target, config)
    choose_mask_token(draft, target, config)
    batch = make_batch(target, [40, 25])
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    seen = []
    for _ in range(40):
        loss = objective(batch)
        optimizer.zero_grad()
        (loss.total / loss.tokens).backward()
        optimizer.step()
        seen.append({name: float(a) / max(float(n), 1) for name, (a, n) in loss.metrics.items()})
    assert seen[-1]["loss"] < 0.7 * seen[0]["loss"]
    assert 1.5 < seen[-1]["tau"] <= 6 and seen[-1]["tau_sampled"] > seen[0]["tau_sampled"]
    assert seen[-1]["confidence_error"] < 0.15


def test_muon_leaves_matrices_with_a_row_for_each_token_to_adamw(llama):
    named = dict(DSparkDraft(SMALL, llama.info).named_parameters())
    apart = {name for name, p in named.items() if p.ndim == 2 and not is_hidden_matrix(name, p)}
    assert apart == {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}


def test_the_published_layers():
    assert layers_of(Config(), 36) == (1, 9, 17, 25, 33)  # Qwen3-8B
    assert layers_of(Config(), 32) == (1, 8, 15, 22, 29)  # Llama 3.1 8B
    assert layers_of(Config(), 6) == (0, 1, 2, 3, 4) and layers_of(Config(), 2) == (0,)


def test_what_cannot_be_built_is_refused(llama):
    with pytest.raises(TargetMismatchError, match=r"method.layers=\[1, 3\].* allows 0..2"):
        DSparkDraft(replace(SMALL, layers=[1, 3]), llama.info)
    for build in (SPEC.check_target, DSparkDraft):
        with pytest.raises(TargetMismatchError, match=r"method.conv_group=9 channels; .* size 48"):
            build(replace(SMALL, conv_taps=2, conv_group=9), llama.info)
    for keys, words in (
        ({"layers": [2, 1]}, "method.layers"),
        ({"block_size": 3}, "method.block_size=3"),
        ({"windows": [8]}, "method.windows"),
        ({"windows": [8, 4]}, "method.windows"),
        ({"block_size": 129}, "method.block_size=129.*4 to 128"),
        ({"block_size": 128, "sample_from_anchor": False}, "method.block_size=128.*4 to 127"),
        ({"ce_weight": 0.0, "l1_weight": 0.0}, "method.l1_weight"),
        ({"kl_decay": 1.0}, "method.kl_decay=1.0; allowed: 3.0 where method.objective=ce_l1"),
        ({"objective": "lk_hybrid", "ce_weight": 1.0}, "method.ce_weight=1.0; allowed: 0.1 where"),
        ({"heads": "selector", "draft_vocab_size": 40}, "method.draft_vocab_size=40; allowed: 0 where"),
        ({"selector_top": 8}, "method.selector_top=8; allowed: 16 where method.heads=markov_confidence"),
        ({"selector_weight": 0.5}, "method.selector_weight=0.5; allowed: 1.0 where"),
        ({"heads": "selector", "confidence_weight": 0.5}, "method.confidence_weight=0.5; allowed: 1.0 where"),
        ({"heads": "markov", "confidence_weight": 0.5}, "method.confidence_weight=0.5; allowed: 1.0 where"),
        ({"conv_group": 8}, "method.conv_group=8; allowed: 16 where method.conv_taps=0"),
        ({"conv_taps": 6}, "method.conv_taps=6; allowed: 0 to 5, the rows of a block"),
        ({"target_kv": True}, "method.windows=null; allowed: with method.target_kv=true a window"),
        ({"target_kv": True, "windows": [8, 9]}, "method.windows"),
        ({"target_kv": True, "windows": [8, None], "head_dim": 8}, "method.head_dim=8; allowed: 0 where"),
        ({"target_kv": True, "windows": [8, None], "rope": {}}, "method.rope={}; allowed: null where"),
    ):
        with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
            replace(SMALL, **keys)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"n_heads": 7}, "method.n_heads=7 is no multiple of the 2 KV heads"),
        ({"head_dim": 7}, "method.head_dim=7; RoPE allows even numbers"),
        ({"mask_token": 97}, "method.mask_token=97; target .* has tokens 0..96"),
        ({"heads": "selector", "selector_top": 98}, "method.selector_top=98 candidates .* has 97 tokens"),
    ],
)
def test_what_no_target_can_have_is_refused_before_training(keys, words, llama):
    with pytest.raises(ConfigError, match=words):
        SPEC.check_target(replace(SMALL, **keys), llama.info)


def test_all_tokens_may_be_candidates(llama):
    SPEC.check_target(replace(SMALL, heads="selector", selector_top=llama.info.vocab_size), llama.info)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "yarn"}, r"rope_parameters=.*yarn.* \(method.rope, .*\{'factor'\}; correct them"),
        ({"rope_type": "linear", "factor": "x"}, r"rope_parameters=.*'x'.*; correct them"),
        ({"rope_type": "yarn", "rope_theta": 0, "factor": 2.0}, "rope_parameters=.*; correct them"),
        ({"rope_type": "none such"}, "rotary embedding of type 'none such'"),
    ],
)
def test_a_rotary_embedding_that_cannot_be_built_is_refused(rope, words, llama):
    config = replace(SMALL, rope=rope)
    with pytest.raises(TargetMismatchError, match=words):
        DSparkObjective(DSparkDraft(config, llama.info), llama, config)


def chosen(target, **keys):
    config = replace(SMALL, **keys)
    draft = DSparkDraft(config, target.info)
    choose_mask_token(draft, target, config)
    return int(draft.mask_id)


def test_the_mask_token_is_the_tokenizers_or_an_unused_row_or_padding(llama):
    assert chosen(llama) == llama.info.eos_ids[0]  # it has no tokenizer
    target = llama
    target.tokenizer = FakeTokenizer(length=90)
    assert chosen(target) == 90
    with torch.no_grad():
        target.embed_weight[90:92] = 0
    assert chosen(target) == 92  # the first that is not zero
    target.tokenizer = FakeTokenizer(length=97, special={50: "<|reserved_special_token_0|>", 40: "<pad>"})
    assert chosen(target) == 50
    target.tokenizer = FakeTokenizer(length=97, pad=40)
    assert chosen(target) == 40
    target.tokenizer = FakeTokenizer(length=97, mask=33)
    assert chosen(target) == 33
    assert chosen(target, mask_token=7) == 7
    draft = DSparkDraft(SMALL, target.info)
    choose_mask_token(draft, target, replace(SMALL, mask_token=7))
    choose_mask_token(draft, target, SMALL)
    assert int(draft.mask_id) == 7
    with pytest.raises(ConfigError, match=r"method\.mask_token=8, and the draft was trained with 7"):
        choose_mask_token(draft, target, replace(SMALL, mask_token=8))
    with pytest.raises(ConfigError, match=r"method.mask_token=90: its embedding in .* is zero"):
        chosen(target, mask_token=90)
    with pytest.raises(ConfigError, match=r"method.mask_token=97; target .* has tokens 0..96"):
        chosen(target, mask_token=97)


class FakeTokenizer:
    """What the rule reads of a tokenizer."""

    class Token(str):
        special = True

    def __init__(self, length, *, mask=None, pad=None, special=()):
        self.length, self.mask_token_id, self.pad_token_id = length, mask, pad
        self.added_tokens_decoder = {i: self.Token(name) for i, name in dict(special).items()}

    def __len__(self):
        return self.length
