"""It costs no forward, changes nothing of the target, scores as in training and keeps the best rows."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load

from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError
from longtrain.methods.kvzap.config import Config
from longtrain.methods.kvzap.kvpress_files import kvpress_files
from longtrain.methods.kvzap.labels import labelled
from longtrain.methods.kvzap.modules import KVzap, PredictedScores
from longtrain.methods.kvzap.runtime import KVzapEvictor
from longtrain.methods.kvzap.spec import SPEC
from longtrain.targets.loading import random_target
from longtrain.targets.step import TokenBatch
from tests.methods.policies.runs import kept, prefilled, prompts_of


@pytest.mark.parametrize("target", ["llama", "gemma3"], indirect=True)
def test_watching_leaves_the_target_bit_identical(target, module):
    prompts = prompts_of(40, 25)
    ids_BT = torch.tensor([prompts[0][:25], prompts[1]])
    pos_BT = torch.arange(25).expand_as(ids_BT)
    steps, caches = [], [target.plain_cache(2, 25, 1) for _ in range(2)]
    for cache, hook in zip(caches, (None, PredictedScores(module)), strict=True):
        steps.append(target.forward(TokenBatch(pos_BT, ids_BT), cache, hook=hook))
    assert torch.equal(steps[0].logits_BTV, steps[1].logits_BTV)
    assert torch.equal(caches[0].k_LBGSD, caches[1].k_LBGSD)


@pytest.mark.parametrize(
    ("target", "fused"), [("llama", False), ("llama", True), ("gemma3", False)], indirect=["target"]
)
def test_scores_are_those_of_training(target, module, config, fused):
    texts = prompts_of(40, 17)
    pred_LBGS, _ = labelled(module, target, config, [torch.tensor(text) for text in texts], train=True)
    if fused:
        target.fuse()
    evictor = KVzapEvictor(module, config, Budget(12))
    s_LBGS = evictor.scores(prefilled(target, texts, evictor))
    for b, text in enumerate(texts):
        n = len(text)
        torch.testing.assert_close(s_LBGS[:, b, :, :n], pred_LBGS[:, b, :, :n].detach())


def best(s_LGS, n, *, rows, sinks, window, threshold, shared):
    """Kept rows of one prompt, by sorting."""
    L, G = s_LGS.shape[:2]
    stays = {at for at in range(n) if at < sinks or at >= n - window}
    found = [[[] for _ in range(G)] for _ in range(L)]
    cells = [(layer, head) for layer in range(L) for head in range(G)]
    heads = {False: [[c] for c in cells], "heads": [[(la, h) for h in range(G)] for la in range(L)]}
    for group in heads.get(shared, [cells]):
        ranked = sorted(
            (0 if at in stays else 1, -float(s_LGS[la, h, at]), la, h, at)
            for la, h in group
            for at in range(n)
        )
        for free, minus, la, h, at in ranked[: rows * len(group)]:
            if not free or threshold is None or -minus >= threshold:
                found[la][h].append(at)
    return [[sorted(row) for row in layer] for layer in found]


@pytest.mark.parametrize("adaptive", ["layers", "heads", False])
@pytest.mark.parametrize("threshold", [None, 0.1])
def test_the_best_rows_stay(target, module, config, adaptive, threshold):
    evictor = KVzapEvictor(module, config, Budget(12), adaptive=adaptive, threshold=threshold)
    run = prefilled(target, prompts_of(40, 12, 23), evictor)
    s_LBGS, keep = evictor.scores(run), evictor.select(run)
    for b, n in enumerate(run.lengths):
        rows, window = (12, 3) if n > 12 else (n, 6)  # a quarter of the budget, or all of the window
        expected = best(
            s_LBGS[:, b, :, :n], n, rows=rows, sinks=2, window=window, threshold=threshold, shared=adaptive
        )
        assert kept(keep, b) == expected
        if threshold is None:
            assert sum(len(row) for heads in kept(keep, b) for row in heads) == rows * 4


def test_no_further_forward_and_all_rows_within_the_budget(target, module, config):
    prompts = prompts_of(40, 25)
    plain = Engine(target).generate(prompts, max_new_tokens=6, ignore_eos=True)
    for budget, same in ((64, True), (10, False)):
        evictor = KVzapEvictor(module, config, Budget(budget))
        parts = Parts(evictor=evictor, name="kvzap")
        found = Engine(target, parts).generate(prompts, max_new_tokens=6, ignore_eos=True)
        assert found.stats.target_forwards == plain.stats.target_forwards
        assert (found.tokens == plain.tokens) is same
        assert found.stats.kept_entries == ([40.0, 25.0] if same else [10.0, 10.0])


def test_scores_of_a_bf16_target_do_not_tie():
    target = random_target("llama_micro", dtype=torch.bfloat16)
    module = KVzap(Config(hidden_dim=16), target.info)
    x_BTE = torch.randn(1, 200, target.info.hidden_size, dtype=torch.bfloat16)
    s_BGT = module.score(0, x_BTE)
    assert s_BGT.dtype == torch.float32 and len(s_BGT[0, 0].unique()) == 200


@pytest.mark.parametrize("target", ["llama", "gemma3"], indirect=True)
@pytest.mark.parametrize("hidden_dim", [8, 0])
def test_files_of_kvpress(target, hidden_dim):
    config = Config(hidden_dim=hidden_dim)
    module = KVzap(config, target.info)
    files = kvpress_files(module.state_dict(), config, target.info)
    about = json.loads(files["kvpress/config.json"])
    layers = target.info.n_layers
    assert [about[key] for key in ("model_type", "input_dim", "output_dim", "n_modules")] == [
        "kvzap", target.info.hidden_size, 2, layers,
    ]  # fmt: skip
    assert about["hidden_dim"] == (hidden_dim or None) and about["dtype"] == "float32"
    state = load(files["kvpress/model.safetensors"])
    names = ["0.weight", "0.bias", "2.weight", "2.bias"] if hidden_dim else ["weight", "bias"]
    assert set(state) == {f"layers.{layer}.{name}" for layer in range(layers) for name in names}
    for layer in range(layers):
        parts = [state[f"layers.{layer}.{name}"] for name in names]
        assert all(part.any() == (layer in target.info.full_layers) for part in parts)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "was given none"),
        ({"budget_tokens": 9, "adaptive": "rows"}, "evict.adaptive"),
        ({"budget_tokens": 9, "window": -1}, "evict.window"),
        ({"budget_tokens": 9, "threshold": "low"}, "evict.threshold"),
        ({"budget_tokens": 9, "share": 1}, "no inference key 'share'"),
    ],
)
def test_wrong_keys_get_one_line(target, module, config, keys, words):
    with pytest.raises(ConfigError, match=words):
        SPEC.attach(module, target, config, keys)
