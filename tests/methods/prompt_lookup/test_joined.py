"""Look-up joined to every kind of draft: the target's own text, and at least the draft's acceptance."""

from __future__ import annotations

import pytest
import torch

from longtrain.decoding.control import Control, ShapeChoice
from longtrain.decoding.engine import AUTO, PLAIN, Engine
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import ChildChoice, Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.decoding.tree import chain
from longtrain.errors import ConfigError
from longtrain.kernels.tree_attention import MAX_NODES
from longtrain.methods.prompt_lookup.joined import NODES, JoinedDraft, with_copy, with_lookup
from longtrain.methods.prompt_lookup.runtime import PromptLookupRuntime
from longtrain.targets.loading import random_target
from tests.decoding.tape import both, tapes  # noqa: F401 (a fixture)
from tests.helpers import HEADS_OF_64, ONE_LAYER, Recall, attached, chi_square

CHAIN, TREE, BEST = TreeShape((1,) * 4), TreeShape((2, 4, 4)), TreeShape((3, 4, 4), keep=6)
DRAFTS = {
    "longspec": {"window": 64},
    "eagle3": {},
    "dspark": {"block_size": 4},
    "magicdec": {"least_tokens": 16, "window": 6, "recent_tokens": 10},
    "quantspec": {},
}
SAMPLED = Sampling(0.9, top_p=0.95, seed=3)
CASES = [*((name, CHAIN) for name in DRAFTS), ("longspec", TREE), ("eagle3", BEST)]
CASES += [("dspark", BEST)]
"""Drafts and shapes; the last two drafts propose chains alone."""


@pytest.fixture(scope="module")
def target():
    """In fp64, so that no tie is decided by the number of tokens of a step."""
    return random_target(HEADS_OF_64, seed=1, dtype=torch.float64)


@pytest.fixture(scope="module")
def prompts():
    gen = torch.Generator().manual_seed(2)
    return [torch.randint(97, (n,), generator=gen).tolist() * 3 for n in (1, 7, 40)]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_greedy_text_is_plain_decodings(target, prompts, name, shape):
    """Three sequences and one, and texts that end in the first cycle and in a later one."""
    parts = attached(name, target, **DRAFTS[name])
    options = {"ignore_eos": True}
    plain, drafted = (
        Engine(target, parts).generate(prompts, max_new_tokens=32, shape=one, **options)
        for one in (PLAIN, shape)
    )
    engine = Engine(target, with_lookup(parts, "auto"))
    for batch in (3, 1):
        out = engine.generate(prompts[:batch], max_new_tokens=32, shape=shape, **options)
        assert out.tokens == plain.tokens[:batch]
        assert sum(cycle.copied for row in out.stats.rows for cycle in row) > 0
        alone = [len(row) for row in drafted.stats.rows[:batch]]  # cycles without look-up
        assert sum(map(len, out.stats.rows)) < sum(alone) and 0 < out.stats.copied_share <= 1
    for most in (2, 7):
        few = engine.generate(prompts, max_new_tokens=most, shape=shape, **options)
        assert few.tokens == [row[:most] for row in plain.tokens]


@pytest.mark.parametrize("name", DRAFTS)
def test_what_follows_a_prompt_and_shapes_that_change(target, prompts, name):
    parts = attached(name, target, **DRAFTS[name])
    options = {"ignore_eos": True, "after": [[5, 6, 7] * 4, [8], [9, 9]], "max_new_tokens": 16}
    plain = Engine(target, parts).generate(prompts, shape=PLAIN, **options)
    engine = Engine(target, with_lookup(parts, "auto"))
    for shape in (CHAIN, AUTO, AUTO):
        assert engine.generate(prompts, shape=shape, **options).tokens == plain.tokens


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("longspec", Sampling()),
        ("eagle3", SAMPLED),
        ("dspark", SAMPLED),
        ("magicdec", Sampling()),
        *(
            pytest.param(name, sampling, marks=pytest.mark.slow)
            for name, sampling in (
                ("longspec", SAMPLED), ("eagle3", Sampling()), ("dspark", Sampling()), ("magicdec", SAMPLED),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "greedy" if value.greedy else "sampled",
)  # fmt: skip
def test_a_cycle_is_one_graph(target, prompts, name, sampling, tapes):  # noqa: F811
    """QuantSpec asks the host on a CPU, so it is none of these."""
    parts = with_lookup(attached(name, target, **DRAFTS[name]), "auto")
    shape = TreeShape((1,) * 4, ChildChoice.POINT if sampling.greedy else ChildChoice.IID)
    both(target, parts, prompts, shape=shape, sampling=sampling, max_new_tokens=16, ignore_eos=True)
    assert len(tapes) == 1


@pytest.mark.parametrize(
    ("name", "shape", "sampling"),
    [
        ("longspec", TREE, SAMPLED),
        ("longspec", BEST, Sampling()),
        pytest.param("eagle3", TREE, Sampling(), marks=pytest.mark.slow),
        ("eagle3", BEST, SAMPLED),
    ],
    ids=str,
)
def test_a_cycle_that_chooses_nodes_is_one_graph(target, prompts, name, shape, sampling, tapes):  # noqa: F811
    """The target's own tokens are drawn at each position, so a sampled text too is plain decoding's."""
    parts = with_lookup(attached(name, target, **DRAFTS[name]), "auto")
    options = {"sampling": sampling, "max_new_tokens": 14, "ignore_eos": True}
    drafted = both(target, parts, prompts, shape=shape, **options)
    assert len(tapes) == 1
    assert drafted.tokens == Engine(target, parts).generate(prompts, shape=PLAIN, **options).tokens
    assert (
        drafted.stats.copied_share > 0 or not sampling.greedy
    )  # sampled text of random weights repeats little


def test_sampled_text_follows_the_targets_law():
    wide = random_target(ONE_LAYER, seed=3)
    parts = with_lookup(attached("longspec", wide, window=64), "auto")
    engine = Engine(wide, parts, limits=Limits(batch=200))
    sampling = Sampling(temperature=1.5, top_k=3, seed=1)
    shape = TreeShape((1, 1), ChildChoice.IID)
    chi2, stats = chi_square(engine, [5, 6, 7, 8, 9, 10] * 3, shape, sampling, tokens=5, runs=200)
    assert chi2 < 51.2 and stats.copied_share > 0.1  # 99.9% at 24 degrees of freedom


def test_a_copy_hangs_below_the_last_node_that_it_shares_with_a_chain():
    own, copy_BK = chain(torch.tensor([[9, 1, 2, 3]])), torch.tensor([[1, 2, 7, 8, 6]])
    joint = with_copy(own, copy_BK, TreeShape((1,) * 3, copied=2))
    assert joint.tokens_BN.tolist() == [[9, 1, 2, 3, 7, 8]]
    assert joint.parents_BN.tolist() == [[-1, 0, 1, 2, 2, 4]]
    assert joint.depth_N.tolist() == [[0, 1, 2, 3, 3, 4]]


def test_sizes_of_joined_trees(target):
    joint = with_lookup(attached("longspec", target, window=64), "auto").draft
    assert isinstance(joint, JoinedDraft)
    assert joint.completed(CHAIN).n_nodes == joint.completed(TREE).n_nodes == NODES
    assert joint.completed(TreeShape((1,) * 14)).copied == 8 and joint.completed(PLAIN) == PLAIN
    small = with_lookup(attached("longspec", target, window=9), "auto").draft
    assert small.completed(CHAIN).depth == 8 and small.copies_alone == (4, 8)  # as its ring has room for
    full = TreeShape((1,) * 8)
    assert small.completed(full) == full  # no room for a copy
    tiny = with_lookup(attached("longspec", target, window=1), "auto").draft
    assert tiny.copies_alone == ()
    assert joint.completed(TreeShape((60, 60))).n_nodes == MAX_NODES  # where a draft leaves 7 nodes
    assert joint.completed(TreeShape((60, 67))).copied == 0


def test_a_block_bounds_what_is_drafted_and_not_what_is_copied(target):
    joint = with_lookup(attached("dspark", target, block_size=4), "auto").draft
    assert joint.completed(CHAIN).n_nodes == NODES and joint.copies_alone == (4, 15)
    with pytest.raises(ConfigError, match="allowed: up to 4 levels"):
        joint.check_shape(TreeShape((1,) * 5))


def test_a_draft_without_room_for_copies_decodes_plainly_drafted(target, prompts):
    parts = attached("longspec", target, window=5)
    options = {"max_new_tokens": 20, "ignore_eos": True}
    plain = Engine(target, parts).generate(prompts, shape=PLAIN, **options)
    out = Engine(target, with_lookup(parts, "auto")).generate(prompts, shape=CHAIN, **options)
    assert out.tokens == plain.tokens and out.stats.copied_share == 0


def test_modes(target, prompts):
    parts = attached("quantspec", target)
    assert with_lookup(parts, "off") is parts
    assert isinstance(with_lookup(parts, "only").draft, PromptLookupRuntime)
    alone = attached("prompt_lookup", target)
    assert with_lookup(alone, "auto") is alone
    cache = attached("quantspec", target, draft=False)
    assert with_lookup(cache, "auto").draft is None and with_lookup(cache, "only").draft is not None
    with pytest.raises(ConfigError, match="copied nodes, and the draft copies nothing; join it"):
        Engine(target, parts).generate(prompts, max_new_tokens=4, shape=TreeShape((1,), copied=2))


def test_a_draft_that_cannot_gain_is_left_out_with_one_line(target, prompts, caplog):
    """QuantSpec with the target's weights has nothing to gain before a block of the cache is quantised."""
    parts = attached("quantspec", target, weight_bits=16)
    options = {"max_new_tokens": 40, "ignore_eos": True, "shape": AUTO}
    alone, joint = Engine(target, parts), Engine(target, with_lookup(parts, "auto"))
    for engine in (alone, joint, alone):
        out = engine.generate(prompts, **options)
        assert all(set(widths) <= {0} for widths in out.stats.shapes)
    says = "quantspec: 0 of 160 tokens are in fewer bits, so a draft's step reads 100% of what the target's"
    lines = [record.getMessage() for record in caplog.records]
    assert sum(says in line and line.endswith("the draft is left out") for line in lines) == 2
    assert parts.draft.cannot_gain(1, 1 << 17) == ""  # mostly in 4 bits of 8
    assert attached("quantspec", target).draft.cannot_gain(1, 100) == ""  # 4-bit weights
    caplog.clear()
    fixed = Engine(target, attached("quantspec", target, weight_bits=16))
    out = fixed.generate(
        prompts, **{**options, "shape": CHAIN}
    )  # what was asked for is drafted, and measured
    assert set(out.stats.shapes) == {(1,) * 4}
    assert [line.endswith("; decode=auto leaves the draft out") for line in caplog.messages] == [True]


def test_on_a_quantised_cache_that_quantises_while_it_decodes(target):
    """Blocks become due in the middle of an accepted path, which the cache's limit then cuts."""
    gen = torch.Generator().manual_seed(3)
    prompts = [torch.randint(97, (n,), generator=gen).tolist() * 8 for n in range(28, 32)]
    parts = attached("quantspec", target)
    options = {"max_new_tokens": 40, "ignore_eos": True}
    plain = Engine(target, parts).generate(prompts, shape=PLAIN, **options)
    out = Engine(target, with_lookup(parts, "auto")).generate(prompts, shape=CHAIN, **options)
    assert out.tokens == plain.tokens and out.stats.copied_share > 0
    assert any(cycle.put_off for row in out.stats.rows for cycle in row)


def test_what_auto_chooses_among(target):
    """The cheapest first: plain decoding, look-up alone, the draft's chains, and all of its shapes joined."""
    joint = with_lookup(attached("longspec", target, window=64), "auto").draft
    shapes = ShapeChoice(((1,), (1, 1), (2, 4))).shapes(joint, sampled=False)
    assert [(shape.widths, shape.copied) for shape in shapes] == [
        ((), 0), ((), 4), ((), 15), ((1,), 0), ((1, 1), 0), ((1,), 14), ((1, 1), 13), ((2, 4), 9),
    ]  # fmt: skip
    sampled = ShapeChoice(((1, 1),)).shapes(joint, sampled=True)
    assert [shape.children for shape in sampled if shape.widths] == [ChildChoice.IID] * 2


@pytest.mark.parametrize("name", DRAFTS)
def test_every_shape_that_auto_may_choose(target, prompts, name, monkeypatch):
    """In turns, so that each finds the state that all the others left."""
    parts = with_lookup(attached(name, target, **DRAFTS[name]), "auto")
    seen = []

    def in_turns(self, *, length: int, left: int) -> TreeShape:
        seen.append(self.shapes[len(seen) % len(self.shapes)])
        self.paused = False
        return seen[-1]

    monkeypatch.setattr(Control, "choose", in_turns)
    monkeypatch.setattr(Control, "learn", lambda *of, **about: None)
    options = {"max_new_tokens": 32, "ignore_eos": True}
    plain = Engine(target, parts).generate(prompts, shape=PLAIN, **options)
    out = Engine(target, parts).generate(prompts, shape=AUTO, **options)
    assert out.tokens == plain.tokens and len(set(seen)) > 6


def test_nothing_is_copied_where_the_drafts_window_has_no_room_for_it(target, prompts):
    """A cycle may accept as many tokens as a draft can store at once, whoever proposed them."""
    joined = with_lookup(attached("eagle3", target, window=8), "auto")
    draft, whole = joined.draft, TreeShape((1,) * 7)
    assert draft.completed(whole) == whole and draft.completed(CHAIN).copied == 3
    options = {"max_new_tokens": 30, "ignore_eos": True}
    plain = Engine(target).generate(prompts, **options).tokens
    assert Engine(target, joined).generate(prompts, shape=whole, **options).tokens == plain


@pytest.mark.parametrize("capture", [False, True], ids=["uncaptured", "captured"])
def test_look_up_alone_goes_on_where_its_draft_is_given_up(capture, tapes, monkeypatch):  # noqa: F811
    """A draft that cannot be restarted is left out after some cycles, and look-up returns without it."""
    target = random_target(HEADS_OF_64, seed=1, dtype=torch.float64)
    how = {"max_new_tokens": 60, "ignore_eos": True}
    prompt = [[3, 4, 5, 6] * 4]
    (text,) = Engine(target, capture=False).generate(prompt, **how).tokens
    draft = JoinedDraft(Recall([text]), PromptLookupRuntime(8))
    heard, starts = [], []
    observe, start = draft.draft.observe, draft.alone.start
    monkeypatch.setattr(draft.draft, "observe", lambda *of: (heard.append(1), observe(*of)))

    def begin(tokens_BS, n_B, step, cache):
        starts.append(tokens_BS[0, : int(n_B[0])].tolist())
        start(tokens_BS, n_B, step, cache)

    monkeypatch.setattr(draft.alone, "start", begin)
    cycles = []

    def choose(control, *, length, left):
        """Copy, draft, pause, and copy by cycles of their own."""
        cycles.append(len(heard))
        at = len(cycles)
        control.paused = 4 <= at < 8
        if at == 4:
            assert control.leave_out()
        copied = 4 if at == 1 or at >= 8 else 0
        return next(one for one in control.shapes if one.copied == copied and not one.widths)

    monkeypatch.setattr(Control, "choose", choose)
    monkeypatch.setattr(Control, "learn", lambda *of, **about: None)
    made = Engine(target, Parts(draft=draft), capture=capture).generate(prompt, shape=AUTO, **how)
    assert made.tokens == [text]
    assert len(starts) == 2 and starts[0] == prompt[0]
    assert starts[1] == [*prompt[0], *text][: len(starts[1])] and len(starts[1]) >= len(prompt[0]) + 7
    assert cycles[-1] == cycles[4], "the draft hears no more"
    assert made.stats.shapes[(0,) * 4] > 0 and made.stats.draft_bytes == draft.bytes()
