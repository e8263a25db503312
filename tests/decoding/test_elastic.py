"""Text from rows in host memory is the text from rows on the device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from longtrain import methods
from longtrain.cache.named import cache_maker
from longtrain.decoding import captured
from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError, ConflictError
from longtrain.targets.loading import random_target
from longtrain.targets.model import Target

from .micro import target as micro
from .test_selector import BUDGET, NEW, PROMPTS, generate, made
from .toys import OracleDraft


def maker(target, **options):
    return cache_maker("elastic", options, **shape_of(target))


def shape_of(target):
    info = target.info
    names = ("n_layers", "n_heads", "n_kv_heads", "head_dim")
    return {name: getattr(info, name) for name in names} | {"device": target.device, "dtype": target.dtype}


@pytest.mark.parametrize(
    "options",
    [{}, {"prefetch": False}, {"difference": False}, {"memory_gib": 0.00018, "page_entries": 16}],
    ids=["elastic", "sync", "reload", "cap"],
)
def test_the_text_is_that_without_offloading(options):
    """Plain, in chains and trees over the edges of sets; prompts that are longer and shorter than a set."""
    target = micro(dtype=torch.float32)
    plain = generate(Parts(selector=made("state", target=target)), target=target).tokens
    assert plain != generate(None, target=target).tokens
    run = partial(generate, target=target)
    cache, rule = maker(target, **options), partial(made, "state", target=target)
    assert run(Parts(selector=rule(), cache=cache)).tokens == plain
    for shape in (TreeShape((3, 4, 2)), TreeShape((1,) * 7)):
        parts = Parts(draft=OracleDraft(target, noise=0.5), selector=rule(), cache=cache)
        drafted = run(parts, shape=shape)
        assert drafted.tokens == plain and drafted.stats.target_forwards < NEW


@pytest.mark.parametrize("shape", [(), (1, 1, 1)], ids=["plain", "chain"])
def test_the_text_of_captured_cycles(shape):
    """With a retrieval head, whose state is in place: the code of CUDA graphs, without them on a CPU."""
    target = micro(dtype=torch.float32)
    spec = methods.get("specontext")
    config = spec.config(layers=[0])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = spec.build(config, target.info)
    keys = {"budget_tokens": 14, "sinks": 2, "window": 4, "every": 5}
    parts = spec.attach(head, target, config, keys)
    plain = generate(parts, target=target).tokens
    for options in ({}, {"memory_gib": 1.0}, {"memory_gib": 0.00018, "page_entries": 16}):
        cache = cache_maker("elastic", options, **shape_of(target))
        whole = replace(parts, cache=cache, draft=OracleDraft(target, noise=0.5) if shape else None)
        assert generate(whole, target=target, shape=TreeShape(shape)).tokens == plain
        if not shape:
            run = Engine(target, whole, capture=True).generate
            assert run(PROMPTS, max_new_tokens=NEW, ignore_eos=True).tokens == plain


def test_layers_leave_the_device_between_recorded_cycles(monkeypatch):
    """With replays that leave the host as it was, as those of CUDA graphs do."""
    target = micro(dtype=torch.float32)
    spec = methods.get("specontext")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = spec.build(spec.config(layers=[0]), target.info)
    parts = spec.attach(head, target, spec.config(layers=[0]), {"budget_tokens": 14, "sinks": 2, "window": 4})
    plain = generate(parts, target=target).tokens
    made, make = [], maker(target, memory_gib=0.00018, page_entries=16)

    class Recorded:
        def __init__(self, work, device, pool):
            self.work, self.pool = work, lambda: None
            work.cache._high += 1  # as commit does while it is recorded

        def replay(self):
            known = self.work.cache._high
            assert known > int(self.work.cache.len_B.max())
            self.work()
            self.work.cache._high = known

    monkeypatch.setattr(captured, "has_graphs", lambda device: True)
    monkeypatch.setattr(captured, "record", Recorded)
    kept = replace(parts, cache=lambda *sizes: made.append(make(*sizes)) or made[-1])
    run = Engine(target, kept, capture=True).generate
    assert run(PROMPTS, max_new_tokens=NEW, ignore_eos=True).tokens == plain
    (cache,) = made
    assert cache.offloaded and cache._high == int(cache.len_B.max())


@pytest.mark.gpu
def test_the_text_on_a_gpu():
    """From pinned memory: prefetched, before the step, in one graph a step, and with some layers resident."""
    target = random_target("llama_micro", seed=0, dtype=torch.float32, device="cuda")
    spec = methods.get("specontext")
    config = spec.config(layers=[0])
    keys = {"budget_tokens": 14, "sinks": 2, "window": 4, "every": 5}
    parts = spec.attach(spec.build(config, target.info).cuda(), target, config, keys)

    def text(capture, **options):
        whole = replace(parts, cache=maker(target, **options)) if options else parts
        run = Engine(target, whole, capture=capture).generate
        return run(PROMPTS, max_new_tokens=NEW, ignore_eos=True).tokens

    plain = text(False)
    for capture in (False, True):
        for prefetch in (False, True):
            assert text(capture, prefetch=prefetch) == plain
        assert text(capture, memory_gib=0.00018, page_entries=16) == plain
    parts = spec.attach(
        spec.build(config, target.info).cuda(), target, config, keys | {"dense_layers": [0, 1]}
    )
    assert [text(capture, prefetch=True) for capture in (False, True)] == [text(False)] * 2


def test_rows_that_follow_a_prompt_are_read_whole():
    target, after = micro(), [[5, 6, 7], [8], [9, 10]]
    plain, elastic = (
        generate(Parts(selector=made("state"), cache=cache), after=after).tokens
        for cache in (None, maker(target))
    )
    assert plain == elastic


def test_what_does_not_go_together(monkeypatch):
    target = micro()
    with pytest.raises(ConfigError, match="for a selector, and there is none; add one"):
        Engine(target, Parts(cache=maker(target))).generate(PROMPTS, max_new_tokens=2)
    forwards = []
    monkeypatch.setattr(Target, "forward", lambda *_, **__: forwards.append(1))
    with pytest.raises(ConflictError, match="selected within each layer"):
        generate(Parts(selector=made("query"), cache=maker(target)))
    with pytest.raises(ConflictError, match="a DenseCache cannot read selected ones alone"):
        generate(Parts(selector=made("state"), cache=target.new_cache))
    with pytest.raises(ConfigError, match=r"memory_gib=1e-05 .*14 in each of 2 layers.*allowed: .* or more"):
        generate(Parts(selector=made("state", BUDGET), cache=maker(target, memory_gib=1e-5)))
    assert not forwards, "told after prompts were read"
