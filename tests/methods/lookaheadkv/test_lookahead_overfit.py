"""Eight samples learned by heart: the KL falls by more than 80 % and the ranking passes SnapKV's."""

from __future__ import annotations

import torch

from longtrain import methods
from longtrain.data.packing.batch import Batch
from longtrain.methods.lookaheadkv.config import Config


def test_eight_samples_are_learned(three_layers):
    torch.manual_seed(0)
    target = three_layers("llama", torch.float32)
    config = Config(n_lookahead=16, embedding_lr_scale=3.0)
    spec = methods.get("lookaheadkv")
    module = spec.build(config, target.info)
    objective = spec.objective(module, target, config)
    ids, bounds, mask = [], [0], []
    for _ in range(8):
        ids.append(torch.randint(2, 97, (140,)))
        mask.append(torch.arange(140) >= 130)
        bounds.append(bounds[-1] + 140)
    batch = Batch(
        torch.cat(ids), tuple(bounds), torch.cat(mask), seed=0, tokens_in_step=80, documents_in_step=8
    )
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    kl = []
    for _ in range(50):
        loss = objective(batch).total / 8
        kl.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        metrics = {name: float(a / b) for name, (a, b) in objective.eval()(batch).metrics.items()}
    assert kl[-1] < 0.2 * kl[0]
    assert metrics["recall@64"] > metrics["snapkv/recall@64"]
    assert metrics["kendall_tau"] > metrics["snapkv/kendall_tau"]
