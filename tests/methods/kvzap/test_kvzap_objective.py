"""Labels are the policy's scores, and a packed row's loss and gradients are those of its documents alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from longtrain.decoding.evict import Budget
from longtrain.errors import ConfigError
from longtrain.methods.kvzap.config import Config
from longtrain.methods.kvzap.labels import groups, labelled, usual
from longtrain.methods.kvzap.objective import KVzapObjective
from longtrain.methods.kvzap.spec import SPEC
from longtrain.methods.policies.kvzip import KVzip
from longtrain.methods.samples import Sample
from tests.methods.policies.runs import prefilled


@pytest.mark.corners
@pytest.mark.parametrize("target", ["llama", "gemma3"], indirect=True)
@pytest.mark.parametrize("labels", ["kvzip", "kvzip_plus"])
def test_labels_are_the_policys_scores(target, module, labels):
    config = Config(hidden_dim=8, chunk=16, sinks=2, labels=labels)
    user = target.tokenizer.encode("<|user|>", add_special_tokens=False)
    gen = torch.Generator().manual_seed(1)
    texts = [user * b + torch.randint(10, 4000, (n,), generator=gen).tolist() for b, n in ((0, 40), (1, 21))]
    plus = labels == "kvzip_plus"
    policy = KVzip(Budget(9), chunk=16, sinks=2, value_norm=plus, row_norm=plus)
    scores_LBGS = policy.scores(prefilled(target, texts, policy))
    _, found = labelled(module, target, config, [torch.tensor(text) for text in texts], train=False)
    for b, text in enumerate(texts):
        counts_LGS = found.counts_LBGS[:, b]
        assert counts_LGS[..., 2 : len(text)].all()
        assert not counts_LGS[..., :2].any() and not counts_LGS[..., len(text) :].any()
        true_LGS = found.true_LBGS[:, b, :, 2 : len(text)]
        torch.testing.assert_close(true_LGS.exp(), scores_LBGS[:, b, :, 2 : len(text)], rtol=1e-12, atol=0)


@pytest.mark.parametrize("target", ["llama", "gemma3"], indirect=True)
def test_a_rows_loss_and_gradients_are_those_of_each_document_alone(target, module, config, make_batch):
    objective = KVzapObjective(module, target, config)
    pairs = [(40, 3), (12, 2), (9, 0), (23, 4)]
    batch = make_batch(pairs)

    def gradients(batch):
        module.zero_grad()
        loss = objective(batch)
        loss.total.backward()
        return loss, [p.grad.clone() for p in module.parameters()]

    whole, grads = gradients(batch)
    total, sums = torch.zeros((), dtype=torch.float64), [torch.zeros_like(grad) for grad in grads]
    for (start, stop), (context, response) in zip(pairwise(batch.bounds), pairs, strict=True):
        if not response:
            continue
        one = make_batch([(context, response)])
        one.ids_T.copy_(batch.ids_T[start:stop])
        loss, own = gradients(one)
        pred_LBGS, labels = labelled(module, target, config, [one.ids_T[:context]], train=False)
        expected = (pred_LBGS - labels.true_LBGS)[..., 2:].square().mean()
        torch.testing.assert_close(loss.total.detach(), expected)
        total, sums = total + loss.total.detach(), [a + b for a, b in zip(sums, own, strict=True)]
    torch.testing.assert_close(whole.total.detach(), total)
    for grad, expected in zip(grads, sums, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)
    assert whole.tokens == 9 and float(whole.metrics["loss"][1]) == 3


def test_groups_hold_contexts_of_about_one_length():
    found = [Sample(0, n, n + 1) for n in (10, 90, 30, 100, 28)]
    assert [[one.length for one in group] for group in groups(found, 100)] == [[100], [90], [30, 28, 10]]


def test_figures_of_a_perfect_module(target, module, config, make_batch, monkeypatch):
    from longtrain.methods.kvzap import objective as place

    def told(*args, **kwargs):
        _, labels = labelled(*args, **kwargs)
        return labels.true_LBGS.clone(), labels

    monkeypatch.setattr(place, "labelled", told)
    monkeypatch.setattr(place, "RECALLS", (8, 64))
    loss = KVzapObjective(module, target, config).eval()(make_batch([(40, 3), (30, 2)]))
    means = {name: float(total / count) for name, (total, count) in loss.metrics.items()}
    assert means == {"r2": 1.0, "recall@8": 1.0, "loss": 0.0}


@pytest.mark.parametrize("target", ["llama", "gemma3"], indirect=True)
def test_a_fresh_module_begins_at_usual_scores_and_a_loaded_one_is_left_alone(target, module, config):
    state = {name: value.clone() for name, value in module.state_dict().items()}
    SPEC.objective(module, target, config)
    torch.testing.assert_close(module.layers[1][2].bias, usual(target, config)[-1])
    module.load_state_dict(state)
    SPEC.objective(module, target, config)
    assert torch.equal(module.layers[1][2].bias, state["layers.1.2.bias"])


def test_without_a_tokenizer_nobody_can_ask_for_the_repetition(target, module, config):
    target.tokenizer = None
    with pytest.raises(ConfigError, match="has no tokenizer"):
        SPEC.objective(module, target, config)
