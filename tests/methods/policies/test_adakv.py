"""Ada-KV: counts, floor and kept rows against sorting in Python, over several policies' scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from longtrain.decoding.evict import Budget
from longtrain.errors import ConfigError
from longtrain.methods import policies

from .naive import Eager, best, group_mean, micro, pooled
from .runs import kept, prefilled, prompts_of

TOKENS, WINDOW = 28, 8


def shared(rows, spare, floor):
    """Rows of each head: `rows` are the pooled scores of the heads that share a budget."""
    flat = sorted(((-s, head, at) for head, row in enumerate(rows) for at, s in enumerate(row)))
    won = [0] * len(rows)
    for _, head, _ in flat[: spare * len(rows)]:
        won[head] += 1
    return [round(count * (1 - floor) + math.floor(spare * floor)) for count in won]


def reference(s_LGS, n, *, window, kernel, floor, across="heads", normalise=False):
    """Kept rows of each layer and KV head, and how many each head won."""
    spare = TOKENS - window
    rows = [[pooled(row[: n - window], kernel) for row in heads] for heads in s_LGS.tolist()]
    weight = [[1.0] * len(heads) for heads in rows]
    if normalise:
        weight = [[sum(sorted(row)[-spare:]) / sum(row) for row in heads] for heads in rows]
    rivals = [
        [[w * s for s in row] for row, w in zip(heads, weights, strict=True)]
        for heads, weights in zip(rows, weight, strict=True)
    ]
    if across == "layers":
        flat = shared([row for heads in rivals for row in heads], spare, floor)
        counts = [flat[i : i + len(rows[0])] for i in range(0, len(flat), len(rows[0]))]
    else:
        counts = [shared(heads, spare, floor) for heads in rivals]
    tail = list(range(n - window, n))
    found = [
        [best(row, count) + tail for row, count in zip(heads, some, strict=True)]
        for heads, some in zip(rows, counts, strict=True)
    ]
    return found, counts


@pytest.mark.corners
@pytest.mark.parametrize("across", ["heads", "layers"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
def test_over_snapkv(across, normalise, floor):
    target = micro(num_hidden_layers=3)
    policy = policies.get(
        "adakv",
        budget=Budget(TOKENS),
        options={"window": WINDOW},
        floor=floor,
        normalise=normalise,
        across=across,
    )
    prompts = prompts_of(90, 37, 20, 64)
    keep = policy.select(prefilled(target, prompts, policy))
    uneven = 0
    for seq, prompt in enumerate(prompts):
        n = len(prompt)
        if n <= TOKENS:
            assert kept(keep, seq) == [[list(range(n))] * 2] * 3
            continue
        A_LHTT = Eager(target).attention(prompt)
        s_LGS = group_mean(A_LHTT[:, :, -WINDOW:, :-WINDOW].mean(2), 2)
        expected, counts = reference(
            s_LGS, n, window=WINDOW, kernel=7, floor=floor, across=across, normalise=normalise
        )
        assert kept(keep, seq) == expected
        flat = [count for some in counts for count in some]
        assert min(flat) >= math.floor((TOKENS - WINDOW) * floor)
        assert (
            abs(sum(flat) - len(flat) * (TOKENS - WINDOW)) <= len(flat) / 2
        )  # half a row of rounding a head
        uneven += len(set(flat)) > 1
    assert uneven == (0 if floor == 1.0 else 3)


def test_over_policies_without_pooling_or_window():
    target, prompts = micro(), prompts_of(90, 60)
    h2o = policies.get("adakv", budget=Budget(TOKENS), over="h2o", options={"window": WINDOW})
    oracle = policies.get("adakv", budget=Budget(TOKENS), over="oracle")
    laq = policies.get("adakv", budget=Budget(TOKENS), over="laq", options={"window": WINDOW, "n_tokens": 4})
    for policy, window, kernel in ((h2o, WINDOW, 1), (oracle, 0, 7), (laq, 0, 7)):
        run = prefilled(target, prompts, policy)
        scores, keep = policy.scores(run), policy.select(run)
        for seq, prompt in enumerate(prompts):
            s_LGS = scores[:, seq, :, : len(prompt)]
            expected, _ = reference(s_LGS, len(prompt), window=window, kernel=kernel, floor=0.2)
            assert kept(keep, seq) == expected
    assert laq.scores_depend_on_budget and not h2o.scores_depend_on_budget


@dataclass
class Learned:
    """An evictor as a trained method brings it: scores from somewhere, no window."""

    budget: Budget
    kernel: int = 3
    name = "learned"
    wrappable = True

    def extra_tokens(self, longest):
        return 5

    def hook(self, lengths):
        return None

    def scores(self, run):
        info = run.target.info
        shape = (info.n_layers, len(run.lengths), info.n_kv_heads, max(run.lengths))
        return torch.rand(shape, generator=torch.Generator().manual_seed(1)) ** 3

    def select(self, run, scores=None):
        raise AssertionError("the wrapper selects")

    def with_budget(self, budget):
        return replace(self, budget=budget)


class Unwrappable(Learned):
    wrappable = False


def test_over_an_evictor_object():
    target, prompts = micro(), prompts_of(80, 50)
    policy = policies.get("adakv", budget=Budget(99), over=Learned(Budget(1))).with_budget(Budget(TOKENS))
    assert policy.over.budget == Budget(TOKENS)
    assert policy.extra_tokens(80) == 5
    run = prefilled(target, prompts, policy)
    scores, keep = policy.scores(run), policy.select(run)
    for seq, prompt in enumerate(prompts):
        expected, _ = reference(scores[:, seq, :, : len(prompt)], len(prompt), window=0, kernel=3, floor=0.2)
        assert kept(keep, seq) == expected


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"floor": 1.5}, "floor"),
        ({"across": "tokens"}, "across"),
        ({"over": "adakv"}, "over"),
        ({"over": "snap"}, "snap"),
        ({"over": object()}, "no scores"),
        ({"over": Unwrappable(Budget(1))}, "evict.over=learned: .*; allowed: snapkv, h2o"),
        ({"options": {"windows": 3}}, "windows"),
        ({"options": {"budget": 3}}, "policy 'snapkv' has no option 'budget'"),
        ({"options": {"window": "abc"}}, "evict.options.window=abc; allowed: a whole number"),
        ({"options": 3}, "evict.options=3; allowed: a mapping"),
    ],
)
def test_bad_options_are_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        policies.get("adakv", budget=Budget(64), **options)


ALLOWED = "snapkv, h2o, tova, laq, speckv, random, oracle"


@pytest.mark.parametrize("name", policies.POLICIES)
def test_what_may_be_wrapped(name, root):
    words = (root / "conf" / "evict" / "adakv.yaml").read_text(encoding="utf-8")
    assert f"whose scores: {ALLOWED};" in words
    options = {"draft": "some/draft"} if name == "speckv" else {}
    if name in ALLOWED.split(", "):
        policy = policies.get("adakv", budget=Budget(64), over=name, options=options)
        assert (
            policy.least_budget == policy.wrapped.least_budget >= max(1, getattr(policy.wrapped, "window", 0))
        )
        return
    with pytest.raises(ConfigError, match=f"evict.over={name}: ") as error:
        policies.get("adakv", budget=Budget(64), over=name)
    assert {*ALLOWED.split(", ")} < {*str(error.value).replace(";", ",").replace("allowed: ", "").split(", ")}
