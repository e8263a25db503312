"""What the head learns: against a teacher written out by hand, and that it learns it."""

from __future__ import annotations

import pytest
import torch

from longtrain.data.packing.batch import Batch
from longtrain.methods import set_objective as objectives
from longtrain.methods.set_objective import draw, far
from longtrain.methods.specontext.config import Config
from longtrain.methods.specontext.modules import RetrievalHead
from longtrain.methods.specontext.objective import RetrievalObjective
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest

from .test_retrieval_head import head_of

SMALL = {"queries": 6, "sinks": 2, "window": 4, "recall_entries": 12}
CONFIGS = {
    "shifted, rows alike": Config(layers=[0, 1], by_mass=False, **SMALL),
    "groups, own keys, mean, mlp": Config(layers=[1], sets=2, share_keys=False, pool="mean", mlp=8, **SMALL),
    "embedding, soft recall": Config(variant="embedding", recall_weight=0.5, **SMALL),
    "lagged, of the feature's row": Config(variant="lagged", row="feature", **SMALL),
}


@pytest.fixture(scope="module")
def target():
    return random_target("llama_micro", seed=1, dtype=torch.float64)


@pytest.fixture(scope="module")
def windows():
    """A target of which three of five layers have a window."""
    kinds = [*["sliding_attention", "full_attention"] * 2, "sliding_attention"]
    shape = {**SHAPES["gemma3_micro"], "num_hidden_layers": 5, "layer_types": kinds}
    return random_target(shape, seed=1, dtype=torch.float64)


def by_hand(head, target, config, batch):
    """The loss of a batch, document by document and row by row, with gradients by autograd alone."""
    total, info = 0.0, target.info
    objective = RetrievalObjective(head, target, config)
    for one in draw(config, batch):
        ids = batch.ids_T[one.start : one.stop]
        n, seen = len(ids), {}
        step = target.packed(
            ids, torch.arange(n), (0, n), OutputRequest("none", hidden=head.hidden),
            hook=lambda layer, q, k, v, seen=seen: seen.update({layer: (q[0], k[0])}),
        )  # fmt: skip
        alone = Batch(ids, (0, n), batch.loss_mask_T[one.start : one.stop], seed=0, tokens_in_step=1)
        row = objectives.ReadRow(alone, step.hidden, [])
        entry = objective._entry(row, torch.arange(n))
        rope = objective.rope(torch.arange(n))
        q_all, k_all = head.query(entry, rope), head.key(entry, rope)
        groups, heads = head.heads[1], head.heads[0]
        shift = int(config.row == "feature")
        for t in one.at_R.tolist():
            inside = far(config, torch.tensor([t]), n)[0]
            for x in range(head.n_sets):
                layers = [
                    (layer, g) for layer in info.full_layers for g in range(info.n_kv_heads)
                    if int(head.table_LG[layer, g]) == x
                ]  # fmt: skip
                mass = torch.zeros(n, dtype=torch.float64)
                for layer, g in layers:
                    q, k = seen[layer]
                    pooled = torch.stack([
                        (q[2 * g + h, t] @ k[g, : t + 1].T * target.scaling(0)).softmax(0) for h in range(2)
                    ])  # fmt: skip
                    pooled = pooled.mean(0) if config.pool == "mean" else pooled.amax(0)
                    own = torch.zeros(n, dtype=torch.float64)
                    own[: t + 1] = pooled
                    own = own * inside
                    mass += (own if config.by_mass else own / own.sum()) / len(layers)
                set_, g = divmod(x, groups)
                key = k_all[:, g if head.key_sets == 1 else x][shift:t]
                weights = []
                for h in range(heads // groups):
                    query = q_all[t, set_ * heads + g * (heads // groups) + h]
                    weights.append((key @ query * head.dim**-0.5).log_softmax(0))
                score = torch.stack(weights).amax(0)
                children = score[inside[: t - shift]].log_softmax(0)
                teacher = mass[inside]
                whole = teacher.sum()
                loss = (teacher * ((teacher / whole).clamp_min(1e-300).log() - children)).sum()
                if config.recall_weight:
                    rows = config.recall_entries - config.sinks - config.window
                    edge = children.detach().topk(rows).values[-1] if len(children) >= rows else -1e4
                    loss = loss + config.recall_weight * (
                        whole - (teacher * torch.sigmoid(children - edge)).sum()
                    )
                total = total + loss * one.labels / len(one.at_R)
    return total / head.n_sets


@pytest.mark.corners
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("which", ["target", "windows"])
def test_loss_and_gradient_are_those_of_the_sum_written_out(name, which, request, make_batch, monkeypatch):
    """Three documents, one too short to be learned of, in many blocks of queries and keys."""
    monkeypatch.setattr(objectives, "BLOCK_BYTES", 4 * 4 * 64 * 2)
    monkeypatch.setattr(objectives, "KEY_ROWS", 17)
    target = request.getfixturevalue(which)
    config, batch = CONFIGS[name], make_batch(target, (40, 9, 61))
    head = head_of(config, target)
    loss = RetrievalObjective(head, target, config)(batch)
    outputs = by_hand(head, target, config, batch)
    torch.testing.assert_close(loss.total, outputs, rtol=1e-9, atol=1e-9)
    loss.total.backward()
    got = {key: p.grad.clone() for key, p in head.named_parameters()}
    head.zero_grad()
    outputs.backward()
    for key, p in head.named_parameters():
        torch.testing.assert_close(
            got[key], p.grad, rtol=1e-7, atol=1e-9, msg=lambda text, key=key: key + text
        )
    assert loss.tokens == int(batch.loss_mask_T.sum())
    held, oracle = (float(loss.metrics[key][0] / loss.metrics[key][1]) for key in ("recall", "recall_oracle"))
    assert 0 < held < oracle <= 1


def test_a_head_learns_where_the_target_looks(make_batch):
    """Recall of the far attention rises from chance towards the teacher's own sets."""
    target = random_target("llama_micro", seed=1)
    config = Config(layers=[0, 1], sets=2, pool="mean", **{**SMALL, "queries": 32, "recall_entries": 14})
    torch.manual_seed(0)
    head = RetrievalHead(config, target.info)
    objective = RetrievalObjective(head, target, config)
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    shares = []
    for step in range(40):
        loss = objective(make_batch(target, (120, 120), seed=step % 4))
        optimizer.zero_grad()
        (loss.total / loss.tokens).backward()
        optimizer.step()
        recall, oracle = (loss.metrics[key][0] / loss.metrics[key][1] for key in ("recall", "recall_oracle"))
        shares.append(float(recall / oracle))
    assert sum(shares[-5:]) / 5 > sum(shares[:5]) / 5 + 0.1


def test_a_calibrated_map_finds_the_set_of_each_kv_head(target, make_batch):
    """Sets that swap the KV heads' roles are found out: each head reads the set that holds its attention."""
    config = Config(layers=[0], mapping="calibrated", **{**SMALL, "queries": 24})
    head = head_of(config, target)
    objective = RetrievalObjective(head, target, config)
    objective(make_batch(target, (80, 80)))
    evidence = head.evidence_LGX.clone()
    assert evidence.min() > 0 and torch.equal(head.table_LG, evidence.argmax(-1))
    objective.eval()(make_batch(target, (80, 80)))
    assert torch.equal(head.evidence_LGX, evidence)


def test_a_calibrated_map_counts_the_evidence_of_all_ranks(target, make_batch, monkeypatch):
    """What other ranks' batches are evidence of is added to what a rank found in this batch, once a batch."""
    config = Config(layers=[0], mapping="calibrated", **{**SMALL, "queries": 24})
    mine, others = make_batch(target, (80, 80)), make_batch(target, (50, 70))
    found = []
    for batch in (mine, others):
        head = head_of(config, target)
        RetrievalObjective(head, target, config)(batch)
        found.append(head.evidence_LGX.clone())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda new_LGX: new_LGX.add_(found[1]))
    head = head_of(config, target)
    objective = RetrievalObjective(head, target, config)
    for _ in range(2):
        objective(mine)
    outputs = 2 * (found[0] + found[1])
    torch.testing.assert_close(head.evidence_LGX, outputs)
    assert torch.equal(head.table_LG, outputs.argmax(-1))


def test_a_row_without_query_rows_is_told_once(target, make_batch, caplog):
    config = Config(layers=[0], **SMALL)
    objective = RetrievalObjective(head_of(config, target), target, config)
    for sizes in ((9, 12), (40, 61), (8, 8)):
        loss = objective(make_batch(target, sizes))
        assert (float(loss.total.detach()) == 0) == (max(sizes) < 16)
    assert [record.message for record in caplog.records if "nothing is learned" in record.message] == [
        "nothing is learned from the sequence of a batch, nor from similar ones: its documents have fewer "
        "than 16 tokens, or no label behind their first quarter (their first 12 if they are long)"
    ]
