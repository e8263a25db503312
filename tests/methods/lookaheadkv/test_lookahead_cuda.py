"""On a GPU: a step does not wait, half precision is close, and the prompt does not notice the rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longtrain import methods
from longtrain.artifact import Artifact
from longtrain.decoding.evict import PromptRun
from longtrain.methods.lookaheadkv.config import Config
from longtrain.methods.lookaheadkv.objective import LookaheadObjective
from longtrain.targets import suffix
from longtrain.targets.step import OutputRequest, TokenBatch
from tests.helpers import no_waiting

pytestmark = pytest.mark.gpu
CONFIG = Config(n_lookahead=8, lora_rank=4)
PAIRS = [(150, 12), (40, 0), (300, 30), (61, 1)]


def gradient(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()]).double().cpu()


@pytest.mark.parametrize("changes", [{}, {"suffix_window": 16, "budgets": [16, 64]}], ids=str)
def test_a_step_does_not_wait_and_half_precision_is_close(three_layers, make_module, make_batch, changes):
    config = replace(CONFIG, **changes)
    exact = three_layers("qwen3")
    batch = make_batch(exact, PAIRS)
    outputs = make_module(exact, config)
    total = LookaheadObjective(outputs, exact, config)(batch).total
    total.backward()
    half = three_layers("qwen3").bfloat16().cuda()
    module = make_module(exact, config, torch.float32).cuda()
    objective, moved = LookaheadObjective(module, half, config), batch.to("cuda", non_blocking=True)
    for guarded in (False, True):  # the first pass compiles and caches
        module.zero_grad()
        with torch.autocast("cuda", torch.bfloat16), no_waiting() if guarded else torch.enable_grad():
            loss = objective(moved)
            loss.total.backward()
    assert float(loss.total.detach()) == pytest.approx(float(total.detach()), rel=0.05)
    assert (gradient(module) - gradient(outputs)).norm() / gradient(outputs).norm() < 0.2


def prefilled(target, ids, lengths, evictor=None):
    cache, n = target.new_cache(len(lengths), max(lengths), 0), torch.tensor(lengths, device=target.device)
    pos = torch.arange(max(lengths), device=target.device).expand(len(lengths), -1)
    hook = evictor.hook(lengths) if evictor else None
    step = target.forward(TokenBatch(pos, ids, n_B=n), cache, outputs=OutputRequest("all"), hook=hook)
    cache.commit(None, n)
    return PromptRun(target, cache, tuple(lengths), ids, n, ids[:, 0], watched=hook), step.logits_BTV


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_logits_and_cache_are_the_same_with_and_without(three_layers, make_module, dtype):
    target = three_layers("qwen3", dtype).cuda()
    module = make_module(target, CONFIG, dtype).cuda()
    evictor = methods.get("lookaheadkv").attach(module, target, CONFIG, {"budget_tokens": 64}).evictor
    lengths = [700, 333]
    ids = torch.randint(2, target.info.vocab_size, (2, 700), device="cuda")
    plain, logits = prefilled(target, ids, lengths)
    run, logits_watched = prefilled(target, ids, lengths, evictor)
    assert torch.equal(logits, logits_watched)
    assert torch.equal(plain.cache.k_LBGSD, run.cache.k_LBGSD)
    assert torch.equal(plain.cache.v_LBGSD, run.cache.v_LBGSD)
    keep = evictor.select(run)
    assert torch.equal(plain.cache.k_LBGSD, run.cache.k_LBGSD) and keep.n_LBG.eq(64).all()


def test_scores_equal_those_of_the_cpu(three_layers, make_module):
    lengths = [700, 333]
    ids = torch.randint(2, 97, (2, 700))
    found = []
    for device in ("cpu", "cuda"):
        target = three_layers("qwen3", torch.float32).to(device)
        module = make_module(target, CONFIG, torch.float32).to(device)
        evictor = methods.get("lookaheadkv").attach(module, target, CONFIG, {"budget_tokens": 64}).evictor
        found.append(evictor.scores(prefilled(target, ids.to(device), lengths, evictor)[0]).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-6)


def test_an_artifact_of_the_cpu_is_verified_on_the_gpu(three_layers, make_module, tmp_path):
    target = three_layers("qwen3", torch.float32)
    module = make_module(target, CONFIG, torch.float32)
    made = Artifact.from_module("lookaheadkv", CONFIG, module=module, target=target)
    assert Artifact.load(made.save(tmp_path / "e")).attach(target.cuda(), budget_tokens=16).evictor


@pytest.mark.parametrize("changes", [{}, {"suffix_window": 16}], ids=str)
def test_rows_beside_the_prefill_give_what_rows_in_it_do(
    three_layers, make_module, make_batch, changes, monkeypatch
):
    """Only the order of launches differs, and nothing is read too early.

    Scores are equal to the bit. Loss and gradients are sums in an order that differs from run to run, with or
    without a stream of their own: rows that are read too early would change them by far more.
    """
    config = replace(CONFIG, **changes)
    target = three_layers("qwen3", torch.bfloat16).cuda()
    module = make_module(target, config, torch.float32).cuda()
    evictor = (
        methods.get("lookaheadkv")
        .attach(make_module(target, config, torch.bfloat16).cuda(), target, config, {"budget_tokens": 64})
        .evictor
    )
    ids = torch.randint(2, target.info.vocab_size, (2, 700), device="cuda")
    batch = make_batch(target, PAIRS).to("cuda")
    found = []
    for beside in (True, True, False):
        if not beside:
            monkeypatch.setattr(suffix, "_stream", lambda device: None)
        run, _ = prefilled(target, ids, [700, 333], evictor)
        module.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = LookaheadObjective(module, target, config)(batch)
        loss.total.backward()
        found.append((evictor.scores(run), loss.total.detach(), gradient(module)))
    scores, loss, grad = found[2]
    for one_scores, one_loss, one_grad in found[:2]:
        assert torch.equal(one_scores, scores)
        torch.testing.assert_close(one_loss, loss, rtol=1e-5, atol=0)
        assert (one_grad - grad).norm() / grad.norm() < 0.02
