"""The draft at work against blocks written out plainly; texts and distributions are the target's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plain_block import block_hidden, context_states, last_kv, slot_logits

from longtrain.artifact import Artifact
from longtrain.cache.ring import DraftRing
from longtrain.decoding.engine import AUTO, Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import ChildChoice, Parts, TokenTree, TreeShape, completed
from longtrain.decoding.sampling import HashRng, Sampling
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.kernels.tree_attention import MAX_NODES
from longtrain.methods.dspark.config import MOST_ROWS, Config
from longtrain.methods.dspark.runtime import DSparkRuntime
from longtrain.methods.dspark.spec import SPEC
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.methods.prompt_lookup.joined import with_lookup
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from tests.decoding.tape import both, tapes  # noqa: F401 (a fixture)
from tests.helpers import chi_square
from tests.methods.drafts import accept, path_to, prefilled, texts_of

WARM = Sampling(temperature=1.0)
SMALL = Config(layers=[0, 2], n_layers=2, block_size=5, markov_rank=6, intermediate_size=40)
CONFIGS = {
    "dspark": SMALL,
    "dflash": replace(SMALL, heads="none", sample_from_anchor=False),
    "fill-in with markov": replace(SMALL, heads="markov", sample_from_anchor=False, layers=[1]),
    "windows": replace(SMALL, windows=[7, None], n_layers=2),
    "the target's keys": replace(SMALL, windows=[7, None], target_kv=True),
    "a vocabulary of its own": replace(SMALL, draft_vocab_size=40, objective="lk_hybrid"),
    "dflash2": replace(SMALL, heads="selector", sample_from_anchor=False, conv_taps=2),
    "selector": replace(SMALL, heads="selector", selector_top=5),
    "convolutions": replace(SMALL, conv_taps=3, conv_group=8, windows=[7, None]),
    "its own shape, windows": replace(
        SMALL,
        n_layers=3,
        windows=[6, 9, 6],
        n_heads=2,
        n_kv_heads=1,
        head_dim=8,
        rope={"rope_type": "default", "rope_theta": 500.0},
    ),
}


@torch.no_grad()
def hidden_of(draft, target, config, text, root):
    """The head's input of every slot of the block that follows a text, from scratch."""
    pos = torch.arange(len(text))
    states, _ = context_states(draft, target, torch.tensor(text), pos)
    kv = last_kv(target, torch.tensor(text), pos)
    return block_hidden(draft, target, config, states, pos, len(text), root, kv)


@pytest.mark.corners
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("widths", [(1, 1, 1, 1, 1), (2, 4, 3)], ids=str)
@torch.no_grad()
def test_every_node_has_the_distribution_of_a_block_from_scratch(name, widths, llama, make_draft):
    """Prompts shorter and longer than windows; paths accepted in part; a row that is over for a cycle."""
    config = CONFIGS[name]
    draft = make_draft(llama, config)
    runtime = DSparkRuntime(draft, llama, config)
    texts = texts_of(29, 1, 5)
    ids, n_B, cache, step = prefilled(llama, texts, runtime.outputs)
    runtime.start(ids, n_B, step, cache)
    rng, roots = HashRng(1, torch.arange(3)), torch.tensor([5, 6, 7])
    inner = 1 + sum(widths[:-1])
    for cycle in range(4):
        tree = runtime.propose(roots, TreeShape(widths, ChildChoice.IID), WARM, rng)
        for row in range(3):
            hidden = hidden_of(draft, llama, config, texts[row], int(tree.tokens_BN[row, 0]))
            depths = torch.tensor([len(path_to(tree, row, node)) - 1 for node in range(inner)])
            logits = slot_logits(draft, llama, hidden[depths], tree.tokens_BN[row, :inner])
            torch.testing.assert_close(tree.q_BNV[row, :inner], logits.softmax(-1), rtol=1e-6, atol=1e-9)
        leaf = inner + cycle % widths[-1]
        paths = [path_to(tree, row, leaf)[: len(widths) + 1 - (row + cycle) % 3] for row in range(3)]
        if cycle == 2:
            paths[1] = []
        accept(llama, cache, runtime, tree, paths)
        for row, path in enumerate(paths):
            texts[row] += [int(tree.tokens_BN[row, i]) for i in path]
        roots = (roots * 7 + 1) % 97
        if cycle == 2:
            roots[1] = tree.tokens_BN[1, 0]


def holds_what_a_fresh_start_holds(runtime, texts):
    """Keys and values of every layer are those of a draft that starts with these texts."""
    fresh = DSparkRuntime(runtime.draft, runtime.target, runtime.config)
    ids, n_B, cache, step = prefilled(fresh.target, texts, fresh.outputs)
    fresh.start(ids, n_B, step, cache)
    for row, text in enumerate(texts):
        for mine, other in zip(runtime.stores, fresh.stores, strict=True):
            places = list(range(len(text)))
            if isinstance(mine, DraftRing):
                places = [p % mine.window for p in places[-mine.window :]]
            for one, two in ((mine.k_BGSD, other.k_BGSD), (mine.v_BGSD, other.v_BGSD)):
                torch.testing.assert_close(one[row][:, places], two[row][:, places], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["dspark", "its own shape, windows"])
@torch.no_grad()
def test_after_many_cycles_its_state_is_that_of_a_fresh_start(name, llama, make_draft):
    config = CONFIGS[name]
    runtime = DSparkRuntime(make_draft(llama, config), llama, config)
    texts = texts_of(4, 17)
    ids, n_B, cache, step = prefilled(llama, texts, runtime.outputs)
    runtime.start(ids, n_B, step, cache)
    rng, roots = HashRng(1, torch.arange(2)), torch.tensor([5, 6])
    for cycle in range(8):
        tree = runtime.propose(roots, TreeShape((2, 2)), Sampling(), rng)
        paths = [path_to(tree, row, 3)[: 1 + (row + cycle) % 3] for row in range(2)]
        accept(llama, cache, runtime, tree, paths)
        for row, path in enumerate(paths):
            texts[row] += [int(tree.tokens_BN[row, i]) for i in path]
        roots = (roots * 7 + 1) % 97
    holds_what_a_fresh_start_holds(runtime, texts)


@pytest.mark.parametrize("name", ["dspark", "its own shape, windows"])
def test_a_long_prompt_is_read_in_chunks(name, llama, make_draft, monkeypatch):
    config = CONFIGS[name]
    how = {"max_new_tokens": 12, "ignore_eos": True, "shape": TreeShape((3, 3))}
    engine = Engine(llama, SPEC.attach(make_draft(llama, config), llama, config, {}))
    rows = engine.generate(texts_of(50, 21), **how)
    monkeypatch.setattr("longtrain.methods.dspark.runtime.CHUNK", 8)
    other = Engine(llama, SPEC.attach(make_draft(llama, config), llama, config, {}))
    again = other.generate(texts_of(50, 21), **how)
    for mine, two in zip(engine.parts.draft.tensors(), other.parts.draft.tensors(), strict=True):
        torch.testing.assert_close(mine, two)
    assert again.stats.rows == rows.stats.rows


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, "llama_micro") for name in ("dspark", "dflash", "windows", "the target's keys")),
        *((name, "llama_micro") for name in ("dflash2", "selector", "convolutions")),
        ("a vocabulary of its own", "llama_micro"),
        pytest.param("dspark", "qwen3_micro", marks=pytest.mark.slow),
        ("the target's keys", "qwen3_micro"),
    ],
)
def test_greedy_output_is_the_targets_own(name, family, make_draft):
    """Chains (of two drafts, of every length) and trees with three sequences, and with one."""
    target = random_target({**SHAPES[family], "num_hidden_layers": 4}, seed=1, dtype=torch.float64)
    config = CONFIGS[name]
    parts = SPEC.attach(make_draft(target, config), target, config, {})
    engine, prompts = Engine(target, parts), texts_of(1, 5, 33, seed=2)
    plain = Engine(target).generate(prompts, max_new_tokens=8, ignore_eos=True).tokens
    least = 1 if family == "llama_micro" and name == "dspark" else config.block_size
    chains = [TreeShape((1,) * length) for length in range(least, config.block_size + 1)]
    tree, kept = TreeShape((4, 6, 6)), TreeShape((4, 4, 4), keep=9)
    for some, shapes in ((slice(0, 3), (*chains, tree, AUTO, kept)), (slice(2, 3), (chains[-1], tree))):
        for shape in shapes:
            got = engine.generate(prompts[some], max_new_tokens=8, ignore_eos=True, shape=shape).tokens
            assert got == plain[some]
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=3)  # a deterministic draft repeats the plain draws
    how = {"max_new_tokens": 8, "sampling": sampling, "ignore_eos": True}
    drawn = Engine(target).generate(prompts, **how).tokens
    assert engine.generate(prompts, shape=TreeShape((3, 4)), **how).tokens == drawn


@pytest.mark.parametrize(
    ("widths", "config"),
    [
        ((1, 1, 1), SMALL),
        ((2, 2), SMALL),
        ((1, 1, 1), replace(SMALL, draft_vocab_size=5, objective="lk_hybrid")),
        ((1, 1, 1), replace(SMALL, heads="selector", selector_top=3, conv_taps=2)),
        ((2, 2), replace(SMALL, heads="selector", selector_top=3, sample_from_anchor=False)),
    ],
)
def test_sampled_text_follows_the_targets_distribution(widths, config, make_draft):
    """Texts of four tokens over a vocabulary of seven, against the target's distribution by enumeration."""
    shape = {**SHAPES["llama_micro"], "num_hidden_layers": 4, "vocab_size": 7}
    target = random_target(shape, seed=3, dtype=torch.float64)
    parts = SPEC.attach(make_draft(target, config), target, config, {})
    engine = Engine(target, parts, limits=Limits(batch=250))
    tree, sampling = TreeShape(widths, ChildChoice.IID), Sampling(temperature=1.3, seed=1)
    chi2, _ = chi_square(engine, [token % 7 for token in texts_of(20)[0]], tree, sampling, tokens=4, runs=250)
    assert chi2 < 42.3  # 99.9% at 18 degrees of freedom


@pytest.mark.parametrize("sample_from_anchor", [True, False])
@torch.no_grad()
def test_the_markov_table_of_a_bigram_target_is_accepted_whole_and_one_off_by_a_token_is_not(
    sample_from_anchor, llama, make_draft
):
    """Layers that add nothing: the target's next token depends on the token before it alone."""
    for layer in llama.model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embed, size = llama.embed_weight, llama.info.vocab_size
    table = torch.nn.functional.rms_norm(embed, embed.shape[-1:], llama.final_norm_weight, 1e-6)
    config = replace(SMALL, markov_rank=embed.shape[1], sample_from_anchor=sample_from_anchor)
    draft = make_draft(llama, config)
    draft.norm.weight.zero_()  # nothing but the Markov head counts
    draft.markov_head.markov_w2.weight.copy_(llama.head_weight)
    shape, how = TreeShape((1,) * 5), {"max_new_tokens": 25, "ignore_eos": True}
    found = []
    for rows in (torch.arange(size), torch.arange(size).roll(1)):
        draft.markov_head.markov_w1.weight.copy_(table[rows])
        engine = Engine(llama, SPEC.attach(draft, llama, config, {}))
        drawn = engine.generate(
            texts_of(9, 20), shape=replace(shape, children=ChildChoice.IID), sampling=WARM, **how
        )
        found.append((engine.generate(texts_of(9, 20), shape=shape, **how).stats.tau, drawn.stats.tau))
    assert found[0] == (6, 6) and max(found[1]) < 3


@pytest.mark.parametrize(
    ("name", "shape", "sampling"),
    [
        pytest.param("dspark", TreeShape((1,) * 5), Sampling(), marks=pytest.mark.slow),
        ("dspark", TreeShape((1,) * 5, ChildChoice.IID), Sampling(temperature=0.9, top_p=0.95, seed=3)),
        ("dflash", TreeShape((3, 4, 2)), Sampling()),
        ("the target's keys", TreeShape((1,) * 5), Sampling()),
        ("its own shape, windows", TreeShape((2, 4), ChildChoice.IID), Sampling(temperature=0.9, seed=3)),
        ("a vocabulary of its own", TreeShape((3, 4, 2)), Sampling()),
        ("dflash2", TreeShape((3, 4, 2)), Sampling()),
        ("dflash2", TreeShape((1,) * 5, ChildChoice.IID), Sampling(temperature=0.9, seed=3)),
    ],
)
def test_a_cycle_can_be_replayed(name, shape, sampling, llama, make_draft, tapes):  # noqa: F811
    """A CUDA graph of one cycle is every cycle."""
    parts = SPEC.attach(make_draft(llama, CONFIGS[name]), llama, CONFIGS[name], {})
    options = {"max_new_tokens": 12, "sampling": sampling, "ignore_eos": True}
    drafted = both(llama, parts, texts_of(30, 1, 12), shape=shape, **options)
    assert len(tapes) == 1
    if shape.children is ChildChoice.POINT:
        assert drafted.tokens == Engine(llama).generate(texts_of(30, 1, 12), **options).tokens


@pytest.mark.parametrize("name", ["dspark", "windows", "the target's keys"])
def test_evicted_caches(name, llama, make_draft):
    parts = SPEC.attach(make_draft(llama, CONFIGS[name]), llama, CONFIGS[name], {})
    evicted = Parts(evictor=SnapKV(Budget(12), window=8, kernel=5), name="evictor")
    prompts = texts_of(40, 31)
    options = {"max_new_tokens": 20, "ignore_eos": True, "after": texts_of(3, 6, seed=4)}
    drafted = Engine(llama, parts.merge(evicted)).generate(prompts, shape=TreeShape((2, 3)), **options)
    assert drafted.tokens == Engine(llama, evicted).generate(prompts, **options).tokens


def test_an_artifact_is_what_was_exported_and_drafts_the_same(llama, make_draft, tmp_path):
    target = random_target({**SHAPES["qwen3_micro"], "num_hidden_layers": 4}, seed=2)
    config = replace(SMALL, windows=[8, None])
    draft = make_draft(target, config, torch.float32)
    made = Artifact.from_module("dspark", config, module=draft, target=target)
    back = Artifact.load(made.save(tmp_path / "made"))
    assert back.tensors.keys() == draft.state_dict().keys() >= {"mask_id", "markov_head.markov_w2.weight"}
    assert all(torch.equal(back.tensors[name], x) for name, x in draft.state_dict().items())
    how = {"max_new_tokens": 12, "ignore_eos": True, "shape": TreeShape((1,) * 5)}
    parts = SPEC.attach(draft, target, config, {})
    expected = Engine(target, parts).generate(texts_of(30, 4), **how)
    got = Engine(target, back.attach(target)).generate(texts_of(30, 4), **how)
    assert got.tokens == expected.tokens and got.stats.rows == expected.stats.rows


def test_its_memory_is_constant_with_windows_and_grows_without(llama, make_draft):
    held = {}
    for name in ("its own shape, windows", "the target's keys", "dspark"):
        engine = Engine(llama, SPEC.attach(make_draft(llama, CONFIGS[name]), llama, CONFIGS[name], {}))
        held[name] = [
            engine.generate(texts_of(n), max_new_tokens=8, ignore_eos=True).stats.draft_bytes
            for n in (4, 40, 700)
        ]
    windows = 2 * 8 * 8 * (6 + 9 + 6 + 3 * 5) + 3 * 2 * 8  # K and V of one head of 8, fp64; two lengths each
    assert set(held["its own shape, windows"]) == {windows}
    assert len(set(held["the target's keys"])) == 1
    assert held["dspark"][0] == held["dspark"][1] < held["dspark"][2]


def test_refusals(llama, make_draft):
    config = CONFIGS["its own shape, windows"]
    draft = make_draft(llama, config)
    runtime = DSparkRuntime(draft, llama, config)
    for shape, why in (
        (TreeShape((2,), ChildChoice.NO_REPLACE), "no_replace"),
        (TreeShape((1,) * 6), "depth 6 .* allowed: up to 5 levels"),
        (TreeShape((98,)), "98 nodes"),
    ):
        with pytest.raises(ConfigError, match=why):
            runtime.check_shape(shape)
    with pytest.raises(ConfigError, match="no inference key 'head_bits'; known: min_confidence"):
        SPEC.attach(draft, llama, config, {"head_bits": 4})
    other = random_target({**SHAPES["llama_micro"], "hidden_size": 64}, dtype=torch.float64)
    with pytest.raises(TargetMismatchError, match=r"\(48, 48, 8, 97\); target .* asks for \(64, 64, 8, 97\)"):
        SPEC.attach(draft, other, config, {})


def test_a_window_no_longer_than_the_block_allows_fewer_levels(llama, make_draft):
    """Neither `auto` nor golden outputs ask for more, and what is offered is the target's own text."""
    narrow = replace(SMALL, windows=[5, None])
    draft = make_draft(llama, narrow)
    shallow = DSparkRuntime(draft, llama, narrow)
    with pytest.raises(ConfigError, match="allowed: up to 4 levels"):
        shallow.check_shape(TreeShape((1,) * 5))
    assert max(map(len, shallow.offers)) == 4 and len(set(shallow.offers)) == len(shallow.offers)
    Artifact.from_module("dspark", narrow, module=draft, target=llama)
    prompts, options = texts_of(20, 3), {"max_new_tokens": 12, "ignore_eos": True}
    drafted = Engine(llama, SPEC.attach(draft, llama, narrow, {})).generate(prompts, shape=AUTO, **options)
    assert drafted.tokens == Engine(llama).generate(prompts, **options).tokens


@pytest.mark.parametrize(("windows", "copied", "alone"), [(None, 11, 15), ([9, None], 4, 8), ([5, 9], 0, 4)])
def test_look_up_copies_beyond_the_block_as_far_as_windows_go(windows, copied, alone, llama, make_draft):
    config = replace(SMALL, windows=windows)
    draft = make_draft(llama, config)
    parts, shape = with_lookup(SPEC.attach(draft, llama, config, {}), "auto"), TreeShape((1,) * 4)
    assert completed(shape, parts.draft).copied == copied and max(parts.draft.copies_alone) == alone
    prompts, options = [[5, 6, 7, 8, 9] * 8, [3, 4] * 10], {"max_new_tokens": 40, "ignore_eos": True}
    plain = Engine(llama).generate(prompts, **options).tokens
    engine = Engine(llama, parts)
    for one in (shape, AUTO):
        assert engine.generate(prompts, shape=one, **options).tokens == plain


@pytest.mark.parametrize(("windows", "depth"), [(None, 11), ([9, None], 8)])
@torch.no_grad()
def test_accepted_paths_may_be_deeper_than_the_block(windows, depth, llama, make_draft):
    """As look-up beside the draft makes them: stored as if the text had begun with them."""
    config = replace(SMALL, windows=windows)
    runtime = DSparkRuntime(make_draft(llama, config), llama, config)
    assert config.block_size < depth
    runtime.check_shape(TreeShape((1,), copied=depth - 1))
    texts = texts_of(4, 17)
    ids, n_B, cache, step = prefilled(llama, texts, runtime.outputs)
    runtime.start(ids, n_B, step, cache)
    node_N = torch.arange(depth + 1)
    drafted = torch.tensor(texts_of(depth + 1, depth + 1, seed=5))
    tree = TokenTree(drafted, (node_N - 1).expand(2, -1), node_N, ChildChoice.POINT)
    paths = [list(range(depth + 1)), list(range(depth - 1))]
    accept(llama, cache, runtime, tree, paths)
    for row, path in enumerate(paths):
        texts[row] += drafted[row, : len(path)].tolist()
    holds_what_a_fresh_start_holds(runtime, texts)


def test_the_largest_block_fits_the_kernel():
    assert MOST_ROWS == MAX_NODES
