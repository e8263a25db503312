"""Text from rows in host memory is the text from rows on the device."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from longtrain.cache.elastic import ElasticCache, Offloading
from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError, ConflictError

from .micro import target as micro
from .test_selector import BUDGET, NEW, PROMPTS, generate, made
from .toys import OracleDraft


def maker(target, **options):
    info, made_of = target.info, Offloading(**options)
    shape = {"n_layers": info.n_layers, "n_kv_heads": info.n_kv_heads, "head_dim": info.head_dim}
    place = {"device": target.device, "dtype": target.dtype, "offloading": made_of}

    def make(batch, max_tokens, max_nodes):
        return ElasticCache(**shape, **place, batch=batch, max_tokens=max_tokens, max_nodes=max_nodes)

    return make


@pytest.mark.parametrize(
    "options",
    [{}, {"prefetch": False}, {"difference": False}, {"memory_gib": 0.00018, "page_rows": 16}],
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


def test_rows_that_follow_a_prompt_are_read_whole():
    target, after = micro(), [[5, 6, 7], [8], [9, 10]]
    plain, elastic = (
        generate(Parts(selector=made("state"), cache=cache), after=after).tokens
        for cache in (None, maker(target))
    )
    assert plain == elastic


def test_what_does_not_go_together():
    target = micro()
    with pytest.raises(ConfigError, match="nothing does; add what selects"):
        Engine(target, Parts(cache=maker(target))).generate(PROMPTS, max_new_tokens=2)
    with pytest.raises(ConflictError, match="chosen within each layer"):
        generate(Parts(selector=made("query"), cache=maker(target)))
    with pytest.raises(ConfigError, match=r"memory_gib=1e-05 .*14 of 2 layers.*allowed: .* or more"):
        generate(Parts(selector=made("state", BUDGET), cache=maker(target, memory_gib=1e-5)))
