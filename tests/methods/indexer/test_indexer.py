"""The indexer: what it learns against sums written out, and its scores and texts while decoding."""

from __future__ import annotations

import pytest
import torch

from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.roles import Parts, TreeShape, Verdict
from longtrain.decoding.tree import chain
from longtrain.errors import TargetMismatchError
from longtrain.methods import set_objective
from longtrain.methods.indexer.config import Config
from longtrain.methods.indexer.modules import Indexer
from longtrain.methods.indexer.objective import IndexerObjective
from longtrain.methods.indexer.spec import SPEC
from longtrain.methods.set_objective import draw, far
from longtrain.targets.loading import random_target
from longtrain.targets.step import OutputRequest, TokenBatch
from tests.decoding.micro import prompts_of
from tests.decoding.toys import OracleDraft

SMALL = {"dims": 6, "queries": 6, "sinks": 2, "window": 4, "recall_entries": 12}
KEYS = {"budget_tokens": 14, "sinks": 2, "window": 4}


@pytest.fixture(scope="module")
def target():
    return random_target("llama_micro", seed=1, dtype=torch.float64)


def indexer_of(target, config):
    torch.manual_seed(5)
    module = Indexer(config, target.info).to(target.dtype)
    module.q_proj.data += 0.1 * torch.randn_like(module.q_proj)
    return module


def seen_by(target, ids):
    """Every layer's queries and keys of one text, [H, S, D] and [G, S, D]."""
    n, seen = len(ids), {}
    target.packed(
        ids, torch.arange(n), (0, n), OutputRequest("none"),
        hook=lambda layer, q, k, v: seen.update({layer: (q[0], k[0])}),
    )  # fmt: skip
    return [seen[layer] for layer in sorted(seen)]


def log_weights(module, layer, g, q_HD, k_SD):
    """Scores of rows by one KV head's index: the highest log-weight of its query heads."""
    per = q_HD.shape[0] // module.heads[1]
    key = k_SD @ module.k_proj[layer, g]
    heads = range(g * per, (g + 1) * per)
    scale = key.shape[-1] ** -0.5
    found = [(key @ (q_HD[h] @ module.q_proj[layer, h]) * scale).log_softmax(0) for h in heads]
    return torch.stack(found).amax(0)


def by_hand(module, target, config, batch):
    """The loss of a batch row by row, with gradients by autograd alone."""
    total, (heads, groups) = 0.0, module.heads
    per = heads // groups
    for one in draw(config, batch):
        ids = batch.ids_T[one.start : one.stop]
        seen = seen_by(target, ids)
        for t in one.at_R.tolist():
            inside = far(config, torch.tensor([t]), len(ids))[0][:t]
            for layer, (q, k) in enumerate(seen):
                for g in range(groups):
                    weights = (q[g * per : (g + 1) * per, t] @ k[g, : t + 1].T * q.shape[-1] ** -0.5).softmax(
                        -1
                    )
                    pooled = (weights.mean(0) if config.pool == "mean" else weights.amax(0))[:t][inside]
                    teacher = pooled if config.by_mass else pooled / pooled.sum()
                    children = log_weights(module, layer, g, q[:, t], k[g, :t])[inside].log_softmax(0)
                    loss = (teacher * ((teacher / teacher.sum()).log() - children)).sum()
                    if config.recall_weight:
                        rows = config.recall_entries - config.sinks - config.window
                        edge = children.detach().topk(rows).values[-1] if len(children) >= rows else -1e4
                        loss = (
                            loss
                            + config.recall_weight * (teacher * (1 - torch.sigmoid(children - edge))).sum()
                        )
                    total = total + loss * one.labels / len(one.at_R)
    return total / module.n_sets


@pytest.mark.parametrize(
    "more", [{"by_mass": False}, {"pool": "mean", "recall_weight": 0.5}], ids=["max", "mean, soft recall"]
)
def test_loss_and_gradient_are_those_of_the_sum_written_out(more, target, make_batch, monkeypatch):
    """Three documents, one too short to be learned of, in many blocks of queries and keys."""
    monkeypatch.setattr(set_objective, "BLOCK_BYTES", 4 * 4 * 64 * 2)
    monkeypatch.setattr(set_objective, "KEY_ROWS", 17)
    config, batch = Config(**SMALL, **more), make_batch(target, (40, 9, 61))
    module = indexer_of(target, config)
    loss = IndexerObjective(module, target, config)(batch)
    outputs = by_hand(module, target, config, batch)
    torch.testing.assert_close(loss.total, outputs, rtol=1e-9, atol=1e-9)
    loss.total.backward()
    got = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    outputs.backward()
    for one, p in zip(got, module.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad, rtol=1e-7, atol=1e-9)
    held, oracle = (float(loss.metrics[key][0] / loss.metrics[key][1]) for key in ("recall", "recall_oracle"))
    assert 0 < held < oracle <= 1


@torch.no_grad()
def test_scores_while_decoding_are_those_of_the_text_from_scratch(target):
    """Prompts of other lengths, chains accepted in part, a row that is over. The cache reads everything.

    Where no choice is due no key is read.
    """
    config = Config(**SMALL)
    module = indexer_of(target, config)
    selector = SPEC.attach(module, target, config, {**KEYS, "budget_tokens": 200, "every": 4}).selector
    asked, found = selector.at_layer, {}
    selector.at_layer = lambda layer, *rest: found.setdefault(layer, asked(layer, *rest))
    texts, roots = prompts_of(29, 1, 7), torch.tensor([5, 6, 7])
    n_B = torch.tensor([len(text) for text in texts])
    ids = torch.tensor([[*text, *[0] * (29 - len(text))] for text in texts])
    cache = Engine(target, Parts(selector=selector)).new_cache(3, 80, 4)
    step = target.forward(
        TokenBatch(torch.arange(29).expand(3, -1), ids, n_B=n_B), cache, outputs=OutputRequest("none")
    )
    cache.commit(None, n_B)
    selector.start(ids, n_B, step, cache)
    dues = []
    for taken in ([3, 1, 2], [1, 0, 3], [2, 2, 2]):
        found.clear()
        cache.choose(None)
        tokens = torch.stack([roots, roots + 11, roots + 23], 1)
        pos = cache.len_B[:, None] + torch.arange(3)
        step = target.forward(TokenBatch(pos, tokens), cache, outputs=OutputRequest("none"))
        for b, text in enumerate(texts):
            seen = seen_by(target, torch.tensor([*text, int(roots[b])]))
            for layer, (q, k) in enumerate(seen):
                for g in range(module.heads[1]):
                    outputs = log_weights(module, layer, g, q[:, -1], k[g, :-1])
                    due = bool(cache.entry_sets.due_B[b])
                    dues.append(due)
                    outputs = outputs if due else torch.full_like(outputs, -torch.inf)
                    torch.testing.assert_close(found[layer][b, g, : len(text)], outputs)
        n_B = torch.tensor(taken)
        cache.commit(None, n_B)
        selector.observe(chain(tokens), Verdict(torch.arange(3).expand(3, 3), n_B, roots), step)
        for b, count in enumerate(taken):
            texts[b] += tokens[b, :count].tolist()
        roots = (roots * 7 + 1) % 97
    assert {*dues} == {True, False}


def test_speculation_repeats_the_sparse_text():
    """fp32: trees, chains, alone; and a budget that texts fit changes nothing."""
    target = random_target("llama_micro", seed=1)
    config, prompts = Config(**SMALL), prompts_of(70, 9, 40)
    options = {"max_new_tokens": 20, "ignore_eos": True}

    def parts(**more):
        return SPEC.attach(indexer_of(target, config), target, config, {**KEYS, "every": 4, **more})

    plain = Engine(target, parts()).generate(prompts, **options).tokens
    dense = Engine(target).generate(prompts, **options).tokens
    both = Parts(draft=OracleDraft(target, noise=0.5), selector=parts().selector)
    for shape in (TreeShape((1, 1, 1)), TreeShape((3, 4, 2)), PLAIN):
        assert Engine(target, both).generate(prompts, shape=shape, **options).tokens == plain
    assert Engine(target, parts()).generate(prompts[2:], **options).tokens == plain[2:]
    assert Engine(target, parts(budget_tokens=100)).generate(prompts, **options).tokens == dense != plain


def test_an_indexer_of_another_target_is_refused(target):
    other = random_target("qwen3_micro", seed=1, dtype=torch.float64)
    with pytest.raises(TargetMismatchError, match=r"head dim, KV heads\) = \(2, .*target .* asks for"):
        SPEC.attach(indexer_of(other, Config()), target, Config(), KEYS)
