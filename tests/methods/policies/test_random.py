"""Random eviction is random between heads, layers, seeds and prompts, and the same for the same prompt."""

from __future__ import annotations

from longtrain.decoding.evict import Budget
from longtrain.methods import policies

from .naive import micro
from .runs import kept, prefilled, prompts_of


def test_a_prompt_has_one_draw():
    target = micro()
    policy = policies.get("random", budget=Budget(20), window=4)
    prompts = prompts_of(50, 80)
    first = policy.select(prefilled(target, prompts, policy))
    again = policy.select(prefilled(target, prompts[::-1], policy))
    assert kept(first, 0) == kept(again, 1)
    assert kept(first, 1) == kept(again, 0)
    heads = [row for layer in kept(first, 1) for row in layer]
    assert all(len(row) == 20 and row[-4:] == [76, 77, 78, 79] for row in heads)
    assert len({tuple(row) for row in heads}) == len(heads)


def test_seeds_and_prompts_differ():
    target = micro()
    one, other = (policies.get("random", budget=Budget(20), window=4, seed=seed) for seed in (0, 1))
    a, b = prompts_of(50, 50)
    draws = [
        kept(policy.select(prefilled(target, [prompt], policy)), 0)
        for policy, prompt in ((one, a), (one, b), (other, a))
    ]
    assert draws[0] != draws[1]
    assert draws[0] != draws[2]


def test_every_row_has_the_same_chance():
    target = micro()
    policy = policies.get("random", budget=Budget(10), window=0)
    counts = [0] * 40
    for prompt in prompts_of(*[40] * 100):
        for layer in kept(policy.select(prefilled(target, [prompt], policy)), 0):
            for row in layer:
                for at in row:
                    counts[at] += 1
    # 400 heads, a quarter each: 100 +- 8.7 (one standard deviation); five of them.
    assert all(56 < count < 144 for count in counts)
