"""Eviction in the engine, on real model families: what it leaves alone, and what it composes with."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from longtrain.cache.evicted import EvictedCache
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.evict import Budget, Keep, PromptRun
from longtrain.decoding.prefill import prefill
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, ConflictError, DataError
from longtrain.methods import policies
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.targets.loading import random_target
from longtrain.targets.model import Target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest, TokenBatch
from tests.helpers import Recall, noisy_longspec

from .micro import TARGETS, prompts_of, snapkv, target

CHAIN, TREE = TreeShape((1, 1, 1, 1)), TreeShape((3, 4, 2))
NEW = {"max_new_tokens": 24, "ignore_eos": True}


class Ragged:
    """Keeps its own number of random rows of every layer, prompt and head."""

    name = "ragged"

    def extra_tokens(self, longest: int) -> int:
        return 0

    def hook(self, lengths: tuple[int, ...]) -> None:
        return None

    def select(self, run: PromptRun) -> Keep:
        info = run.target.info
        shape = (info.n_layers, len(run.lengths), info.n_kv_heads)
        n, rows = torch.zeros(shape, dtype=torch.int64), {}
        for at in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
            layer, b, g = at
            rng = torch.Generator().manual_seed(
                run.lengths[b] * 100 + layer * 10 + g
            )  # the same in any batch
            count = 5 + 3 * layer + 7 * g
            rows[tuple(at)] = torch.randperm(run.lengths[b], generator=rng)[:count].sort().values
            n[tuple(at)] = len(rows[tuple(at)])
        idx = torch.zeros(*shape, int(n.max()), dtype=torch.int64)
        for at, found in rows.items():
            idx[at][: len(found)] = found
        return Keep(idx, n)


EVICTORS = {
    "snapkv": lambda: snapkv(20),
    "ragged": Ragged,
    "streaming": lambda: policies.get("streaming_llm", budget=Budget(16)),
}


def masked_continuation(model: Target, prompt: list[int], keep: Keep, b: int, n: int) -> list[int]:
    """Greedy text by hand: each step over the whole text, evicted keys hidden from rows after the prompt."""
    S, tokens, info = len(prompt), list(prompt), model.info
    hidden = torch.ones(info.n_layers, info.n_kv_heads, S, dtype=torch.bool)
    for layer in range(info.n_layers):
        for g in range(info.n_kv_heads):
            hidden[layer, g, keep.idx_LBGK[layer, b, g][: keep.n_LBG[layer, b, g]]] = False

    class Hides:
        """No cache: the rows of this forward are the whole text."""

        def expect(self, n_B: Tensor | None) -> None:
            pass

        def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
            self.kv = k_BGTD, v_BGTD

        def attend(self, layer: int, q_BHTD: Tensor, *, mask: object, scale: float) -> tuple[Tensor, None]:
            k, v = (x.repeat_interleave(info.n_heads // info.n_kv_heads, 1) for x in self.kv)
            T = q_BHTD.shape[2]
            seen = torch.ones(T, T, dtype=torch.bool).tril().repeat(info.n_heads, 1, 1)
            gone = hidden[layer].repeat_interleave(info.n_heads // info.n_kv_heads, 0)
            seen[:, S:, :S] &= ~gone[:, None]
            score = (q_BHTD @ k.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
            return score.softmax(-1) @ v, None

    for _ in range(n):
        rows = TokenBatch(torch.arange(len(tokens))[None], torch.tensor([tokens]))
        logits = model.forward(rows, Hides(), outputs=OutputRequest("last")).logits_BTV
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[S:]


@pytest.mark.corners
@pytest.mark.parametrize("evictor", ["snapkv", "ragged"])
@pytest.mark.parametrize("name", TARGETS)
def test_text_is_that_of_a_model_that_cannot_see_evicted_rows(name, evictor):
    model, prompts = target(name), prompts_of(50, 30)
    found = {}

    class Spy:
        """Notes what is kept."""

        def __init__(self, inner):
            self.inner, self.name = inner, "spy"
            self.extra_tokens, self.hook = inner.extra_tokens, inner.hook

        def select(self, run: PromptRun) -> Keep:
            found["keep"] = self.inner.select(run)
            return found["keep"]

    out = Engine(model, Parts(evictor=Spy(EVICTORS[evictor]()))).generate(
        prompts, max_new_tokens=10, ignore_eos=True
    )
    expected = [masked_continuation(model, p, found["keep"], b, 10) for b, p in enumerate(prompts)]
    assert out.tokens == expected
    assert out.tokens != Engine(model).generate(prompts, max_new_tokens=10, ignore_eos=True).tokens
    assert out.stats.kept_entries == found["keep"].n_LBG.double().mean((0, 2)).tolist()


@pytest.mark.corners
@pytest.mark.parametrize("evictor", EVICTORS)
@pytest.mark.parametrize("name", TARGETS)
def test_speculation_on_an_evicted_cache_changes_nothing(name, evictor):
    """In fp32, as it runs; with these seeds no two best logits are near enough for rounding to choose."""
    model, prompts = target(name, torch.float32), prompts_of(60, 33, 47)
    plain = Engine(model, Parts(evictor=EVICTORS[evictor]())).generate(prompts, **NEW)
    recall = Recall(plain.tokens)
    for draft, shape in ((noisy_longspec(model), TREE), (recall, CHAIN), (recall, TREE)):
        parts = Parts(evictor=EVICTORS[evictor](), draft=draft)
        out = Engine(model, parts).generate(prompts, shape=shape, **NEW)
        assert out.tokens == plain.tokens
        if isinstance(draft, Recall):  # which counts from the length of the text, not of what is stored
            assert out.stats.tau > 1.5
        again = Engine(model, parts).generate(prompts, shape=PLAIN, **NEW)
        assert again.tokens == plain.tokens


@pytest.mark.corners
@pytest.mark.parametrize("evictor", EVICTORS)
@pytest.mark.parametrize("name", TARGETS)
def test_a_prompt_gets_the_same_text_in_any_batch(name, evictor):
    """Some prompts fit their budget and some do not."""
    model, prompts = target(name), prompts_of(60, 9, 21, 3, 16)
    settings = {**NEW, "sampling": Sampling(temperature=0.7, seed=3)}
    engine = Engine(model, Parts(evictor=EVICTORS[evictor]()))
    whole = engine.generate(prompts, sequence_ids=range(5), **settings)
    for row, prompt in enumerate(prompts):
        alone = engine.generate([prompt], sequence_ids=[row], **settings)
        assert alone.tokens == [whole.tokens[row]]
        assert alone.stats.kept_entries == [whole.stats.kept_entries[row]]


def logits_after(read, model: Target, tokens: list[int]) -> Tensor:
    pos_BT = read.n_B[:, None] + torch.arange(len(tokens))
    rows = TokenBatch(pos_BT, torch.tensor([tokens] * len(read.n_B)))
    return model.forward(rows, read.cache, outputs=OutputRequest("all")).logits_BTV


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_budget_of_the_whole_prompt_is_no_eviction(dtype):
    model, prompts = target(dtype=dtype), prompts_of(40, 17)
    room = {"max_new_tokens": 8, "nodes": 4}
    plain = prefill(model, model.new_cache, prompts, **room)
    for budget in (Budget(40), Budget(999), Budget(ratio=1.0)):
        read = prefill(model, model.new_cache, prompts, **room, evictor=SnapKV(budget, window=8))
        assert not isinstance(read.cache, EvictedCache)
        assert torch.equal(read.step.logits_BTV, plain.step.logits_BTV)
        assert torch.equal(logits_after(read, model, [3, 1, 4]), logits_after(plain, model, [3, 1, 4]))
    evicted = prefill(model, model.new_cache, prompts, **room, evictor=SnapKV(Budget(20), window=8))
    assert isinstance(evicted.cache, EvictedCache)
    assert torch.equal(evicted.step.logits_BTV, plain.step.logits_BTV)  # the first token sees everything


def test_bytes_and_rows_are_counted():
    model = target(dtype=torch.float32)
    out = Engine(model, Parts(evictor=snapkv(16))).generate(prompts_of(200), max_new_tokens=4)
    stats, info = out.stats, model.info
    row = 2 * 4 * info.n_layers * info.n_kv_heads * info.head_dim
    assert stats.kept_entries == [16.0] and stats.evicted and stats.prompt_tokens == [200]
    assert stats.cache_bytes_full == row * (200 + 4 + 1) + 8
    assert stats.cache_bytes == row * (16 + 4 + 1) + 3 * 8
    both = stats + Engine(model).generate(prompts_of(10), max_new_tokens=4).stats
    assert both.kept_entries == [16.0, 10.0] and both.cache_bytes_full == stats.cache_bytes_full
    assert not Engine(model).generate(prompts_of(10), max_new_tokens=4).stats.evicted


def test_rows_that_only_the_evictor_needs_are_not_bytes_before():
    model, prompts = target(dtype=torch.float32), prompts_of(60, 25)
    plain = Engine(model).generate(prompts, max_new_tokens=4).stats.cache_bytes
    for n_tokens in (2, 40):
        laq = policies.get("laq", budget=Budget(16), window=8, n_tokens=n_tokens)
        stats = Engine(model, Parts(evictor=laq)).generate(prompts, max_new_tokens=4).stats
        assert stats.cache_bytes_full == plain > stats.cache_bytes


@pytest.mark.corners
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("evictor", [None, "snapkv", "ragged"])
def test_rows_after_eviction(evictor, draft):
    """Out of the evictor's sight, at the positions that follow the prompt."""
    model, contexts, after = target(), prompts_of(50, 31), prompts_of(7, 3)
    make = EVICTORS[evictor] if evictor else (lambda: None)
    parts = Parts(evictor=make(), draft=noisy_longspec(model) if draft else None)
    out = Engine(model, parts).generate(contexts, after=after, **NEW)
    if evictor is None:
        joined = [c + a for c, a in zip(contexts, after, strict=True)]
        assert out.tokens == Engine(model).generate(joined, **NEW).tokens
        return
    for row in range(2):  # by hand: evict, then feed the question and the answer token by token
        room = {"max_new_tokens": 60, "nodes": 1}
        read = prefill(model, model.new_cache, [contexts[row]], **room, evictor=make())
        tokens, n = [*after[row]], len(after[row])
        while len(tokens) < n + NEW["max_new_tokens"]:
            at = int(read.cache.len_B[0]) - len(contexts[row])
            rows = TokenBatch(read.cache.len_B[:, None], torch.tensor([[tokens[at]]]))
            logits = model.forward(rows, read.cache, outputs=OutputRequest("last")).logits_BTV
            read.cache.commit(None, torch.ones(1, dtype=torch.int64))
            if at == len(tokens) - 1:
                tokens.append(int(logits[0, 0].argmax()))
        assert out.tokens[row] == tokens[n:]


def test_rows_after_eviction_that_cannot_be():
    engine = Engine(target(), Parts(evictor=snapkv(16)))
    for after, error, words in (
        ([[1]], ConfigError, "1 token lists after 2 prompts"),
        ([[1], []], DataError, r"after\[1\] is empty"),
        ([[1], [97]], DataError, "token id 97"),
    ):
        with pytest.raises(error, match=words):
            engine.generate(prompts_of(20, 20), max_new_tokens=2, after=after)


def test_every_turn_of_a_conversation_is_read_whole():
    """A turn after turns on evicted caches is what a fresh engine makes of the same conversation."""
    model = target()
    engine, text = Engine(model, Parts(evictor=snapkv(16))), prompts_of(30)[0]
    for question in prompts_of(11, 9, 14):
        text = text + question
        answer = engine.generate([text], **NEW)
        assert answer.stats.kept_entries == [16.0] and answer.stats.prompt_tokens == [len(text)]
        fresh = Engine(model, Parts(evictor=snapkv(16))).generate([text], **NEW)
        assert answer.tokens == fresh.tokens
        text = text + answer.tokens[0]


def test_parts_are_merged_one_a_role():
    draft, evictor = noisy_longspec(target()), snapkv(16)
    both = Parts(draft=draft, name="a").merge(Parts(evictor=evictor, name="b"), Parts())
    assert (both.draft, both.evictor, both.cache, both.name) == (draft, evictor, None, "a+b")
    with pytest.raises(ConflictError, match="'a' and 'c' both bring the engine's draft; leave one out"):
        Parts(draft=draft, name="a").merge(Parts(draft=draft, name="c"))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("snap", {}, "unknown eviction policy 'snap'; known: streaming_llm, snapkv"),
        ("snapkv", {"sinks": 3}, "'snapkv' has no option 'sinks'; known: window, kernel"),
        ("snapkv", {"window": 0}, "evict.window=0; allowed: 1 or more for snapkv"),
        ("snapkv", {"kernel": 2}, "evict.kernel=2; allowed: 1"),
        ("streaming_llm", {"sinks": -1}, "evict.sinks=-1"),
    ],
)
def test_policies_that_are_not_there(name, options, words):
    with pytest.raises(ConfigError, match=words):
        policies.get(name, budget=Budget(8), **options)


def test_a_budget_below_the_window_is_refused_before_a_token_is_made():
    engine = Engine(target(), Parts(evictor=snapkv(7)))
    with pytest.raises(ConfigError, match=r"budget of 7 entries is below the 8 .* set evict.budget_tokens=8"):
        engine.generate(prompts_of(20), max_new_tokens=2)
    assert engine.generate(prompts_of(7), max_new_tokens=2, ignore_eos=True).stats.kept_entries == [7.0]


WIDE = {
    **SHAPES["llama_micro"],
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32768,
}
"""4 KiB of bf16 a token: a cache of thousands is far larger than what an allocator rounds up."""


def held(device: str) -> int:
    """Bytes in use: of the allocator on a GPU, of the tensors that Python reaches on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    stores = [x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), Tensor)]
    return sum({x.data_ptr(): x.nbytes() for x in stores}.values())


@pytest.mark.parametrize(
    ("device", "length"), [pytest.param("cuda", 16000, marks=pytest.mark.gpu), ("cpu", 500)]
)
@pytest.mark.parametrize("evictor", EVICTORS)
def test_the_memory_of_evicted_rows_is_free_while_decoding(evictor, device, length):
    model = random_target(WIDE, seed=0, dtype=torch.bfloat16, device=device)
    gc.collect()
    start, seen = held(device), []

    def stream(row, tokens, drafted):
        seen.append(held(device) - start)

    prompt, some = prompts_of(length), {**NEW, "max_new_tokens": 6}
    full = Engine(model).generate(prompt, stream=stream, **some)
    whole = seen[-1]
    seen.clear()
    out = Engine(model, Parts(evictor=EVICTORS[evictor]())).generate(prompt, stream=stream, **some)
    assert len(out.tokens[0]) == len(full.tokens[0]) == some["max_new_tokens"]
    saved = out.stats.cache_bytes_full - out.stats.cache_bytes
    assert whole - seen[-1] > 0.9 * saved > 0.8 * out.stats.cache_bytes_full
