"""QuantSpec in the engine: the same text as plain decoding on the same cache, and what it refuses."""

import copy
from functools import partial

import pytest
import torch

from longtrain import methods
from longtrain.decoding.control import ShapeChoice
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import ChildChoice, Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, ConflictError, DataError
from longtrain.evaluation.harness.rounding import Passage, logits_at_once, logits_in_steps
from longtrain.kernels.int4_linear import Int4Linear
from longtrain.methods import policies
from longtrain.methods.quantspec.config import Config
from longtrain.targets.int4 import Int4Target
from longtrain.targets.loading import random_target
from longtrain.targets.step import OutputRequest, TokenBatch
from tests.helpers import ONE_LAYER, attached, chi_square, token_ids

SPEC = methods.get("quantspec")
MICRO = ONE_LAYER


@pytest.fixture(scope="module")
def target():
    """In fp64, so that no tie is decided by the number of rows of a step."""
    return random_target(MICRO, seed=3, dtype=torch.float64)


def parts_of(target, **keys) -> Parts:
    return attached("quantspec", target, **keys)


prompts = partial(token_ids, vocab=61)


def both(engine, texts, shape, **options):
    plain = engine.generate(texts, shape=PLAIN, ignore_eos=True, **options)
    return plain, engine.generate(texts, shape=shape, ignore_eos=True, **options)


def test_300_greedy_tokens_are_those_of_plain_decoding_on_this_cache(target):
    plain, drafted = both(
        Engine(target, parts_of(target)), prompts(250), TreeShape((1,) * 4), max_new_tokens=300
    )
    assert drafted.tokens == plain.tokens and drafted.stats.tau > 1.3
    assert len(plain.tokens[0]) == 300


@pytest.mark.parametrize(
    "keys", [{"split": "rtn"}, {"weight_bits": 16}, {"kv_bits": 8}], ids=["rtn", "KV only", "weights only"]
)
def test_batches_sampled_and_greedy_are_exact(target, keys):
    """Drafts chosen by argmax: the target's coins decide every token, whatever was drafted."""
    engine = Engine(target, parts_of(target, **keys))
    for temperature, texts in ((0.0, prompts(120, 255, 380)), (1.0, prompts(250))):
        sampling = Sampling(temperature=temperature, seed=5)
        plain, drafted = both(engine, texts, TreeShape((1,) * 7), max_new_tokens=16, sampling=sampling)
        assert drafted.tokens == plain.tokens


def test_the_upper_half_of_the_cache_is_nearly_the_target(target):
    """On the target's own weights only the reading at 4 bits differs."""
    prompt = prompts(600)
    shape = TreeShape((1,) * 3)
    rates = {}
    for name, keys in (("kv", {"weight_bits": 16}), ("weights", {"kv_bits": 8}), ("both", {})):
        engine = Engine(target, parts_of(target, **keys))
        generation = engine.generate(prompt, max_new_tokens=40, shape=shape, ignore_eos=True)
        rates[name] = generation.stats.acceptance_rate
    assert rates["kv"] > 0.6 and rates["kv"] > rates["both"] - 0.05


def test_a_step_stops_where_plain_decoding_would_quantise(target):
    """With 254 tokens in the cache two more rows fit before the flush, however many are accepted."""
    engine = Engine(target, parts_of(target, weight_bits=16))
    out = engine.generate(prompts(254), max_new_tokens=20, shape=TreeShape((1,) * 6), ignore_eos=True)
    first = out.stats.rows[0][0]
    free = Engine(target, parts_of(target, weight_bits=16, strict_flush=False))
    loose = free.generate(prompts(254), max_new_tokens=20, shape=TreeShape((1,) * 6), ignore_eos=True)
    assert loose.stats.rows[0][0].emitted > 2
    assert (first.accepted, first.drafted) == (loose.stats.rows[0][0].accepted, 6)  # the cut is no rejection
    assert first.tokens == first.emitted == 2 and first.put_off == first.accepted - 1
    assert loose.stats.rows[0][0].put_off == 0


@pytest.mark.parametrize("capture", [False, True])
def test_a_cache_that_is_outgrown_gives_its_memory_back(target, capture):
    """A draft, and cycles that are kept, know the old one still."""
    parts = parts_of(target)
    engine = Engine(target, parts, capture=capture)
    how = {"max_new_tokens": 40, "shape": TreeShape((1, 1)), "ignore_eos": True}
    before = engine.generate(prompts(200), **how).tokens
    old = parts.cache.last
    assert old is not None and all(tensor.untyped_storage().nbytes() for tensor in old.tensors())
    engine.generate(prompts(2000), **how)
    assert parts.cache.last is not old
    assert not any(tensor.untyped_storage().nbytes() for tensor in old.tensors())
    assert engine.generate(prompts(200), **how).tokens == before


def test_sampled_text_follows_the_law_of_plain_decoding():
    target = random_target({**MICRO, "vocab_size": 7}, seed=3)
    engine = Engine(target, parts_of(target), limits=Limits(batch=200))
    prompt = [token % 7 for token in prompts(254)[0]]
    shape, sampling = TreeShape((1, 1), ChildChoice.IID), Sampling(temperature=1.3, seed=1)
    chi2, _ = chi_square(engine, prompt, shape, sampling, tokens=4, runs=200)
    assert chi2 < 42.3  # 99.9% at 18 degrees of freedom


def test_gaps_of_differences_are_those_of_this_cache(target):
    """The logit gap between a token and the best one, after a text that was decoded here token by token."""
    parts = parts_of(target, draft=False)
    prompt = prompts(300)
    tokens = Engine(target, parts).generate(prompt, max_new_tokens=6, ignore_eos=True).tokens[0]
    other = (tokens[4] + 1) % MICRO["vocab_size"]
    passage = Passage(prompt[0], [*tokens[:4], other], first=4)
    cache = parts.cache(1, 400, 1)
    for at, ids in enumerate([prompt[0], *([token] for token in tokens[:4])]):
        pos_BT = torch.arange(len(ids))[None] + (299 + at if at else 0)
        step = target.forward(TokenBatch(pos_BT, torch.tensor([ids])), cache, outputs=OutputRequest("last"))
        cache.commit(None, torch.tensor([len(ids)]))
    logits = step.logits_BTV[0, 0]
    assert int(logits.argmax()) == tokens[4]
    outputs = float(logits.max() - logits[other])
    for again in (
        logits_at_once(target, parts, passage),
        *(logits_in_steps(target, parts, passage, rows=rows) for rows in (1, 3)),
    ):
        assert float(again[0].max() - again[0, other]) == pytest.approx(outputs, abs=1e-9)
    plain = logits_at_once(target, Parts(), passage)[0]
    assert abs(float(plain.max() - plain[other]) - outputs) > 1e-6


def test_another_draft_on_this_cache_is_exact(target):
    parts = parts_of(target, draft=False).merge(attached("longspec", target, window=32))
    assert parts.name == "quantspec+longspec"
    engine = Engine(target, parts)
    plain, drafted = both(engine, prompts(250, 40), TreeShape((2, 2)), max_new_tokens=24)
    assert drafted.tokens == plain.tokens


def test_plain_decoding_needs_no_draft_and_reads_eight_bits(target):
    """The target's law on this cache is near that of the plain cache: most greedy tokens agree."""
    prompt = prompts(700)
    here = Engine(target, parts_of(target, draft=False)).generate(prompt, max_new_tokens=16, ignore_eos=True)
    there = Engine(target).generate(prompt, max_new_tokens=16, ignore_eos=True)
    assert here.tokens[0][:3] == there.tokens[0][:3]
    assert here.stats.draft_bytes == 0 and here.stats.cache_bytes < there.stats.cache_bytes


def test_the_draft_shares_all_but_its_linear_layers(target):
    before = copy.deepcopy(target.state_dict())
    model = Int4Target(target, group=128)
    assert model.model.model.embed_tokens.weight is target.model.model.embed_tokens.weight
    assert model.model.model.norm.weight is target.model.model.norm.weight
    layers = [module for module in model.modules() if isinstance(module, Int4Linear)]
    assert len(layers) == 8 and not any(type(m) is torch.nn.Linear for m in model.modules())
    assert model.int4_bytes() == sum(layer.bytes() for layer in layers)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
    assert any(type(m) is torch.nn.Linear for m in target.modules())
    assert (model.device, model.dtype) == (target.device, target.dtype)
    pos_BT = torch.arange(5)[None]
    assert all(torch.equal(a, b) for a, b in zip(model.rope(pos_BT), target.rope(pos_BT), strict=True))


def test_caches_are_used_again(target):
    parts = parts_of(target, draft=False)
    first = parts.cache(2, 300, 5)
    assert parts.cache(2, 1000, 5) is first and int(first.len_B.max()) == 0
    assert parts.cache(3, 300, 5) is not first and parts.cache(3, 1025, 5).capacity == 2048


@pytest.mark.parametrize("capture", [True, False])
def test_an_engine_goes_on_after_a_prompt_that_was_refused(capture):
    """Nothing of a prompt with NaN is kept: the next text is a fresh engine's."""
    target = random_target(MICRO, seed=2, dtype=torch.float64)
    weight = target.model.model.layers[0].self_attn.k_proj.weight
    call = {"max_new_tokens": 12, "shape": TreeShape((1, 1)), "ignore_eos": True}
    fresh = Engine(target, parts_of(target), capture=capture).generate(prompts(300), **call)
    engine, streamed = Engine(target, parts_of(target), capture=capture), []
    engine.generate(prompts(280), **call)
    with torch.no_grad():
        kept = weight[5].clone()
        weight[5] = float("nan")
        with pytest.raises(DataError, match="keys of layer 0 hold NaN"):
            engine.generate(prompts(290), stream=lambda *news: streamed.append(news), **call)
        weight[5] = kept
    assert not streamed
    assert engine.generate(prompts(300), **call).tokens == fresh.tokens


def test_what_it_refuses(target, monkeypatch):
    parts = parts_of(target)
    engine = Engine(target, parts)
    with monkeypatch.context() as patched:  # before any forward
        patched.setattr(type(target), "forward", None)
        for shape in (TreeShape((2, 2)), ShapeChoice(((1,), (1, 2)))):
            with pytest.raises(ConfigError, match="chains"):
                engine.generate(prompts(20), max_new_tokens=4, shape=shape)
    evictor = policies.make("snapkv", Budget(8), {})
    with pytest.raises(ConflictError, match="quantspec"):
        Engine(target, parts.merge(Parts(evictor=evictor, name="snapkv")))
    with pytest.raises(ConflictError, match="hierarchical"):
        Engine(target, Parts(draft=parts.draft)).generate(prompts(20), max_new_tokens=4)
    with pytest.raises(ConfigError, match="size 32"):
        parts_of(random_target("qwen3_micro"))
    with pytest.raises(ConfigError, match="no inference keys"):
        SPEC.attach(SPEC.build(Config(), None), target, Config(), {"budget_tokens": 3})
    for keys in (
        {"split": "ceil"},
        {"kv_bits": 2},
        {"weight_bits": 8},
        {"weight_group": 100},
        {"kv_bits": 8, "weight_bits": 16},
    ):
        with pytest.raises(ConfigError, match=r"method\.(split|kv_bits|weight)"):
            Config(**keys)
