"""A short training for the bundled target, through the objective and the engine (CPU, a minute)."""

from __future__ import annotations

import pytest
import torch

from longtrain.assets import asset_dir
from longtrain.data.packing.batch import Batch
from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import TreeShape
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.spec import SPEC
from longtrain.targets.loading import load_target

TOKENS, STEPS = 256, 60


@pytest.mark.slow
def test_it_drafts_for_the_bundled_target_on_text_that_it_has_not_seen():
    target = load_target("tiny", device="cpu")
    (novel, *_) = sorted((asset_dir("bundled") / "text" / "heldout").glob("*.txt"))
    ids = target.encode(novel.read_text(encoding="utf-8")[:80_000])[: (STEPS + 1) * TOKENS]
    config = Config(n_layers=1, markov_rank=64, anchor_every=4)
    torch.manual_seed(0)
    module = SPEC.build(config, target.info)
    objective = SPEC.objective(module, target, config)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        row = torch.tensor(ids[step * TOKENS : (step + 1) * TOKENS])
        learn = torch.ones(TOKENS, dtype=torch.bool)
        learn[0] = False
        batch = Batch(row, (0, TOKENS), learn, seed=step, tokens_in_step=TOKENS - 1)
        loss = objective(batch).total / batch.tokens_in_step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < 0.92 * sum(losses[:10])
    prompts = [ids[at : at + 64] for at in range(STEPS * TOKENS, STEPS * TOKENS + 192, 64)]
    how = {"max_new_tokens": 40, "ignore_eos": True}
    plain = Engine(target).generate(prompts, **how)
    drafts = Engine(target, SPEC.attach(module, target, config, {}))
    for length in (4, config.block_size):
        out = drafts.generate(prompts, shape=TreeShape((1,) * length), **how)
        assert out.tokens == plain.tokens and out.stats.tau > 1.05
    tree = drafts.generate(prompts, shape=TreeShape((4, 4, 4)), **how)
    assert tree.tokens == plain.tokens and tree.stats.tau > 1.2
