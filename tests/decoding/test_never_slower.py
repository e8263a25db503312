"""`decode=auto` over whole data sets, by a simulated clock: at most 2% slower than plain decoding.

The acceptance is an adversary's, who knows which shape is tried; answers are short and may end long before
the most tokens that were asked for; the draft's start with the prompt and its restarts are counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest

from longtrain.decoding.averages import MAX_LOSS, RESERVE, Costs
from longtrain.decoding.control import Control, cheapest_first
from longtrain.decoding.roles import TreeShape

from .machine import Machine, first_coins

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
    return first_coins(rng, shape, 0.4)


def by_turns(rng: random.Random, shape: TreeShape, cycle: int) -> int:
    """Everything is accepted for a while, then nothing, so that what was learned is wrong."""
    return shape.depth if cycle // 23 % 2 == 0 else 0


def at_first(rng: random.Random, shape: TreeShape, cycle: int) -> int:
    """The first cycles of every answer promise much."""
    return shape.depth if cycle < 6 else 0


def one(rng: random.Random, shape: TreeShape, cycle: int) -> int:
    return min(1, shape.depth)


@dataclass(frozen=True)
class Seconds:
    """Seconds of a target and a draft, a plain cycle being 1.

    Args:
        level: of each level that the draft computes.
        node: of each node that is verified.
        look: of a look-up.
        hear: of the draft in a plain cycle.
        start: of its start with the prompt.
        restarts: True if it can start later.
        look_restart: of a restart of look-up alone, which waits for the tokens on their way.
    """

    level: float
    node: float
    look: float
    hear: float
    start: float
    restarts: bool
    look_restart: float = 0.01

    def cycle(self, shape: TreeShape) -> float:
        return (
            1
            + self.level * len(shape.widths)
            + self.node * (shape.n_nodes - 1)
            + self.look * (shape.copied > 0)
        )


MACHINES = [
    Seconds(0.05, 0.002, 0.01, 0.004, 0.3, True),  # a large target
    Seconds(0.05, 0.002, 0.01, 0.004, 2.5, False),  # its draft reads the whole prompt
    Seconds(0.3, 0.02, 0.06, 0.05, 1.0, True),  # a small one
    Seconds(0.3, 0.05, 0.06, 0.0, 4.0, False),
]


def answer(
    costly: Seconds,
    costs: Costs,
    adversary: Adversary,
    shapes,
    tokens: int,
    planned: int,
    seed: int,
    kind: int = 1,
    prompt: int = 1000,
) -> float:
    """Seconds of one call, whose answer ends after `tokens`; the news of a cycle is read one cycle late."""
    rng = random.Random(seed)
    control = Control(shapes, costs, kind, restarts=costly.restarts)
    own = control.begin(prompt, length=prompt, planned=planned) and not control.paused
    look_restart_s = None if costly.restarts else costly.look_restart
    machine = Machine(
        control, costly.cycle, heard_s=costly.hear, restart_s=costly.start, look_restart_s=look_restart_s
    )
    if own:
        machine.seconds += costly.start
        control.learn_start(costly.start, prompt)
    elif not control.paused:
        machine.look_up_alone()
        machine.seconds += 0.01
    while (done := 1 + machine.tokens) < tokens:
        machine.cycle(
            lambda shape: adversary(rng, shape, len(machine.depths)),
            length=prompt + done,
            left=planned - done,
        )
        ended = 1 + machine.tokens >= tokens
        machine.hear(length=prompt + 1 + machine.tokens, late=0 if ended else 1)
    return machine.seconds


def spread(*axes):
    """The product of the values; five of six are slow, so that any two values still meet in the others."""
    for places in product(*(range(len(axis)) for axis in axes)):
        values = [axis[at] for axis, at in zip(axes, places, strict=True)]
        name = "-".join(getattr(value, "__name__", str(at)) for value, at in zip(values, places, strict=True))
        yield pytest.param(*values, id=name, marks=[pytest.mark.slow] if sum(places) % 6 else [])


@pytest.mark.parametrize(
    ("machine", "adversary", "tokens", "ends_early", "shapes"),
    spread(
        MACHINES, (never, coins, by_turns, at_first, one), (16, 24, 64, 400), (False, True), (JOINED, DRAFTED)
    ),
)
def test_no_data_set_takes_more_than_2_percent_longer(machine, adversary, tokens, ends_early, shapes):
    costs, planned, calls = Costs(), 1024 if ends_early else tokens, 80 if tokens < 400 else 16
    taken_s = sum(answer(machine, costs, adversary, shapes, tokens, planned, seed) for seed in range(calls))
    plain_s = calls * (tokens - 1)
    assert taken_s <= 1.02 * plain_s, taken_s / plain_s


def good(rng: random.Random, shape: TreeShape, cycle: int) -> int:
    return first_coins(rng, shape, 0.85)


@pytest.mark.parametrize("machine", MACHINES[:2], ids=range(2))
def test_short_answers_gain_where_drafts_are_right(machine):
    """What earlier answers have taught is used: caution costs little."""
    costs = Costs()
    taken_s = [answer(machine, costs, good, JOINED, 64, 64, seed) for seed in range(80)]
    assert sum(taken_s[40:]) < 0.6 * 40 * 63


LONG_PROMPTS = [
    Seconds(0.1, 0.002, 0.01, 0.01, 12.0, restarts=True),
    Seconds(0.1, 0.002, 0.01, 0.01, 12.0, restarts=False),
]
"""A draft's start with the prompt takes as long as 12 plain cycles."""
PLAIN_S = 127.0
"""Seconds of 128 new tokens in plain decoding, of which the first is prefill's."""
AT_FIRST_S = 30.0
"""What the first calls of an engine may lose beyond 2%: two starts of the draft, of which one compiles, and
what may be lost in advance."""


def short_calls(machine: Seconds, costs: Costs, adversary: Adversary, calls: int, kind: int = 1):
    return [answer(machine, costs, adversary, DRAFTED, 128, 128, seed, kind) for seed in range(calls)]


def worst_prefix(taken_s: list[float]) -> float:
    """Most seconds beyond 2% that the first calls took, for any number of them."""
    return max(sum(taken_s[:n]) - 1.02 * n * PLAIN_S for n in range(1, len(taken_s) + 1))


@pytest.mark.parametrize("machine", LONG_PROMPTS, ids=["restarts", "does not restart"])
def test_short_calls_draft_where_the_start_pays(machine):
    """Each call alone could never pay the start in advance; the engine can, and then drafts at once."""
    taken_s = short_calls(machine, Costs(), good, 50)
    assert sum(taken_s[5:]) <= 0.8 * 45 * PLAIN_S and worst_prefix(taken_s) <= AT_FIRST_S


@pytest.mark.parametrize("machine", LONG_PROMPTS, ids=["restarts", "does not restart"])
def test_short_calls_lose_nothing_where_drafts_never_help(machine):
    taken_s = short_calls(machine, Costs(), never, 50)
    assert sum(taken_s) <= 1.02 * 50 * PLAIN_S and worst_prefix(taken_s) <= AT_FIRST_S


@pytest.mark.parametrize("machine", LONG_PROMPTS, ids=["restarts", "does not restart"])
def test_a_long_gain_does_not_license_a_long_loss(machine):
    """Drafts are right in 25 calls and never again: at most what may be saved up is lost, and the share."""
    costs = Costs()
    before_s, after_s = (sum(short_calls(machine, costs, how, 25)) for how in (good, never))
    plain_s = 25 * PLAIN_S
    assert before_s < 0.65 * plain_s
    assert after_s - plain_s < MAX_LOSS * (RESERVE + plain_s) + AT_FIRST_S
    again_s = sum(short_calls(machine, costs, never, 25))
    assert again_s <= 1.02 * plain_s


@pytest.mark.parametrize("machine", LONG_PROMPTS, ids=["restarts", "does not restart"])
def test_drafts_that_return_are_found_in_short_calls(machine):
    costs = Costs()
    short_calls(machine, costs, never, 25)
    taken_s = short_calls(machine, costs, good, 25)
    assert sum(taken_s[10:]) <= 0.8 * 15 * PLAIN_S


@pytest.mark.parametrize("machine", LONG_PROMPTS, ids=["restarts", "does not restart"])
def test_what_one_text_gains_is_not_lost_by_eight(machine):
    """By turns a call of one text, for which drafts gain, and one of eight, for which they cost too much."""
    costs, one_s, eight_s = Costs(), [], []
    costly = replace(machine, level=0.6, node=0.2)
    for seed in range(50):
        one_s.append(answer(machine, costs, good, DRAFTED, 128, 128, seed, kind=1))
        eight_s.append(answer(costly, costs, coins, DRAFTED, 128, 128, seed, kind=8))
    assert sum(one_s[5:]) <= 0.8 * 45 * PLAIN_S
    assert sum(eight_s) <= 1.02 * 50 * PLAIN_S and worst_prefix(eight_s) <= AT_FIRST_S


@pytest.mark.parametrize("start", [12.0, 100.0])
def test_a_start_that_cannot_pay_is_left_out(start):
    """Acceptance and times are the same; a call of 128 tokens brings in one of the starts."""
    costs, machine = Costs(), replace(LONG_PROMPTS[1], start=start)
    short_calls(machine, costs, good, 2)
    for _ in range(100):  # the budget is no reason
        costs.past(1)[0].add(128, 64.0, 1.0, start_s=start)
    taken_s = answer(machine, costs, good, DRAFTED, 128, 128, 9)
    assert taken_s < 0.7 * PLAIN_S if start < 64 else taken_s == PLAIN_S
    assert answer(machine, costs, good, DRAFTED, 400, 400, 9) < 0.8 * 399


@pytest.mark.parametrize("adversary", [good, never])
def test_a_long_prompts_start_is_not_taken_for_a_short_ones(adversary):
    """A draft that can be restarted begins paused where its start would not pay, and stays so."""
    costs = Costs()
    for seed in range(10):
        short = replace(LONG_PROMPTS[0], start=0.12)
        answer(short, costs, adversary, DRAFTED, 128, 128, seed, prompt=10)
    long = replace(LONG_PROMPTS[0], start=96.0)
    assert answer(long, costs, adversary, DRAFTED, 128, 128, 10, prompt=8000) == PLAIN_S


@pytest.mark.corners
@pytest.mark.parametrize("adversary", [good, never])
@pytest.mark.parametrize("machine", LONG_PROMPTS, ids=["restarts", "does not restart"])
def test_requests_with_settings_of_their_own_lose_no_more(machine, adversary):
    """As from a server's clients: each call is the first of its kind, so that its times are not known."""
    costs = Costs()
    taken_s = [answer(machine, costs, adversary, DRAFTED, 128, 128, kind, kind) for kind in range(60)]
    assert sum(taken_s) <= 1.02 * 60 * PLAIN_S and worst_prefix(taken_s) <= AT_FIRST_S
