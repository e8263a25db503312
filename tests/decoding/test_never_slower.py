"""`decode=auto` over whole data sets, by a simulated clock: at most 2% slower than plain decoding.

The acceptance is an adversary's, who knows which shape is tried; answers are short and may end long before
the most tokens that were asked for; the draft's start with the prompt and its restarts are counted.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from longtrain.decoding.averages import Costs
from longtrain.decoding.control import Control, affords_start, cheapest_first
from longtrain.decoding.roles import TreeShape

PLAIN = TreeShape(())
COPIES = tuple(TreeShape((), copied=n) for n in (4, 15))
CHAINS = tuple(TreeShape((1,) * n, copied=15 - n) for n in (1, 2, 4, 8))
DRAFTED = (PLAIN, *(shape.drafted for shape in CHAINS))
JOINED = tuple(sorted((*DRAFTED, *COPIES, *CHAINS), key=cheapest_first))
Adversary = Callable[[random.Random, TreeShape, int], int]
"""(coins, shape, cycles so far) -> accepted drafts."""


def never(rng: random.Random, shape: TreeShape, cycle: int) -> int:
    return 0


def coins(rng: random.Random, shape: TreeShape, cycle: int) -> int:
    return next((n for n in range(shape.depth) if rng.random() > 0.4), shape.depth)


def by_turns(rng: random.Random, shape: TreeShape, cycle: int) -> int:
    """Everything is accepted for a while, then nothing, so that what was learned is wrong."""
    return shape.depth if cycle // 23 % 2 == 0 else 0


def at_first(rng: random.Random, shape: TreeShape, cycle: int) -> int:
    """The first cycles of every answer promise much."""
    return shape.depth if cycle < 6 else 0


def one(rng: random.Random, shape: TreeShape, cycle: int) -> int:
    return min(1, shape.depth)


@dataclass(frozen=True)
class Machine:
    """Seconds of a target and a draft, a plain cycle being 1.

    Args:
        level: of each level that the draft computes.
        node: of each node that is verified.
        look: of a look-up.
        hear: of the draft in a plain cycle.
        start: of its start with the prompt.
        restarts: True if it can start later.
    """

    level: float
    node: float
    look: float
    hear: float
    start: float
    restarts: bool

    def seconds(self, shape: TreeShape) -> float:
        return (
            1
            + self.level * len(shape.widths)
            + self.node * (shape.n_nodes - 1)
            + self.look * (shape.copied > 0)
        )


MACHINES = [
    Machine(0.05, 0.002, 0.01, 0.004, 0.3, True),  # a large target
    Machine(0.05, 0.002, 0.01, 0.004, 2.5, False),  # its draft reads the whole prompt
    Machine(0.3, 0.02, 0.06, 0.05, 1.0, True),  # a small one
    Machine(0.3, 0.05, 0.06, 0.0, 4.0, False),
]


def answer(
    machine: Machine, costs: Costs, adversary: Adversary, shapes, tokens: int, planned: int, seed: int
) -> float:
    """Seconds of one call, whose answer ends after `tokens`; the news of a cycle is read one cycle late."""
    kind, prompt, seconds, rng = (1, True, ()), 1000, 0.0, random.Random(seed)
    starts = affords_start(costs, kind, prompt_tokens=prompt, length=prompt, planned=planned)
    left_out = not starts and not machine.restarts
    if left_out:  # look-up alone remains, if there is any
        shapes = tuple(shape for shape in shapes if not shape.widths)
        machine = replace(machine, start=0.01, hear=0.0, restarts=True)
        seconds += machine.start
    paused = not starts and not left_out
    control = Control(shapes, costs, kind, planned=planned, restarts=machine.restarts, paused=paused)
    if starts and control.free:
        control.learn_start(machine.start, prompt)
        seconds += machine.start
    done, cycle, sent = 1, 0, deque()
    while done < tokens:
        was_paused = control.paused
        shape = control.choose(length=prompt + done, left=planned - done)
        paused = control.paused
        restart_s = machine.start if was_paused and not paused else None
        accepted = adversary(rng, shape, cycle)
        took_s = machine.seconds(shape) + (0.0 if paused else machine.hear)
        seconds += took_s + (restart_s or 0.0)
        sent.append((shape, accepted, took_s, paused, restart_s))
        done, cycle = done + 1 + accepted, cycle + 1
        while len(sent) > (0 if done >= tokens else 1):
            shape, accepted, took_s, paused, restart_s = sent.popleft()
            control.learn(
                shape, [accepted], length=prompt + done, seconds=took_s, paused=paused, restart_s=restart_s
            )
    return seconds


@pytest.mark.parametrize("machine", MACHINES, ids=range(len(MACHINES)))
@pytest.mark.parametrize("adversary", [never, coins, by_turns, at_first, one], ids=lambda f: f.__name__)
@pytest.mark.parametrize("tokens", [16, 24, 64, 400])
@pytest.mark.parametrize("ends_early", [False, True])
@pytest.mark.parametrize("shapes", [JOINED, DRAFTED], ids=["joined", "drafted"])
def test_no_data_set_takes_more_than_2_percent_longer(machine, adversary, tokens, ends_early, shapes):
    costs, planned, calls = Costs(), 1024 if ends_early else tokens, 80 if tokens < 400 else 16
    taken_s = sum(answer(machine, costs, adversary, shapes, tokens, planned, seed) for seed in range(calls))
    plain_s = calls * (tokens - 1)
    assert taken_s <= 1.02 * plain_s, taken_s / plain_s


@pytest.mark.parametrize("machine", MACHINES[:2], ids=range(2))
def test_short_answers_gain_where_drafts_are_right(machine):
    """What earlier answers have taught is used: caution costs little."""

    def good(rng: random.Random, shape: TreeShape, cycle: int) -> int:
        return next((n for n in range(shape.depth) if rng.random() > 0.85), shape.depth)

    costs = Costs()
    taken_s = [answer(machine, costs, good, JOINED, 64, 64, seed) for seed in range(80)]
    assert sum(taken_s[40:]) < 0.6 * 40 * 63
