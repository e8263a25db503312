"""DFlash2's two options: they begin as DFlash, stay inside a block, and learn what slots alone cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plain_block import between

from longtrain.data.packing.batch import Batch
from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import ChildChoice, TreeShape
from longtrain.decoding.sampling import HashRng, Sampling
from longtrain.errors import ConfigError
from longtrain.kernels.draft_loss import teacher_of
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.conv import BlockConv, around
from longtrain.methods.dspark.heads import CandidateSelector
from longtrain.methods.dspark.loss import _choose
from longtrain.methods.dspark.mask_token import choose_mask_token
from longtrain.methods.dspark.modules import DSparkDraft
from longtrain.methods.dspark.objective import DSparkObjective
from longtrain.methods.dspark.runtime import DSparkRuntime
from longtrain.methods.dspark.spec import SPEC
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.training.muon import is_hidden_matrix
from tests.methods.drafts import prefilled, texts_of

SMALL = Config(
    layers=[0, 2], n_layers=2, block_size=5, markov_rank=6, intermediate_size=40, anchor_every=1, mask_token=1
)
DFLASH = replace(SMALL, heads="none", sample_from_anchor=False)
CHAIN = TreeShape((1,) * 5)


def begun(draft, target, config):
    """A new draft with these options and the weights of one without."""
    new = DSparkDraft(config, target.info).to(draft.fc.weight.dtype)
    state = new.state_dict()
    assert not {*draft.state_dict()} - {*state}
    new.load_state_dict({**state, **draft.state_dict()})
    return new


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kept", ["conv", "selector"])
@torch.no_grad()
def test_a_new_option_changes_no_bit_of_what_is_drafted(llama, make_draft, kept, dtype):
    """Convolutions are the identity; the selector's choice is the LM head's among its candidates."""
    target = llama if dtype == torch.float64 else llama_in(dtype)
    plain_config = replace(SMALL, heads="markov") if kept == "conv" else DFLASH
    own = {"conv_taps": 2} if kept == "conv" else {"heads": "selector", "selector_top": 7}
    config, plain_draft = replace(plain_config, **own), make_draft(target, plain_config, dtype)
    trees = []
    for settings, draft in ((plain_config, plain_draft), (config, begun(plain_draft, target, config))):
        runtime = DSparkRuntime(draft.requires_grad_(False), target, settings)
        ids, n_B, cache, step = prefilled(target, texts_of(29, 5), runtime.outputs)
        runtime.start(ids, n_B, step, cache)
        rng, roots = HashRng(1, torch.arange(2)), torch.tensor([5, 6])
        shape = replace(CHAIN, children=ChildChoice.IID)
        drawn = runtime.propose(roots, shape, Sampling(temperature=1.0), rng)
        trees.append(
            (runtime.propose(roots, CHAIN, Sampling(), rng), drawn, runtime._block(roots, cache.len_B))
        )
    (point, drawn, hidden), (point2, drawn2, hidden2) = trees
    assert torch.equal(hidden, hidden2) and hidden.abs().sum() > 0
    assert torch.equal(point.tokens_BN, point2.tokens_BN)
    q_BNV, q2_BNV = drawn.q_BNV[:, 0], drawn2.q_BNV[:, 0]
    if kept == "conv":
        assert torch.equal(drawn.tokens_BN, drawn2.tokens_BN) and torch.equal(q_BNV, q2_BNV)
    else:  # the same law, of the candidates alone
        at = q_BNV.topk(7).indices
        assert (q2_BNV > 0).sum(-1).tolist() == [7, 7]
        some = q_BNV.gather(-1, at)
        torch.testing.assert_close(q2_BNV.gather(-1, at), some / some.sum(-1, keepdim=True))


def llama_in(dtype):
    return random_target({**SHAPES["llama_micro"], "num_hidden_layers": 4}, seed=1, dtype=dtype, device="cpu")


def test_a_new_draft_trains_like_one_without_options_at_first(llama, make_draft, make_batch):
    """The same loss to the last bit, but for the selector's own part."""
    plain_draft, batch = make_draft(llama, DFLASH), make_batch(llama, [30, 12])
    loss = DSparkObjective(plain_draft, llama, DFLASH)(batch).total.detach()
    for own in ({"conv_taps": 2}, {"heads": "selector", "selector_weight": 0.0}):
        config = replace(DFLASH, **own)
        found = DSparkObjective(begun(plain_draft, llama, config), llama, config)(batch)
        assert torch.equal(found.total.detach(), loss)


def test_every_tensor_of_a_new_draft_is_trained(llama, make_batch):
    """After a step the tables that began at 0 let the gradient through to what multiplies them."""
    config = replace(DFLASH, heads="selector", conv_taps=2)
    draft = DSparkDraft(config, llama.info).double()
    objective = DSparkObjective(draft, llama, config)
    choose_mask_token(draft, llama, config)
    optimizer, batch = torch.optim.SGD(draft.parameters(), lr=1e-3), make_batch(llama, [40])
    for _ in range(2):
        optimizer.zero_grad()
        objective(batch).total.backward()
        optimizer.step()
    assert not [name for name, p in draft.named_parameters() if p.grad is None or not p.grad.any()]


def test_a_convolution_is_what_is_written_out_and_stays_in_its_block():
    conv = BlockConv(48, 3, 8).double()
    torch.nn.init.normal_(conv.base_kernel)
    torch.nn.init.normal_(conv.kernel_projection.weight, std=0.3)
    x_ARE = torch.randn(3, 5, 48, dtype=torch.float64)
    turn = torch.nn.Linear(48, 48, dtype=torch.float64)
    out_ARE = around(conv, x_ARE, turn)
    for block in range(3):
        torch.testing.assert_close(out_ARE[block], between(conv, x_ARE[block], turn), rtol=1e-12, atol=1e-12)
    other_ARE = x_ARE.clone()
    other_ARE[1, 2] += 1.0
    changed_AR = (around(conv, other_ARE, turn) != out_ARE).any(-1)
    assert changed_AR.nonzero().tolist() == [[1, 2], [1, 3], [1, 4]]


def test_blocks_of_one_batch_do_not_see_each_other(llama, make_draft):
    """The block before in memory, whose anchor is another token, changes nothing."""
    config = replace(SMALL, conv_taps=2)
    objective = DSparkObjective(make_draft(llama, config), llama, config)
    ids_T = torch.arange(2, 32)
    mask_T = torch.ones(30, dtype=torch.bool)
    mask_T[0] = False
    row = objective._read(Batch(ids_T, (0, 30), mask_T, seed=0, tokens_in_step=29))
    shared = tuple(objective._keys_values(row, row.low, row.high))
    first = objective._draft(row, slice(8, 11), shared)
    row.batch.ids_T[row.blocks.place_A[9]] += 5
    other = objective._draft(row, slice(8, 11), shared)
    assert [torch.equal(other[i], first[i]) for i in range(3)] == [True, False, True]
    alone = objective._draft(row, slice(10, 11), shared)
    torch.testing.assert_close(alone[0], first[2], rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_the_law_that_is_recorded_differs_beyond_the_candidates_alone():
    """Golden outputs are of it, since rounding exchanges last candidates; it changes with their number."""
    torch.manual_seed(0)
    head = CandidateSelector(60, 48, 6, 9).double()
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    base_KV, hidden_KE = torch.randn(4, 60).double(), torch.randn(4, 48).double()
    logits_KV, smooth_KV = (run(base_KV, hidden_KE, torch.arange(4)) for run in (head, head.smooth))
    inside_KV = logits_KV.isfinite()
    assert inside_KV.sum(1).tolist() == [9] * 4
    torch.testing.assert_close(smooth_KV[inside_KV], logits_KV[inside_KV])
    added_KV = base_KV + head.added(hidden_KE, torch.arange(4))
    assert (smooth_KV < added_KV)[~inside_KV].all()
    last_KV = base_KV.where(inside_KV, torch.inf).min(1, keepdim=True).values
    torch.testing.assert_close((added_KV - smooth_KV)[~inside_KV], (last_KV - base_KV)[~inside_KV])


def bigram_target():
    """A target whose next token depends on the token before alone; its likeliest ones are 10 of 40."""
    shape = {**SHAPES["llama_micro"], "num_hidden_layers": 4, "vocab_size": 40}
    target = random_target(shape, seed=4)
    with torch.no_grad():
        for layer in target.model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.head_weight[10:] = 0
        target.head_weight[:10] *= 12 / target.head_weight[:10].norm(dim=1, keepdim=True).mean()
    return target


@pytest.mark.slow
def test_the_selector_learns_a_bigram_language_and_slots_alone_do_not():
    target, found = bigram_target(), {}
    for heads in ("none", "selector"):
        top = {"selector_top": 12, "markov_rank": 32} if heads == "selector" else {}
        config = replace(SMALL, layers=[0, 1], n_layers=1, heads=heads, objective="lk_hybrid", **top)
        torch.manual_seed(0)
        draft = DSparkDraft(config, target.info)
        objective = DSparkObjective(draft, target, config)
        choose_mask_token(draft, target, config)
        optimizer = torch.optim.AdamW(draft.parameters(), lr=2e-2)
        gen = torch.Generator().manual_seed(3)

        def batch(gen=gen):
            ids_T = torch.randint(40, (120,), generator=gen)
            mask_T = torch.arange(120) > 0
            return Batch(ids_T, (0, 120), mask_T, seed=0, tokens_in_step=119)

        for _ in range(150):
            loss = objective(batch())
            optimizer.zero_grad()
            (loss.total / loss.tokens).backward()
            optimizer.step()
        metrics = objective.eval()(batch()).metrics
        found[heads] = {name: float(a) / max(float(n), 1) for name, (a, n) in metrics.items()}
        engine = Engine(target, SPEC.attach(draft.requires_grad_(False), target, config, {}))
        how = {"max_new_tokens": 40, "ignore_eos": True}
        prompts = [[token % 40 for token in text] for text in texts_of(9, 20, 30, 12)]
        out = engine.generate(prompts, shape=CHAIN, **how)
        assert out.tokens == Engine(target).generate(prompts, **how).tokens
        found[heads]["decoded"] = out.stats.tau
    none, selector = found["none"], found["selector"]
    assert selector["candidate_recall"] > 0.99 and "candidate_recall" not in none
    assert selector["acc/depth_1"] > 0.9 and none["acc/depth_1"] < 0.3, found
    assert selector["accept/depth_3"] > 0.8 and none["accept/depth_3"] < 0.3, found
    assert selector["decoded"] > 5.5 and none["decoded"] < 4, found


def test_muon_leaves_the_selectors_tables_to_adamw(llama):
    config = replace(DFLASH, heads="selector", conv_taps=2)
    named = dict(DSparkDraft(config, llama.info).named_parameters())
    apart = {name for name, p in named.items() if p.ndim == 2 and not is_hidden_matrix(name, p)}
    assert apart == {f"candidate_selector.{word}_codebook" for word in ("predecessor", "successor")}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_choice_is_measured_as_it_is_served(dtype):
    """Against each slot by itself: the target's token is often the selector's, and not the LM head's."""
    gen = torch.Generator().manual_seed(4)
    R, K, F, top = 200, 12, 3, 4
    base_RK, context_RF, codes_KF = (
        torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype) for shape in ((R, K), (R, F), (K, F))
    )
    score_RK = (base_RK + context_RF @ codes_KF.T).double()
    law_RK = 2 * score_RK + torch.randn((R, K), generator=gen, dtype=torch.float64)
    weight_R = torch.rand(R, generator=gen, dtype=torch.float64)
    found = _choose(base_RK, context_RF, codes_KF, teacher_of(law_RK, None), weight_R, top)
    close = 1e-9 if dtype == torch.float64 else 0.05
    overruled = 0
    for row in range(R):
        tokens = base_RK[row].double().sort(descending=True, stable=True).indices[:top]
        q, p, best = score_RK[row, tokens].softmax(-1), law_RK[row].softmax(-1), int(law_RK[row].argmax())
        assert bool(found.known_R[row]) == (best in tokens)
        assert float(found.accept_R[row]) == pytest.approx(
            float(torch.minimum(q, p[tokens]).sum()), abs=close
        )
        chosen = int(tokens[q.argmax()])
        if dtype == torch.float64:
            assert bool(found.hit_R[row]) == (chosen == best)
        overruled += chosen == best != int(tokens[0])
        among = tokens if best in tokens else torch.cat((tokens[:-1], torch.tensor([best])))
        own = -score_RK[row, among].log_softmax(-1)[among.tolist().index(best)] * weight_R[row]
        assert float(found.value_R[row]) == pytest.approx(float(own), abs=close)
    assert overruled > 20 and 20 < int(found.known_R.sum()) < R - 20


def test_the_start_of_a_selector_corrects_nothing_and_can_learn():
    selector = CandidateSelector(50, 8, 6, 4)
    selector.start()
    assert not selector.successor_codebook.any() and selector.predecessor_codebook.std() > 0.5


def test_a_tree_wider_than_the_candidates_is_refused(llama):
    config = replace(SMALL, heads="selector", selector_top=2)
    draft = DSparkRuntime(DSparkDraft(config, llama.info), llama, config)
    draft.check_shape(TreeShape((2, 4)))
    with pytest.raises(ConfigError, match=r"method.selector_top=2; allowed: at most 2 times"):
        draft.check_shape(TreeShape((3, 3)))
