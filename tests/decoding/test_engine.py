"""The engine on a toy target: exact texts, exact laws, and where texts end."""

from __future__ import annotations

from functools import cache
from itertools import pairwise, product

import pytest
import torch
from scipy import stats

from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import ChildChoice, Parts, TokenTree, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ArtifactError, ConfigError, ConflictError, DataError
from longtrain.methods.policies.snapkv import SnapKV

from .toys import Letters, OracleDraft, ToyTarget

SHAPES = [TreeShape((1, 1, 1, 1)), TreeShape((3, 4, 2)), TreeShape((2,)), TreeShape((1, 4))]
PROMPTS = [[1, 2, 3], [5], [0, 4, 4, 4, 2, 9, 11, 3], [7, 7], [1, 2, 3, 4, 5]]


def engine(target: ToyTarget, **draft) -> Engine:
    return Engine(target, Parts(draft=OracleDraft(target, **draft)), limits=Limits(batch=100_000))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_target_whose_logits_are_not_finite_is_refused(value):
    target = ToyTarget(12)
    target.out_EV[:, 7] = value
    for made in (Engine(target), engine(target)):
        with pytest.raises(ArtifactError, match="target toy gives logits that are NaN or infinite after"):
            made.generate(PROMPTS, max_new_tokens=3)


@pytest.mark.corners
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("children", ChildChoice)
def test_greedy_text_is_the_plain_one(shape, children):
    target = ToyTarget(12)
    plain = Engine(target).generate(PROMPTS, max_new_tokens=150)
    assert [len(t) for t in plain.tokens] == [150] * 5 and plain.stats.tau == 1.0
    out = engine(target, noise=1.0).generate(
        PROMPTS, max_new_tokens=150, shape=TreeShape(shape.widths, children)
    )
    assert out.tokens == plain.tokens
    accepted = {tuple(c.accepted for c in row) for row in out.stats.rows}
    assert len(accepted) == 5  # acceptance differs from row to row
    assert 1.05 < out.stats.tau < shape.depth + 1
    assert out.stats.decode_tokens == 5 * 149 and out.stats.target_forwards < plain.stats.target_forwards


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sampled_text_of_a_deterministic_draft_is_the_plain_one(shape):
    target = ToyTarget(12)
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=3)
    plain = Engine(target).generate(PROMPTS, max_new_tokens=70, sampling=sampling)
    out = engine(target).generate(PROMPTS, max_new_tokens=70, sampling=sampling, shape=shape)
    assert out.tokens == plain.tokens and out.stats.tau > 1.05
    other = Engine(target).generate(PROMPTS, max_new_tokens=70, sampling=Sampling(0.8, 0.95, seed=4))
    assert all(a != b for a, b in zip(other.tokens, plain.tokens, strict=True))


def test_a_prompt_gets_the_same_text_in_any_batch():
    target = ToyTarget(12)
    settings = {"max_new_tokens": 40, "sampling": Sampling(temperature=1.0, seed=5)}
    settings["shape"] = TreeShape((2, 2), ChildChoice.IID)
    whole = engine(target).generate(PROMPTS, **settings, sequence_ids=[10, 11, 12, 13, 14])
    for row, prompt in enumerate(PROMPTS):
        alone = engine(target).generate([prompt], **settings, sequence_ids=[10 + row])
        assert alone.tokens == [whole.tokens[row]]
        assert [c.accepted for c in alone.stats.rows[0]] == [c.accepted for c in whole.stats.rows[row]]


def test_an_equal_draft_is_always_accepted():
    target = ToyTarget(12)
    for children in (ChildChoice.IID, ChildChoice.NO_REPLACE):
        out = engine(target, noise=0.0).generate(
            PROMPTS,
            max_new_tokens=50,
            sampling=Sampling(temperature=1.0),
            shape=TreeShape((1, 1, 1), children),
        )
        assert out.stats.acceptance_rate > 0.999 and out.stats.by_depth()[2][0] == out.stats.by_depth()[2][1]


@cache
def law_of_three(target: ToyTarget, sampling: Sampling) -> torch.Tensor:
    """Probabilities of all texts of three tokens."""
    return torch.tensor([target.children([1, 2], list(t), sampling) for t in product(range(8), repeat=3)])


def p_value(target: ToyTarget, drafter: Engine, shape: TreeShape, sampling: Sampling) -> float:
    """χ² of the first three tokens against the target's exact law, rare texts pooled."""
    n = 6_000
    out = drafter.generate([[1, 2]] * n, max_new_tokens=3, sampling=sampling, shape=shape)
    index = torch.tensor([(t[0] * 8 + t[1]) * 8 + t[2] for t in out.tokens])
    count = torch.bincount(index, minlength=512).double()
    children = law_of_three(target, sampling)
    assert count[children == 0].sum() == 0
    rare = children * n < 8
    observed = torch.cat((count[~rare], count[rare].sum()[None]))
    expected = torch.cat((children[~rare], children[rare].sum()[None])).double() * n
    kept = expected > 0
    return stats.chisquare(observed[kept], expected[kept] * n / expected[kept].sum()).pvalue


@pytest.mark.parametrize(
    ("temperature", "top_p"),
    [(0.5, 1.0), pytest.param(1.0, 1.0, marks=pytest.mark.slow), (1.6, 1.0), (1.0, 0.9)],
)
def test_sampled_texts_follow_the_targets_law(temperature, top_p):
    target = ToyTarget(8)
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=11)
    for shape in (TreeShape((1, 1)), TreeShape((2, 3))):
        for children in ChildChoice:
            p = p_value(target, engine(target), TreeShape(shape.widths, children), sampling)
            assert p > 1e-4, (shape, children)


def test_a_wrong_law_is_seen():
    """A beam that claims to be sampled, and draws without replacement that claim to be independent."""
    target, sampling = ToyTarget(8), Sampling(temperature=1.0, seed=11)
    liar = engine(target, children=ChildChoice.IID)
    assert p_value(target, liar, TreeShape((1, 1)), sampling) < 1e-6
    assert p_value(target, liar, TreeShape((3, 3), ChildChoice.NO_REPLACE), sampling) < 1e-6


def test_rows_end_on_their_own():
    target = ToyTarget(12, eos=(3,))
    free = Engine(target).generate(PROMPTS, max_new_tokens=60, ignore_eos=True)
    assert all(len(t) == 60 for t in free.tokens) and any(3 in t for t in free.tokens)
    cut = [t[: t.index(3) + 1] if 3 in t else t for t in free.tokens]
    assert len({len(t) for t in cut}) > 2
    for shape in (PLAIN, *SHAPES):
        out = engine(target).generate(PROMPTS, max_new_tokens=60, shape=shape)
        assert out.tokens == cut
        assert out.finish == ["stop_id" if t[-1] == 3 else "length" for t in cut]
        assert out.stats.output_tokens == [len(t) for t in cut]
        assert out.stats.decode_tokens == sum(len(t) - 1 for t in cut)
    other = engine(target).generate(PROMPTS, max_new_tokens=60, stop_ids=[5])
    assert other.tokens == [t[: t.index(5) + 1] if 5 in t else t for t in free.tokens]


@pytest.mark.parametrize("new", [1, 2, 3, 7])
def test_no_token_beyond_the_maximum(new):
    target = ToyTarget(12)
    plain = Engine(target).generate(PROMPTS, max_new_tokens=new)
    out = engine(target, noise=0.1).generate(PROMPTS, max_new_tokens=new)
    assert out.tokens == plain.tokens and [len(t) for t in out.tokens] == [new] * 5
    assert out.stats.output_tokens == [new] * 5


def test_a_stop_string_ends_the_text_before_it():
    target = ToyTarget(30)
    target.tokenizer = Letters()
    free = Engine(target).generate([[1, 2]], max_new_tokens=80)
    text = free.texts[0]
    assert text == Letters().decode(free.tokens[0])
    stop = text[30:33]
    first = text.index(stop)
    keep = next(n for n in range(81) if stop in Letters().decode(free.tokens[0][:n]))
    for shape in (PLAIN, *SHAPES):
        out = engine(target).generate([[1, 2]], max_new_tokens=80, shape=shape, stop=["§", stop])
        assert out.texts == [text[:first]] and out.tokens == [free.tokens[0][:keep]]
        assert out.finish == ["stop_string"]


def test_a_stop_string_may_end_inside_a_token():
    target = ToyTarget(30)
    target.tokenizer = Letters()
    free = Engine(target).generate([[1, 2]], max_new_tokens=80).tokens[0]
    at = next(i for i in range(5, 80) if free[i] >= 25)  # two letters, the first a z
    letters = Letters().decode(free[: at + 1])
    stop = letters[-4:-1]
    out = engine(target).generate([[1, 2]], max_new_tokens=80, stop=[stop])
    assert out.texts[0] == letters[: letters.index(stop)]
    assert stop in Letters().decode(out.tokens[0]) and stop not in Letters().decode(out.tokens[0][:-1])


def test_the_stream_is_the_output():
    target = ToyTarget(12, eos=(3,))
    seen, flags = [[] for _ in PROMPTS], [[] for _ in PROMPTS]

    def stream(row, tokens, drafted):
        assert tokens and len(tokens) == len(drafted)
        seen[row] += tokens
        flags[row] += drafted

    out = engine(target).generate(PROMPTS, max_new_tokens=50, stream=stream, stop_ids=[3])
    assert seen == out.tokens
    for row, cycles in enumerate(out.stats.rows):
        assert sum(flags[row]) == sum(min(c.accepted, c.emitted) for c in cycles)
        assert flags[row][0] is False


def test_the_first_token_can_be_the_last():
    target = ToyTarget(12)
    first = Engine(target).generate(PROMPTS[:1], max_new_tokens=1).tokens[0][0]
    out = engine(target).generate(PROMPTS[:1], max_new_tokens=20, stop_ids=[first])
    assert out.tokens == [[first]] and out.stats.rows == [[]] and out.stats.target_forwards == 1


def test_nothing_is_committed_in_a_row_that_is_over():
    class Watching(OracleDraft):
        def observe(self, tree, verdict, step):
            committed.append(verdict.n_B.tolist())

    target, committed = ToyTarget(12), []
    free = Engine(target).generate(PROMPTS, max_new_tokens=40).tokens
    stop_ids = [free[0][0]]  # ends row 0 at once and others later
    drafter = Engine(target, Parts(draft=Watching(target)))
    out = drafter.generate(PROMPTS, max_new_tokens=40, stop_ids=stop_ids)
    assert out.stats.rows[0] == [] and len({len(row) for row in out.stats.rows}) > 2
    for row, cycles in enumerate(out.stats.rows):
        own = [n[row] for n in committed]
        assert all(own[: len(cycles)]) and not any(own[len(cycles) :])


def test_counts_and_bytes():
    target = ToyTarget(12)
    out = engine(target).generate(PROMPTS, max_new_tokens=30)
    s = out.stats
    assert s.prompt_tokens == [3, 1, 8, 2, 5] and s.cache_bytes > 0 and s.draft_bytes > 0
    assert s.target_forwards == 1 + max(len(row) for row in s.rows)
    assert s.prefill_s > 0 and s.decode_s > 0 and s.tokens_per_s > 0
    assert all(c.drafted == 4 and c.nodes == 4 for row in s.rows for c in row)
    tree = engine(target).generate(PROMPTS, max_new_tokens=30, shape=TreeShape((3, 4, 2))).stats
    assert all(c.drafted == 3 and c.nodes == 9 for row in tree.rows for c in row)
    assert all(a.position + a.emitted == b.position for row in s.rows for a, b in pairwise(row))


@pytest.mark.parametrize(
    ("prompts", "settings", "error", "words"),
    [
        ([], {}, ConfigError, "0 prompts"),
        ([[1]] * 4, {}, ConfigError, "4 prompts; allowed: 1 to 3"),
        ([[1], []], {}, DataError, "prompt 1 is empty"),
        ([[1, 12]], {}, DataError, "token id 12; allowed: 0 to 11"),
        ([[-1, 2]], {}, DataError, "token id -1"),
        ([[1]], {"max_new_tokens": 0}, ConfigError, "max_new_tokens=0"),
        ([[1] * 60], {}, ConfigError, "0 of 60 tokens plus max_new_tokens=8 exceed limits.tokens of 64"),
        ([[1]], {"shape": TreeShape((4, 4, 4))}, ConfigError, "13 nodes and limits.nodes=9"),
        ([[1]], {"shape": TreeShape((2, 0))}, ConfigError, "widths of 1 or more"),
        ([[1]], {"stop": ["x"]}, ConfigError, "need a tokenizer"),
        ([[1]], {"stop": [""]}, ConfigError, "not empty"),
        ([[1]], {"stop": "end"}, ConfigError, "list of strings"),
        ([[1]], {"sequence_ids": [1, 2]}, ConfigError, "2 sequence_ids for 1 prompts"),
    ],
)
def test_what_cannot_be_done_is_refused(prompts, settings, error, words):
    target = ToyTarget(12)
    drafter = Engine(target, Parts(draft=OracleDraft(target)), limits=Limits(batch=3, tokens=64, nodes=9))
    with pytest.raises(error, match=words.replace("[", r"\[")):
        drafter.generate(prompts, **{"max_new_tokens": 8, **settings})


def test_more_than_the_targets_context_is_refused():
    with pytest.raises(ConfigError, match="the target's context of 4096"):
        Engine(ToyTarget(12)).generate([[1] * 4090], max_new_tokens=7)


def test_a_shape_needs_a_draft_and_a_draft_may_go_without_a_shape():
    target = ToyTarget(12)
    with pytest.raises(ConfigError, match="the engine has none"):
        Engine(target).generate([[1]], max_new_tokens=4, shape=TreeShape((1,)))
    assert engine(target).generate([[1]], max_new_tokens=9).stats.rows[0][0].drafted == 4
    assert engine(target).generate([[1]], max_new_tokens=9, shape=PLAIN).stats.rows[0][0].drafted == 0


def test_a_tree_of_another_shape_is_refused():
    class Short(OracleDraft):
        def propose(self, *args) -> TokenTree:
            tree = super().propose(*args)
            return TokenTree(tree.tokens_BN[:, :2], tree.parents_BN[:, :2], tree.depth_N[:2])

    target = ToyTarget(12)
    with pytest.raises(ConfigError, match=r"\[1, 2\]; asked for \[1, 5\]"):
        Engine(target, Parts(draft=Short(target))).generate([[1]], max_new_tokens=4)


def test_roles_and_limits_that_are_not_there():
    both = Parts(evictor=SnapKV(Budget(8)), cache=ToyTarget(12).new_cache, name="x")
    with pytest.raises(ConflictError, match="'x' bring a cache of their own and an evictor \\(snapkv\\)"):
        Engine(ToyTarget(12), both)
    with pytest.raises(ConfigError, match=r"limits.batch=0"):
        Limits(batch=0)
