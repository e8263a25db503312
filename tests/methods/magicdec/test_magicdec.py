"""Self-speculation with a part of the cache: which rows the draft has, what it says, and the text."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from longtrain import methods
from longtrain.cache.evicted import compact
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.evict import Budget, Keep, PromptRun
from longtrain.decoding.limits import Limits
from longtrain.decoding.prefill import prefill
from longtrain.decoding.roles import ChildChoice, Parts, TreeShape, Verdict, attention_observer
from longtrain.decoding.sampling import HashRng, Sampling
from longtrain.decoding.select import max_pool
from longtrain.errors import ConfigError
from longtrain.methods.magicdec.config import Config
from longtrain.methods.magicdec.sparse_cache import Layout
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.targets.loading import random_target
from longtrain.targets.step import OutputRequest, TokenBatch
from tests.helpers import ONE_LAYER, attached, chi_square, token_ids

SPEC = methods.get("magicdec")
CHAIN = TreeShape((1,) * 4)
POLICIES = ("streaming_llm", "snapkv")
SMALL = {"least_tokens": 16, "window": 6, "recent_tokens": 10, "kernel": 3}
"""Few enough rows that short prompts do not fit, and rings turn round."""


@pytest.fixture(scope="module")
def target():
    """In fp64, so that no tie is decided by the number of rows of a step."""
    return random_target("llama_micro", seed=1, dtype=torch.float64)


def parts_of(target, **keys) -> Parts:
    return attached("magicdec", target, **keys)


prompts = partial(token_ids, seed=2)


def read(target, texts, parts, *, after=None, new_cache=None):
    """Prompts read with the draft looking on, and the draft started."""
    found = prefill(
        target,
        new_cache or parts.cache or target.new_cache,
        texts,
        max_new_tokens=200,
        nodes=8,
        attention_observer=attention_observer(parts.draft),
        after=after,
    )
    parts.draft.start(found.tokens_BS, found.n_B, found.step, found.cache)
    return found


def keys_in_use(draft, len_B) -> list[list[torch.Tensor]]:
    """Keys [rows, D] that the draft sees, of each sequence and KV head of the last layer, sorted."""
    arena = draft.rows.restart(len_B)
    k_BGSD = arena.store.k_LBGSD[-1]
    return [[ordered(k_SD[:n]) for k_SD in k_BGSD[b]] for b, n in enumerate(arena.rows_B.tolist())]


def ordered(k_SD):
    return k_SD[k_SD[:, 0].argsort()]


def test_a_quarter_of_the_prompt_and_never_less_than_the_least():
    layout = Layout.of([32768, 600, 30], Config())
    assert layout.rows == (8192, 150, 128) and layout.fixed == (4, 4, 4)
    layout = Layout.of([32768, 600, 30], Config(policy="snapkv"))
    assert layout.rows == (8192, 150, 128) and layout.newest == (512, 75, 64)
    assert layout.choices == (32768 - 512, 525, 30)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_token_is_drafted_as_by_the_target_on_those_rows_alone(target, policy):
    """Against a cache cut to the same rows: sinks and the newest, or those of best score and the newest."""
    parts = parts_of(target, policy=policy, **SMALL)
    lengths = (100, 73, 15, 6)
    texts = prompts(*lengths)
    found = read(target, texts, parts)
    root_B = torch.tensor([3, 4, 5, 6])
    rng = HashRng(0, torch.arange(4))
    tree = parts.draft.propose(root_B, TreeShape((1,), ChildChoice.IID), Sampling(1.0), rng)

    config = parts.draft.config
    kept = []
    scores = SnapKV(Budget(1), window=config.window)
    hook = scores.hook(lengths)
    cache = target.new_cache(4, 300, 8)
    pos_BS = torch.arange(100).expand(4, -1)
    target.forward(TokenBatch(pos_BS, found.tokens_BS, n_B=found.n_B), cache, hook=hook)
    cache.commit(None, found.n_B)
    run = PromptRun(target, cache, lengths, found.tokens_BS, found.n_B, root_B, hook)
    s_LBGS = max_pool(scores.scores(run), lengths, kernel=config.kernel)
    for b, length in enumerate(lengths):
        rows = max(16, length // 4)
        newest = rows - 4 if policy == "streaming_llm" else min(10, rows // 2)
        near = list(range(max(0, length - newest), length))
        for layer in range(target.info.n_layers):
            for head in range(target.info.n_kv_heads):
                first = list(range(min(4, length)))
                if policy == "snapkv":
                    ranked = s_LBGS[layer, b, head, : max(0, length - newest)].argsort(
                        descending=True, stable=True
                    )
                    first = ranked[: rows - newest].tolist()
                kept.append(sorted({*first, *near}) if length > rows else list(range(length)))
    n_LBG = torch.empty(target.info.n_layers, 4, target.info.n_kv_heads, dtype=torch.int64)
    idx_LBGK = torch.zeros(*n_LBG.shape, max(map(len, kept)), dtype=torch.int64)
    at = 0
    for b in range(4):
        for layer in range(target.info.n_layers):
            for head in range(target.info.n_kv_heads):
                n_LBG[layer, b, head] = len(kept[at])
                idx_LBGK[layer, b, head, : len(kept[at])] = torch.tensor(kept[at])
                at += 1
    cut = compact(cache, Keep(idx_LBGK, n_LBG), lengths, room=8)
    step = target.forward(TokenBatch(found.n_B[:, None], root_B[:, None]), cut, outputs=OutputRequest("last"))
    torch.testing.assert_close(tree.q_BNV[:, 0], step.logits_BTV[:, 0].softmax(-1), rtol=1e-7, atol=1e-10)
    whole = target.forward(
        TokenBatch(found.n_B[:, None], root_B[:, None]), cache, outputs=OutputRequest("last")
    )
    apart_B = (tree.q_BNV[:, 0] - whole.logits_BTV[:, 0].softmax(-1)).abs().amax(1)
    assert (apart_B[:2] > 1e-4).all() and (apart_B[2:] < 1e-9).all()


@pytest.mark.parametrize("after", [False, True])
def test_rows_follow_the_text_wherever_it_stands(target, after):
    """Sinks and the newest rows of what the target has, after every cycle of any length."""
    parts = parts_of(target, **SMALL)
    draft, lengths = parts.draft, [60, 5, 90]
    then = [[7] * 20, [8], [9, 10]] if after else None
    found = read(target, prompts(*lengths), parts, after=then)
    rows = [max(16, length // 4) for length in lengths]
    cache, rng = found.cache, HashRng(0, torch.arange(3))
    gen = torch.Generator().manual_seed(4)
    for _ in range(12):
        root_B = torch.randint(97, (3,), generator=gen)
        tree = draft.propose(root_B, CHAIN, Sampling(), rng)
        pos_BN = cache.len_B[:, None] + tree.depth_N
        step = target.forward(TokenBatch(pos_BN, tree.tokens_BN), cache, hook=draft.on_nodes)
        n_B = torch.randint(0, 6, (3,), generator=gen)
        cache.commit(None, n_B)
        path_BP = torch.arange(5).expand(3, -1)
        draft.observe(tree, Verdict(path_BP, n_B, root_B), step)
        seen = keys_in_use(draft, cache.len_B)
        for b, length in enumerate(cache.len_B.tolist()):
            kept = sorted({*range(min(4, length)), *range(max(0, length - rows[b] + 4), length)})
            for head, k_SD in enumerate(seen[b]):
                outputs = cache.k_LBGSD[-1, b, head][torch.tensor(kept)]
                torch.testing.assert_close(k_SD, ordered(outputs), rtol=0, atol=0)


@pytest.mark.corners
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.9, top_p=0.95, seed=3)], ids=["greedy", "sampled"]
)
def test_the_text_is_the_targets_own(target, policy, sampling):
    """Drafts chosen by argmax: the target's coins decide every token, whatever was drafted."""
    texts = prompts(1, 15, 17, 64, 300)
    engine = Engine(target, parts_of(target, policy=policy, **SMALL))
    options = {"max_new_tokens": 16, "sampling": sampling, "ignore_eos": True}
    plain = engine.generate(texts, shape=PLAIN, **options)
    drafted = engine.generate(texts, shape=CHAIN, **options)
    assert drafted.tokens == plain.tokens and plain.stats.draft_bytes == 0
    again = engine.generate(texts[::-1], shape=TreeShape((1,) * 7), **options)
    assert sampling.temperature or again.tokens == plain.tokens[::-1]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_whole_context_drafts_what_the_target_says(target, policy):
    engine = Engine(target, parts_of(target, policy=policy, budget=1.0, least_tokens=256, recent_tokens=256))
    out = engine.generate(prompts(100, 30), max_new_tokens=41, shape=CHAIN, ignore_eos=True)
    assert out.stats.acceptance_rate == 1.0
    part = Engine(target, parts_of(target, policy=policy, **SMALL))
    out = part.generate(prompts(100, 30), max_new_tokens=41, shape=CHAIN, ignore_eos=True)
    assert 0.01 < out.stats.acceptance_rate < 0.9


def test_sampled_chains_follow_the_targets_law():
    target = random_target("llama_micro", seed=3)
    engine = Engine(target, parts_of(target, **SMALL), limits=Limits(batch=400))
    sampling = Sampling(temperature=1.5, top_k=3, seed=1)
    shape = TreeShape((1, 1), ChildChoice.IID)
    chi2, stats = chi_square(engine, prompts(40)[0], shape, sampling, tokens=4, runs=400)
    assert chi2 < 42.3 and 0.1 < stats.acceptance_rate < 0.95  # 99.9% at 18 degrees of freedom


def test_on_a_quantised_cache_and_beside_eviction():
    """It copies rows as they pass, so the target's cache may be of any kind."""
    target = random_target(ONE_LAYER, seed=3, dtype=torch.float64)
    cache = attached("quantspec", target, draft=False)
    texts = prompts(250, 400, vocab=61)
    for policy in POLICIES:
        parts = parts_of(target, policy=policy).merge(cache)
        assert parts.name == f"magicdec {policy}+quantspec"
        engine = Engine(target, parts)
        plain = engine.generate(texts, max_new_tokens=24, shape=PLAIN, ignore_eos=True)
        drafted = engine.generate(texts, max_new_tokens=24, shape=CHAIN, ignore_eos=True)
        assert drafted.tokens == plain.tokens and drafted.stats.acceptance_rate > 0.03
    evictor = Parts(evictor=SnapKV(Budget(64), window=8), name="snapkv")
    engine = Engine(target, parts_of(target, policy="snapkv").merge(evictor))
    plain = engine.generate(texts, max_new_tokens=24, shape=PLAIN, ignore_eos=True)
    drafted = engine.generate(texts, max_new_tokens=24, shape=CHAIN, ignore_eos=True)
    assert drafted.tokens == plain.tokens and drafted.stats.evicted


def test_memory_is_a_share_of_the_prompt_and_is_used_again(target):
    parts = parts_of(target)
    engine = Engine(target, parts)
    engine.generate(prompts(1000), max_new_tokens=8, shape=CHAIN, ignore_eos=True)
    where = [x.data_ptr() for x in parts.draft.tensors()]
    held = parts.draft.bytes()
    slots = parts.draft.rows.arena.slots
    engine.generate(prompts(900), max_new_tokens=40, shape=CHAIN, ignore_eos=True)
    assert [x.data_ptr() for x in parts.draft.tensors()] == where
    assert parts.draft.bytes() < held and slots == 256 + 33
    info = target.info
    row = 2 * info.n_layers * info.n_kv_heads * info.head_dim * 8
    assert held == (250 + 33) * row + 4 * 8
    engine.generate(prompts(2000), max_new_tokens=8, shape=CHAIN, ignore_eos=True)
    assert parts.draft.bytes() > held


def test_what_it_refuses(target):
    parts = parts_of(target, **SMALL)
    engine = Engine(target, parts)
    with pytest.raises(ConfigError, match=r"MagicDec drafts chains, and shape \[2, 2\]"):
        engine.generate(prompts(20), max_new_tokens=4, shape=TreeShape((2, 2)))
    with pytest.raises(ConfigError, match=r"chain of 12 for MagicDec.*least_tokens=16; allowed: up to 11"):
        engine.generate(prompts(20), max_new_tokens=20, shape=TreeShape((1,) * 12))
    with pytest.raises(ConfigError, match="no inference keys"):
        SPEC.attach(SPEC.build(Config(), None), target, Config(), {"budget_tokens": 3})
    for keys, message in (
        ({"policy": "h2o"}, "method.policy=h2o; allowed: streaming_llm, snapkv"),
        ({"budget": 0.0}, "method.budget=0.0; allowed: a number, above 0"),
        ({"budget": 1.5}, "method.budget=1.5"),
        ({"kernel": 4}, r"method.kernel=4; allowed: 1 \(off\)"),
        ({"sinks": -1}, "method.sinks=-1"),
        ({"window": 0}, "method.window=0"),
        ({"recent_tokens": 8}, "method.recent_tokens=8"),
        ({"least_tokens": 4}, "method.least_tokens=4; allowed: 5 or more"),
        ({"least_tokens": 63, "policy": "snapkv"}, "method.least_tokens=63; allowed: 64 or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            Config(**keys)
