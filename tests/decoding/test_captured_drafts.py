"""Drafts that need no training, captured: the texts of cycles that are launched operator by operator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from longtrain.decoding.captured import ShapeCycles
from longtrain.decoding.engine import AUTO, PLAIN, Engine
from longtrain.decoding.roles import ChildChoice, Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from tests.helpers import HEADS_OF_64, Recall, attached

from .micro import prompts_of, snapkv
from .micro import target as micro
from .tape import both, tapes  # noqa: F401 (a fixture)

CHAIN = TreeShape((1, 1, 1, 1))
WARM = Sampling(temperature=0.9, top_p=0.95, seed=3)
PROMPTS = prompts_of(90, 7, 33)
SMALL = {"least_tokens": 16, "window": 6, "recent_tokens": 10}
DRAFTS = [
    ("magicdec", {"policy": "streaming_llm", **SMALL}),
    ("magicdec", {"policy": "snapkv", **SMALL}),
    ("prompt_lookup", {}),
]


@pytest.mark.corners
@pytest.mark.parametrize(("name", "keys"), DRAFTS)
@pytest.mark.parametrize(
    ("sampling", "children"),
    [(Sampling(), ChildChoice.POINT), (WARM, ChildChoice.POINT), (WARM, ChildChoice.IID)],
    ids=["greedy", "sampled", "sampled drafts"],
)
def test_a_cycle_can_be_replayed(name, keys, sampling, children, tapes):  # noqa: F811
    target = micro()
    shape = TreeShape((1,) * 4, children)
    parts = attached(name, target, **keys)
    options = {"max_new_tokens": 14, "sampling": sampling, "ignore_eos": True}
    drafted = both(target, parts, PROMPTS, shape=shape, **options)
    assert len(tapes) == 1
    if children is ChildChoice.POINT:
        assert drafted.tokens == Engine(target).generate(PROMPTS, **options).tokens


@pytest.mark.parametrize(("name", "keys"), DRAFTS)
def test_other_prompts_and_what_comes_after_them(name, keys, tapes):  # noqa: F811
    """The same graph serves prompts of other lengths; rows after an evicted prompt are seen too."""
    target = micro()
    parts = attached(name, target, **keys)
    static, plain = Engine(target, parts, capture=True), Engine(target, capture=False)
    for prompts in (PROMPTS, prompts_of(12, 60, 1), PROMPTS):
        options = {"max_new_tokens": 12, "ignore_eos": True, "after": prompts_of(30, 2, 5)}
        assert (
            static.generate(prompts, shape=CHAIN, **options).tokens
            == plain.generate(prompts, **options).tokens
        )
    assert len(tapes) == 1
    evicted = Parts(evictor=snapkv(12), name="snapkv")
    options = {"max_new_tokens": 12, "ignore_eos": True}
    even = prompts_of(40, 40)
    drafted = Engine(target, parts.merge(evicted), capture=True).generate(even, shape=CHAIN, **options)
    assert drafted.tokens == Engine(target, evicted, capture=False).generate(even, **options).tokens


@pytest.mark.parametrize(("name", "keys"), DRAFTS)
def test_shapes_that_change_from_cycle_to_cycle(name, keys):
    """What was accepted in cycles of other shapes, and in plain ones, is known to the draft as well."""
    target = micro()
    parts = attached(name, target, **keys)
    options = {"max_new_tokens": 40, "ignore_eos": True}
    drafted = Engine(target, parts).generate(PROMPTS, shape=AUTO, **options)
    assert drafted.tokens == Engine(target).generate(PROMPTS, **options).tokens
    assert len(drafted.stats.shapes) > 1 and () in drafted.stats.shapes


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "keys"), DRAFTS)
def test_cuda_graphs_give_the_same_texts(name, keys):
    """In fp32: kernels that sum in another order move logits by 1e-6, and texts of 48 tokens stay."""
    target = random_target("llama_micro", dtype=torch.float32, device="cuda")
    parts = attached(name, target, **keys)
    for prompts in (PROMPTS, prompts_of(300)):
        settings = {"max_new_tokens": 48, "shape": CHAIN, "ignore_eos": True}
        drafted = both(target, parts, prompts, **settings)
        assert drafted.tokens == Engine(target).generate(prompts, **{**settings, "shape": PLAIN}).tokens


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "keys"), DRAFTS)
def test_cuda_graphs_over_a_quantised_cache(name, keys):
    """Rows pass the draft on their way into the planes, in a graph as without one."""
    target = random_target(HEADS_OF_64, dtype=torch.float32, device="cuda").fuse()
    parts = attached(name, target, **keys, cache="hierarchical")
    both(target, parts, prompts_of(400, 250), max_new_tokens=40, shape=CHAIN, ignore_eos=True)


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="the linear layers of few rows need compute capability 9.0",
)
@pytest.mark.parametrize("heads", [(8, 4), (8, 2), (16, 2)], ids=str)
@pytest.mark.parametrize("family", ["llama_micro", "qwen3_micro"])
def test_an_accepted_row_has_plain_decodings_bits(family, heads):
    """Keys and values of whole texts in bf16, from chains and trees of up to 16 nodes."""
    shape = {**SHAPES[family], "hidden_size": 128, "intermediate_size": 192, "head_dim": 64}
    shape |= {
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": 8192,
    }
    target = random_target(shape, dtype=torch.bfloat16, device="cuda").fuse()
    options = {"max_new_tokens": 160, "ignore_eos": True}
    for prompt in prompts_of(200, 4000):
        plain = Engine(target, capture=True)
        text = plain.generate([prompt], **options).tokens
        draft = Recall(text, room=24, device="cuda")
        for widths in ((2, 4, 4), (3, 6, 6), (1,) * 7, (1,) * 15):
            engine = Engine(target, Parts(draft=draft, name="recall"), capture=True)
            assert engine.generate([prompt], shape=TreeShape(widths), **options).tokens == text
            for name in ("k_LBGSD", "v_LBGSD"):
                rows = [
                    getattr(one._kept.arena.store, name)[..., : len(prompt) + 159, :]
                    for one in (plain, engine)
                ]
                assert torch.equal(*rows)


@pytest.mark.parametrize(("device", "timed"), [("cpu", True), ("cuda", False)])
def test_the_first_cycle_of_a_shape_is_timed_unless_it_compiles(device, timed):
    class First:
        """The first cycle of a shape."""

        capture_s, late, sound = 0.0, 1, True
        decode_step = SimpleNamespace(news_BX=torch.zeros(1, 3))

        def prepare(self) -> bool:
            return False

        def run(self) -> None:
            pass

    _, stopwatch = ShapeCycles(lambda *_: First(), torch.device(device)).run(TreeShape(()), timed=True)
    assert (stopwatch is not None) == timed
