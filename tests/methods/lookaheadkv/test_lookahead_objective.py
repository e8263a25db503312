"""The loss and its gradient against the equations written out, and what becomes of odd rows."""

from __future__ import annotations

from dataclasses import replace

import lookahead_equations as equations
import pytest
import torch

from longtrain.errors import DataError
from longtrain.methods.lookaheadkv import objective
from longtrain.methods.lookaheadkv.config import Config
from longtrain.methods.lookaheadkv.modules import LookaheadKV
from longtrain.methods.lookaheadkv.objective import LookaheadObjective
from longtrain.methods.samples import samples

PAIRS = [(37, 4), (9, 0), (20, 11), (1, 2), (45, 1)]


def gradients(loss, module):
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def check_gradient(target, module, config, batch):
    loss = LookaheadObjective(module, target, config)(batch)
    got = gradients(loss.total, module)
    found = samples(batch)
    wanted = sum(
        equations.document_loss(target, batch.ids_T[s.start : s.stop], s.length, module, config)
        for s in found
    )
    outputs = gradients(wanted, module)
    assert float(loss.total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-10)
    assert set(outputs) == set(dict(module.named_parameters())) and set(got) == set(outputs)
    for name, grad in outputs.items():
        assert grad.norm() > 0, name
        assert (got[name] - grad).norm() / grad.norm() < 1e-8, name
    return loss


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "windows of 3"])
def test_gradient_is_that_of_naive_concatenation(three_layers, make_module, make_batch, family):
    config = Config(n_lookahead=5, lora_rank=3, lora_alpha=6.0)
    target = equations.exact(three_layers(family))
    loss = check_gradient(target, make_module(target, config), config, make_batch(target, PAIRS))
    assert loss.tokens == 18
    assert float(loss.metrics["loss"][0] / loss.metrics["loss"][1]) == pytest.approx(
        float(loss.total.detach()) / 4
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_targets": "qv"},
        {"lora_targets": "none"},
        {"lora_targets": ["o", "gate"]},
        {"budgets": [4, 8, 30], "budget_weight": 0.7},
        {"suffix_window": 8},
    ],
    ids=str,
)
def test_gradient_under_options(three_layers, make_module, make_batch, changes):
    config = Config(n_lookahead=5, lora_rank=3, **changes)
    for family in ("qwen3", "gemma3"):
        target = equations.exact(three_layers(family))
        check_gradient(target, make_module(target, config), config, make_batch(target, PAIRS))


def test_kl_is_zero_when_the_rows_are_the_response(three_layers, make_batch):
    """No LoRA and the response's own embeddings: the lookahead rows compute what the response does."""
    target = three_layers("qwen3", torch.float32)
    batch = make_batch(target, [(40, 6)])
    config = Config(n_lookahead=6)
    module = LookaheadKV(config, target.info)
    with torch.no_grad():
        module.lookahead_embeddings.copy_(target.embed(batch.ids_T[40:]))
        loss = LookaheadObjective(module, target, config)(batch)
        assert abs(float(loss.total)) < 1e-6
        module.lookahead_embeddings[0] += 1.0
        assert float(LookaheadObjective(module, target, config)(batch).total) > 1e-3


def test_a_row_without_labels_is_nothing(three_layers, make_module, make_batch):
    target, config = three_layers(), Config(n_lookahead=5, lora_rank=3)
    module = make_module(target, config)
    loss = LookaheadObjective(module, target, config)(make_batch(target, [(9, 0), (4, 0)]))
    assert loss.tokens == 0 and float(loss.total.detach()) == 0
    assert all(not grad.any() for grad in gradients(loss.total, module).values())
    assert float(loss.metrics["loss"][1]) == 0


def test_a_response_without_a_prompt_is_told(three_layers, make_module, make_batch):
    target, config = three_layers(), Config(n_lookahead=5, lora_rank=3)
    with pytest.raises(DataError, match="document doc1 is all response"):
        LookaheadObjective(make_module(target, config), target, config)(make_batch(target, [(5, 2), (0, 4)]))


def test_the_response_is_the_last_run_of_labels_and_what_follows_changes_nothing(
    three_layers, make_module, make_batch
):
    target, config = three_layers(), Config(n_lookahead=5, lora_rank=3)
    learner = LookaheadObjective(make_module(target, config), target, config)
    batch = make_batch(target, [(20, 5)])
    mask = batch.loss_mask_T.clone()
    mask[4:9] = True  # an earlier answer of the same chat
    chat = replace(batch, loss_mask_T=mask)
    assert [(s.start, s.prompt, s.stop) for s in samples(chat)] == [(0, 20, 25)]
    assert torch.equal(learner(chat).total, learner(batch).total)
    cut = replace(batch, loss_mask_T=batch.loss_mask_T & (torch.arange(25) < 22))
    short = replace(cut, ids_T=cut.ids_T[:22], bounds=(0, 22), loss_mask_T=cut.loss_mask_T[:22])
    torch.testing.assert_close(learner(cut).total, learner(short).total, rtol=1e-12, atol=0)


def test_the_mask_is_read_on_the_host(three_layers, make_batch):
    """A mask on the device is never looked at where its copy on the host is there."""
    batch = make_batch(three_layers(), [(7, 2)])
    moved = replace(batch, loss_mask_T=batch.loss_mask_T.to("meta"), host_mask_T=batch.loss_mask_T)
    assert samples(moved) == samples(batch)


def test_documents_of_one_row_are_those_of_rows_of_their_own(three_layers, make_module, make_batch):
    target, config = three_layers("qwen3"), Config(n_lookahead=5, lora_rank=3, budgets=[6], suffix_window=8)
    learner = LookaheadObjective(make_module(target, config), target, config)
    batch = make_batch(target, PAIRS)
    total = 0.0
    for sample in samples(batch):
        part = slice(sample.start, sample.stop)
        mask = batch.loss_mask_T[part]
        total += learner(
            replace(batch, ids_T=batch.ids_T[part], bounds=(0, len(mask)), loss_mask_T=mask)
        ).total
    torch.testing.assert_close(learner(batch).total, total, rtol=1e-12, atol=0)


def test_half_precision_targets_train_in_fp32(three_layers, make_module, make_batch):
    target, config = three_layers("qwen3", torch.bfloat16), Config(n_lookahead=5, lora_rank=3)
    module = make_module(target, config, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = LookaheadObjective(module, target, config)(make_batch(target, PAIRS))
    assert loss.total.dtype == torch.float32
    grads = gradients(loss.total, module)
    assert all(g.dtype == torch.float32 and g.norm() > 0 for g in grads.values())
    wide = three_layers("qwen3", torch.float32)
    wide.load_state_dict(target.state_dict())
    exact = LookaheadObjective(module, wide, config)(make_batch(target, PAIRS))
    assert float(loss.total.detach()) == pytest.approx(float(exact.total.detach()), rel=0.05)


def test_held_out_figures_are_recall_and_tau_beside_snapkv(three_layers, make_module, make_batch):
    target, config = three_layers("qwen3"), Config(n_lookahead=5, lora_rank=3)
    learner = LookaheadObjective(make_module(target, config), target, config).eval()
    with torch.no_grad():
        metrics = learner(make_batch(target, [(110, 6), (200, 4), (20, 3)])).metrics
    rankings = 3 * target.info.n_kv_heads  # layers x heads of each prompt that is long enough
    names = {"recall@64": 2, "recall@128": 1, "kendall_tau": 2}
    assert set(metrics) == {"loss"} | {f"{side}{name}" for side in ("", "snapkv/") for name in names}
    for side in ("", "snapkv/"):
        for name, prompts in names.items():
            total, count = metrics[side + name]
            assert int(count) == prompts * rankings and -1 < float(total / count) < 1
    assert float(metrics["recall@64"][0] / metrics["recall@64"][1]) > 0.3
    assert set(learner.train()(make_batch(target, [(110, 6)])).metrics) == {"loss"}


def test_held_out_figures_against_the_equations(three_layers, make_module, make_batch):
    target, config = equations.exact(three_layers()), Config(n_lookahead=5, lora_rank=3)
    module = make_module(target, config)
    batch = make_batch(target, [(150, 6)])
    with torch.no_grad():
        metrics = LookaheadObjective(module, target, config).eval()(batch).metrics
        true = equations.truth(target, batch.ids_T, 150)
        pred = equations.predicted(target, batch.ids_T, 150, module, config)
        snap = [
            p[:, 118:150, :150].mean(1)
            for p in equations.attention_of(target, target.embed(batch.ids_T[:150]), torch.zeros(150))
        ]
    for side, found in (("", pred), ("snapkv/", snap)):
        shares = []
        for p, t in zip(found, true, strict=True):
            p, t = (x.view(2, 2, 150).mean(1)[:, :118] for x in (p, t))
            for head in range(2):
                best = [set(x[head].topk(64).indices.tolist()) for x in (p, t)]
                shares.append(len(best[0] & best[1]) / 64)
        total, count = metrics[f"{side}recall@64"]
        assert float(total / count) == pytest.approx(sum(shares) / len(shares), rel=1e-6)


def test_layers_compared_together_or_one_by_one_are_the_same(
    three_layers, make_module, make_batch, monkeypatch
):
    target, config = three_layers(), Config(n_lookahead=5, lora_rank=3, budgets=[6])
    module = make_module(target, config)
    batch = make_batch(target, PAIRS)
    together = LookaheadObjective(module, target, config)(batch).total
    outputs = gradients(together, module)
    size = 4 * len(batch.ids_T)
    for most in (1, 2 * size, 3 * size):
        monkeypatch.setattr(objective, "_TOGETHER", most)
        loss = LookaheadObjective(module, target, config)(batch).total
        torch.testing.assert_close(loss, together, rtol=1e-12, atol=0)
        for name, grad in gradients(loss, module).items():
            assert (grad - outputs[name]).norm() <= 1e-10 * outputs[name].norm(), name
