"""The controller by hand-made costs and acceptance, and the engine's texts whatever it chooses."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch

from longtrain.costs.model import Sizes, pass_growth
from longtrain.decoding import averages, captured
from longtrain.decoding import control as control_module
from longtrain.decoding import engine as engine_module
from longtrain.decoding.averages import Acceptance, Costs, levels
from longtrain.decoding.control import CHAINS, REFRESH, Control, ShapeChoice
from longtrain.decoding.engine import AUTO, PLAIN, Engine
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import ChildChoice, Parts, TreeShape
from longtrain.decoding.sampling import Sampling, probs
from longtrain.errors import ConfigError
from longtrain.methods.longspec.runtime import LongSpecRuntime
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES as PUBLISHED
from tests.helpers import ONE_LAYER, Recall, attached, noisy_longspec

from .machine import Machine, first_coins
from .micro import target as micro
from .tape import tapes  # noqa: F401 (a fixture)
from .test_captured import ONE, THREE
from .toys import OracleDraft, ToyTarget

SHAPES = ShapeChoice(CHAINS).shapes(object(), sampled=False)
ENDLESS = 1 << 30
WARM = Sampling(temperature=1.0, seed=11)


def chain(n: int) -> TreeShape:
    return TreeShape((1,) * n)


class ChainMachine(Machine):
    """A target and a draft of chains, whose drafts are accepted at a given rate."""

    def __init__(
        self, control: Control, draft_s: float, verify_s: float, seed: int = 0, **seconds: float
    ) -> None:
        super().__init__(control, self.cost_of, **seconds)
        self.draft_s, self.verify_s = draft_s, verify_s
        self.rng = random.Random(seed)

    def cost_of(self, shape: TreeShape) -> float:
        return self.verify_s + self.draft_s * shape.depth + 0.01 * self.verify_s * (shape.n_nodes - 1)

    def speed(self, shape: TreeShape, rate: float) -> float:
        return sum(rate**k for k in range(shape.depth + 1)) / self.cost(shape)

    def run(self, rate: float, cycles: int, planned: int = ENDLESS) -> ChainMachine:
        for _ in range(cycles):
            left = planned - self.tokens
            self.cycle(lambda shape: first_coins(self.rng, shape, rate), length=1000, left=left)
            self.hear(length=1000)
        return self


@pytest.mark.corners
@pytest.mark.parametrize(("draft_s", "verify_s"), [(2.1, 5.1), (0.3, 5.0), (0.05, 5.0)])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_speed_comes_close_to_the_best_fixed_shape(rate, draft_s, verify_s):
    """First trials and later ones included; the shape that is best is known to nobody beforehand."""
    machine = ChainMachine(Control(SHAPES, Costs()), draft_s, verify_s).run(rate, 800)
    best = max(machine.speed(shape, rate) for shape in SHAPES)
    assert machine.tokens / machine.seconds > 0.95 * best


def test_a_draft_that_turns_good_is_found_and_one_that_turns_bad_is_left():
    machine = ChainMachine(Control(SHAPES, Costs()), 2.1, 5.1).run(0.0, 100)
    assert Counter(machine.depths[10:])[0] > 80
    machine.run(0.9, 300)
    assert 0 not in machine.depths[-50:] and machine.depths[-50:].count(8) < 5
    machine.run(0.0, 100)
    assert Counter(machine.depths[-50:])[0] > 45


@pytest.mark.corners
@pytest.mark.parametrize("restarts", [True, False], ids=["restarts", "does not restart"])
@pytest.mark.parametrize(
    ("draft_s", "verify_s", "heard_s", "restart_s"),
    [(0.42, 5.1, 0.03, 1.0), (0.08, 0.3, 0.025, 0.5), (2.1, 5.1, 0.0, 0.5)],
)
def test_calls_are_not_slower_than_plain_decoding_by_more_than_2_percent(
    draft_s, verify_s, heard_s, restart_s, restarts
):
    """Whatever is accepted, in an engine's first call and with those after it: trials, following and
    restarting counted.
    """
    for rate in (0.0, 0.1, 0.3, 0.5):
        for planned in (128, 1024):
            costs, tokens, seconds = Costs(), 0, 0.0
            for call in range(3):
                control = Control(SHAPES, costs, restarts=restarts)
                machine = ChainMachine(control, draft_s, verify_s, call, heard_s=heard_s, restart_s=restart_s)
                while machine.tokens < planned:
                    machine.run(rate, 1, planned)
                tokens, seconds = tokens + machine.tokens, seconds + machine.seconds
                speed = tokens * verify_s / seconds
                # What the draft costs in plain cycles is only known once a cycle without it was timed.
                unknown = 0.0 if restarts and call else heard_s / verify_s
                assert speed > 0.98 - unknown, (rate, planned, call)


class WithExperts(ChainMachine):
    """Its verification reads experts as that of Qwen3-30B-A3B at short texts."""

    def cost_of(self, shape: TreeShape) -> float:
        growth = pass_growth(Sizes.of_keys(PUBLISHED["qwen3_30b_a3b"]), 1, shape.n_nodes, 1000)
        return self.verify_s * growth + self.draft_s * shape.depth


def test_chains_are_short_where_longer_ones_read_more_experts():
    """The same draft and the same acceptance; one timed chain tells what the others cost."""
    size, dense = (Sizes.of_keys(PUBLISHED[name]) for name in ("qwen3_30b_a3b", "qwen3_8b"))
    growth = partial(pass_growth, size, 1)
    assert pass_growth(dense, 1, 9, 1000) == 1 < growth(2, 1000) < growth(9, 1000) < growth(1000, 1000)
    assert growth(9, 32000) < growth(9, 1000), "the cache is read too"
    usual = {}
    for kind, keys in ((ChainMachine, {}), (WithExperts, {"growth": growth})):
        machine = kind(Control(SHAPES, Costs(), **keys), 0.1, 5.0).run(0.8, 800)
        usual[kind] = Counter(depth for depth in machine.depths if depth).most_common(1)[0][0]
        assert machine.tokens / machine.seconds > 0.95 * max(machine.speed(shape, 0.8) for shape in SHAPES)
    assert usual[WithExperts] <= 2 and usual[ChainMachine] == 8
    costs = Costs()
    machine = WithExperts(control := Control(SHAPES, costs, growth=growth), 0.1, 5.0)
    for shape in (*SHAPES[:2], *SHAPES[:2]):
        costs.learn((), shape, 1000, machine.cost(shape))
    control.choose(length=1000, left=ENDLESS)
    for i, shape in enumerate(SHAPES):
        assert control._seconds(i, 5.0) == pytest.approx(machine.cost(shape))


def test_a_paused_draft_is_restarted_when_the_call_can_afford_it():
    control = Control(SHAPES, Costs())
    machine = ChainMachine(control, 0.08, 0.3, heard_s=0.025, restart_s=0.1).run(0.0, 400)
    assert control.paused and control.budget.lost_s > 0
    machine.run(0.95, 1200)
    assert not control.paused and min(machine.depths[-50:]) > 0
    machine.run(1.0, 20)
    assert control.budget.affords(averages.MAX_LOSS * averages.RESERVE * 0.3), "all that may be saved"
    hard = Control(SHAPES, Costs(), restarts=False)
    hard.costs.learn((hard.kind, "alone"), chain(0), 1000, 0.3)
    hard.costs.learn((hard.kind, "alone"), chain(0), 1000, 0.3)
    machine = ChainMachine(hard, 0.08, 0.3, heard_s=0.025).run(0.0, 400)
    assert hard.paused
    assert set(machine.run(0.99, 400).depths[-400:]) == {0}  # to the end of the call


def test_what_a_draft_costs_in_plain_cycles_is_soon_known():
    """Answers that end long before the most tokens that were asked for: else each would pay it to its end."""
    costs, tokens, seconds = Costs(), 0, 0.0
    for call in range(20):
        control = Control(SHAPES, costs, restarts=False)
        machine = ChainMachine(control, 0.6, 1.0, call, heard_s=0.12)
        while machine.tokens < 24:
            machine.run(0.0, 1, planned=512)
        assert control._alone_s == 1.0
        tokens, seconds = tokens + machine.tokens, seconds + machine.seconds
    assert seconds <= 1.02 * tokens + averages.MAX_LOSS * 512, "the share of the tokens that a call plans"


LOOKED_UP = (
    chain(0),
    TreeShape((), copied=4),
    TreeShape((), copied=15),
    TreeShape((1, 1), copied=13),
)


def test_look_up_returns_where_a_draft_that_cannot_restart_was_given_up():
    """Its cycles are timed anew, as the draft no longer hears of the tokens."""
    costs = Costs()
    control = Control(LOOKED_UP, costs, restarts=False)
    machine = Machine(
        control,
        lambda shape: 1.0 + 0.2 * (shape.copied > 0) + 0.4 * len(shape.widths),
        heard_s=0.2,
        look_restart_s=0.5,
    )

    def accepted(shape: TreeShape) -> int:
        return shape.depth if len(machine.depths) > 150 else 0

    for _ in range(500):
        machine.cycle(accepted, length=1000, left=ENDLESS)
        machine.hear(length=1000)
    assert control.restarts and not control.paused and control.shapes == LOOKED_UP[:3]
    assert machine.depths[-100:] == [15] * 100
    assert costs.of((), LOOKED_UP[1], 1000) == pytest.approx(1.4)
    assert costs.of(((), "look-up"), LOOKED_UP[2], 1000) == pytest.approx(1.2)
    assert not Control(SHAPES, costs, restarts=False).leave_out(), "there is no look-up"


def known_times(draft_s: float) -> Costs:
    """Times of plain cycles beside a draft, 1 second, and of all its shapes."""
    costs = Costs()
    for shape in SHAPES:
        for _ in range(averages.TIMES):
            costs.learn((), shape, 1000, draft_s if shape.depth else 1.0)
    return costs


def test_the_first_cycles_after_a_pause_are_timed():
    """However many plain cycles there were before it."""
    control = Control(SHAPES, known_times(50.0), restarts=False)
    cycles = 0
    while not control.paused:
        assert not control.choose(length=1000, left=ENDLESS).depth
        control.learn(chain(0), [0], length=1000)
        cycles += 1
    assert averages.TIMES + 1 < cycles < averages.MEMORY and control.times


def test_a_draft_is_not_paused_where_the_plain_cycle_is_measured_again():
    costs = known_times(1.1)
    costs.count = REFRESH
    control = Control(SHAPES, costs, restarts=True)
    assert not control.choose(length=1000, left=ENDLESS).depth and not control.paused
    costs.count += averages.TIMES
    assert control.choose(length=1000, left=ENDLESS).depth and not control.paused


def test_look_up_alone_is_expected_to_take_what_it_took_beside_the_draft():
    """Until it was measured without the draft. A plain cycle beside it tells nothing of one without."""
    costs = Costs()
    for shape, seconds in zip(LOOKED_UP[:3], (1.2, 1.4, 1.5), strict=True):
        for _ in range(averages.TIMES):
            costs.learn((), shape, 1000, seconds)
    for _ in range(averages.TIMES):
        costs.learn(((), "look-up"), LOOKED_UP[2], 1000, 1.3)
    control = Control(LOOKED_UP, costs, restarts=False)
    control.choose(length=1000, left=ENDLESS)
    assert control._known == [1.2, 1.4, 1.5, None]
    assert control.leave_out()
    control.choose(length=1000, left=ENDLESS)
    assert control._known == [None, 1.4, 1.3]


def test_short_prompts_do_not_make_the_start_with_a_long_one_dear():
    """Of a start with few tokens most does not depend on them."""
    costs = Costs()
    costs.learn_start(8000, 9.0)  # it compiles
    assert costs.start_s(8000) is None
    costs.learn_start(8000, 0.008)
    for tokens in (10, 20, 30, 40, 50, 60, 70):
        costs.learn_start(tokens, 0.002)
    assert costs.start_s(16000) == pytest.approx(0.016) and costs.start_s(4000) == pytest.approx(0.008)
    assert costs.start_s(5) == 0.002 and costs.start_s(126) == pytest.approx(0.002 * 126 / 70)


def test_what_a_start_costs_belongs_to_a_call():
    costs = Costs()
    for control in (Control(SHAPES, costs), Control(SHAPES, costs)):
        control.learn_start(2.0, 1000)
    later = Control(LOOKED_UP, costs)
    assert not later.begin(5000, length=5000, planned=64, hopeless=True) and not later.paused
    assert later._start_s == pytest.approx(10.0), "known without the draft, whose start it may pay for later"
    assert Control(SHAPES, costs)._start_s == 0.0


def test_a_start_that_cannot_be_afforded_pauses_a_draft_or_leaves_it_out():
    """One that can restart may return in this call; of another only look-up is left, where there is any."""
    costs = Costs()
    for _ in range(averages.TIMES):
        costs.learn_start(1000, 50.0)
    begun = {
        (shapes, restarts): Control(shapes, costs, restarts=restarts)
        for shapes in (SHAPES, LOOKED_UP)
        for restarts in (True, False)
    }
    stays = {of: control.begin(1000, length=1000, planned=64) for of, control in begun.items()}
    for (shapes, restarts), control in begun.items():
        assert stays[shapes, restarts] == restarts
        assert control.paused == (restarts or shapes is SHAPES)
        assert control.shapes == (shapes if control.paused else shapes[:3])
    assert Control(SHAPES, Costs(), restarts=False).begin(1000, length=1000, planned=64), "not known yet"
    costs.budget.add(averages.RESERVE, None, 50.0 / averages.MAX_LOSS)
    assert Control(SHAPES, costs, restarts=False).begin(1000, length=1000, planned=64), "others left enough"


@pytest.mark.parametrize(("start_s", "pays"), [(5.0, True), (9.0, False)])
def test_a_start_is_compared_with_look_up_alone_which_needs_none(start_s, pays):
    costs = Costs()
    budget, past = costs.past(())
    for _ in range(64):
        for shape, seconds, accepted in zip(LOOKED_UP, (1.0, 1.1, 1.2, 1.3), (0, 1, 1, 2), strict=True):
            costs.learn((), shape, 1000, seconds)
            past.learn(shape, [accepted])
    budget.add(averages.RESERVE, None, 1.0)
    for _ in range(averages.TIMES):
        costs.learn_start(1000, start_s)
    control = Control(LOOKED_UP, costs, restarts=False)
    assert budget.affords(start_s + control_module.STARTED * 0.3), "so it is not left out for that"
    alone_s, joined_s = 60 * 1.1 / 2, 60 * 1.3 / 3
    assert (joined_s + start_s < alone_s) == pays, "60 tokens are planned"
    assert control.begin(1000, length=1000, planned=60) == pays
    assert len(control.shapes) == (4 if pays else 3)


def test_only_what_may_be_best_is_measured():
    """Each measured shape costs a CUDA graph, and the first trials are the cheapest."""
    costs = Costs()
    ChainMachine(Control(SHAPES, costs), 2.1, 5.1).run(0.0, 200)
    assert {len(row["shape"]) for row in costs.table()} <= {0, 1, 2}
    machine = ChainMachine(Control(SHAPES, costs := Costs()), 2.1, 5.1).run(0.99, 200)
    assert len({len(row["shape"]) for row in costs.table()}) <= 6
    assert machine.depths[:4] == [0, 0, 0, 1] and machine.depths[-1] == 8


def test_costs_are_kept_for_the_next_call():
    costs = Costs()
    ChainMachine(Control(SHAPES, costs), 2.1, 5.1).run(0.9, 200)
    later = ChainMachine(Control(SHAPES, costs), 2.1, 5.1).run(0.9, 50)
    assert 0 not in later.depths  # nothing is measured first
    assert ChainMachine(Control(SHAPES, costs, kind="two texts"), 2.1, 5.1).run(0.9, 1).depths == [0]


def test_the_best_tree_wins():
    menu = ShapeChoice(((1, 1), (4, 8, 8), (16, 16, 16, 16)))
    shapes = menu.shapes(object(), sampled=False)
    control = Control(shapes, Costs())
    cost = {(): 5.0, (1, 1): 5.5, (4, 8, 8): 6.5, (16, 16, 16, 16): 15.0}
    share = {(1, 1): 0.5, (4, 8, 8): 0.8, (16, 16, 16, 16): 0.85}
    rng, used = random.Random(1), Counter()
    for _ in range(300):
        shape, accepted = control.choose(length=9, left=ENDLESS), 0
        while accepted < shape.depth and rng.random() < share[shape.widths]:
            accepted += 1
        control.learn(shape, [accepted], length=9, seconds=cost[shape.widths])
        used[shape.widths] += 1
    assert used[(4, 8, 8)] > 200


def test_a_cycle_at_the_end_drafts_no_more_than_is_wanted():
    control = Control(SHAPES, Costs())
    ChainMachine(control, 0.3, 5.0).run(0.99, 100)
    assert [control.choose(length=1000, left=left).depth for left in (9, 3, 2, 1)] == [8, 2, 1, 0]
    assert control.paused  # at a text's end: what plain cycles take alone is not known yet
    control = Control(SHAPES, known_times(50.0), restarts=False)
    for left, paused in ((averages.TIMES + 2, False), (averages.TIMES + 1, True)):
        assert not control.choose(length=1000, left=left).depth and control.paused == paused


def test_a_first_time_that_was_an_accident_is_forgotten():
    costs, shape = Costs(), chain(2)
    for seconds in (9.0, 1.0, 1.1):
        costs.learn(0, shape, 100, seconds)
    assert costs.of(0, shape, 100) == 1.1
    assert costs.of(0, chain(1), 100) is None and costs.of(1, shape, 100) is None
    assert costs.of(0, shape, 5000) == 1.1 and costs.of(0, shape, 20) is None
    costs.learn(0, shape, 5000, 4.0)
    assert costs.of(0, shape, 5000) == 1.1  # one is not enough
    costs.learn(0, shape, 5000, 4.2)
    assert (costs.of(0, shape, 5000), costs.of(0, shape, 100)) == (4.0, 1.1)


def test_acceptance_level_by_level():
    known, four = Acceptance(), levels(chain(4))
    assert known.rates(four) == pytest.approx([0.8] * 4)
    known.learn(chain(4), [2])  # two hits, a miss, one level not tried
    assert known.rates(four) == pytest.approx([0.9, 0.95, 0.475, 0.475])
    assert known.tokens(levels(chain(2))) == pytest.approx(1 + 0.9 + 0.9 * 0.95)
    assert known.tokens(four[:1]) == pytest.approx(1.9) and known.tokens(()) == 1
    assert known.rates(levels(TreeShape((4, 8)))) == pytest.approx([0.8, 0.8])  # trees are not chains
    assert known.rates(levels(TreeShape((1,), ChildChoice.IID))) == [0.8]


def test_a_call_starts_from_the_acceptance_of_earlier_ones_and_soon_leaves_it():
    past, four = Acceptance(), levels(chain(4))
    for _ in range(100):
        Acceptance(past).learn(chain(4), [2])
    call = Acceptance(past)
    assert call.rates(four) == pytest.approx([1.0, 1.0, 0.0, 0.0])
    for _ in range(8):
        call.learn(chain(1), [0])
    assert call.rates(four)[0] < 0.35 < Acceptance(past).rates(four)[0]
    for _ in range(120):
        call.learn(chain(0), [0])
    assert min(call.rates(four)) > 0.6, "what was bad is tried again"
    fresh = Acceptance(Acceptance())
    fresh.learn(chain(4), [2])
    assert fresh.rates(four) == pytest.approx([0.9, 0.95, 0.475, 0.475]), "without a past"
    for _ in range(200_000):  # an hour of plain decoding: weights are below the smallest number
        past.learn(chain(0), [0])
    assert Acceptance(past).rates(four) == pytest.approx([0.8] * 4)


def test_budgets_are_kept_and_gains_are_not_without_end():
    """Shares in plain seconds of 1: what is saved, what gains add to it, and the part of the whole."""
    costs = Costs()
    (one, _), (other, _) = costs.past("one text"), costs.past("eight texts")
    share = averages.MAX_LOSS
    most_s = share * averages.RESERVE
    assert one.affords(100 * share, 100.0) and not one.affords(101 * share, 100.0)
    for _ in range(1000):
        one.add(1, None, 1.0)
    assert one.affords(1000 * share, 100.0) and not one.affords(1001 * share, 100.0)
    assert not other.affords(101 * share, 100.0), "kinds do not mix"
    one.add(2000, 1000.0, 1.0)
    assert one.affords(most_s, 100.0) and not one.affords(most_s + 0.1, 100.0)
    one.add(2000, 1000.0, 1.0, start_s=7.0)
    assert one.affords(most_s + 7.0) and not one.affords(most_s + 7.1)
    one.lose(most_s + 7.0)
    assert not one.affords(0.1, 100.0) and not other.affords(0.1, 100.0), "all kinds together"


def test_savings_of_slow_cycles_outlast_a_fast_call():
    """Plain cycles of 10 s and of 0.1 s by turns: savings of the slow are not cut by the fast."""
    costs = Costs()
    (slow, _), (fast, _) = costs.past("eight long texts"), costs.past("one short text")
    slow.add(200, 1900.0, 10.0)
    saved_s = 100.0 + 200 * 10 * averages.MAX_LOSS
    fast.add(1, 0.1, 0.1)
    assert slow.affords(saved_s) and not slow.affords(saved_s + 0.1)
    assert not fast.affords(10.0 * averages.MAX_LOSS + 0.01, 10.0)
    fast.lose(50.0)
    assert slow.affords(saved_s - 50.0) and not slow.affords(saved_s - 49.0), "all together"


def test_texts_that_differ_are_counted_together():
    """Of two texts one accepts all and one nothing: 3 tokens a cycle on average, not what mean rates give."""
    known = Acceptance()
    for _ in range(400):
        known.learn(chain(4), [4, 0])
    assert known.tokens(levels(chain(4))) == pytest.approx(3.0, abs=0.05)
    assert known.rates(levels(chain(4)))[1] > 0.95


def test_menus():
    assert [shape.depth for shape in AUTO.shapes(object(), sampled=False)] == [0, 1, 2, 3, 4, 6, 8]
    assert {shape.children for shape in AUTO.shapes(object(), sampled=True)[1:]} == {ChildChoice.IID}
    assert AUTO.shapes(None, sampled=False) == (PLAIN,)
    mixed = ShapeChoice(((4, 8), (1, 1), ())).shapes(object(), sampled=True)
    assert mixed == (PLAIN, TreeShape((1, 1), ChildChoice.IID), TreeShape((4, 8)))
    offered = AUTO.shapes(noisy_longspec(micro()), sampled=False)
    assert {shape.widths for shape in offered[1:]} == set(LongSpecRuntime.offers)
    with pytest.raises(ConfigError, match=r"\[\[1, 1\]\] ask for a draft"):
        Engine(micro()).generate(ONE, max_new_tokens=4, shape=ShapeChoice(((1, 1),)))
    small = Engine(micro(), Parts(draft=noisy_longspec(micro())), limits=Limits(nodes=8))
    assert [one.n_nodes for one in small._shapes(AUTO, Sampling())] == [1, 3, 5]
    with pytest.raises(ConfigError, match="nodes=8; narrow it"):
        small.generate(ONE, max_new_tokens=4, shape=ShapeChoice(((1,) * 20,)))


@pytest.fixture
def clock(monkeypatch) -> Callable[[TreeShape], float]:
    """Cycles take what this says, not what they do."""

    def seconds(shape: TreeShape) -> float:
        return 5.0 + 1.0 * shape.depth + 0.02 * shape.n_nodes

    def taken(shape: TreeShape, drafts: bool) -> float:
        return seconds(shape) - 0.5 * (not drafts)

    class FakeStopwatch:
        def __init__(self, device: object) -> None:
            self.took = 2.0  # what a draft takes to begin anew

        def stop(self) -> None:
            pass

        def seconds(self) -> float:
            return self.took

    run = captured.ShapeCycles.run

    def timed(self, shape, *, timed, drafts):
        news, hook = run(self, shape, timed=timed, drafts=drafts)
        if hook is not None:
            hook.took = taken(shape, drafts)
        return news, hook

    monkeypatch.setattr(captured, "Stopwatch", FakeStopwatch)
    monkeypatch.setattr(captured.ShapeCycles, "run", timed)
    return seconds


@pytest.mark.corners
@pytest.mark.parametrize("prompts", [ONE, THREE], ids=["one", "three"])
@pytest.mark.parametrize("capture", [False, True], ids=["uncaptured", "captured"])
def test_greedy_texts_are_the_plain_ones(capture, prompts, tapes, clock):  # noqa: F811
    """Cycles of several shapes work on one state; graphs of all of them are kept for later calls."""
    target = micro()
    texts = Engine(target, capture=False).generate(prompts, max_new_tokens=90, ignore_eos=True).tokens
    parts = Parts(draft=Recall(texts), name="recall")
    engine = Engine(target, parts, capture=capture)
    made = []
    for menu in (AUTO, ShapeChoice(((1, 1), (2, 4), (3, 4, 2))), AUTO, TreeShape((1, 1))):
        engine.costs = Costs()  # what was learned would leave one shape
        out = engine.generate(prompts, max_new_tokens=90, shape=menu, ignore_eos=True)
        assert out.tokens == texts
        assert sum(out.stats.shapes.values()) == out.stats.target_forwards - 1
        made.append(len(tapes))
        if isinstance(menu, ShapeChoice):
            assert len(out.stats.shapes) > 1 and out.stats.tau > 2
            cycles = Counter(cycle.drafted for cycle in out.stats.rows[0])
            assert all(count <= sum(n for w, n in out.stats.shapes.items() if len(w) == depth)
                       for depth, count in cycles.items())  # fmt: skip
    if capture:
        assert made[0] > 2 and made[2] - made[1] <= 2 and made[3] - made[2] <= 1


def test_clients_with_temperatures_of_their_own_share_what_is_learned(monkeypatch):
    kinds = []

    class Noting(Control):
        def __init__(self, shapes, costs, kind=(), **how):
            kinds.append(kind)
            super().__init__(shapes, costs, kind, **how)

    monkeypatch.setattr(engine_module, "Control", Noting)
    target = micro()
    engine = Engine(target, Parts(draft=noisy_longspec(target), name="longspec"), capture=False)

    def kinds_of(*samplings):
        kinds.clear()
        for sampling in samplings:
            engine.generate(ONE, max_new_tokens=4, sampling=sampling, shape=AUTO)
        return {*kinds}

    warm = kinds_of(Sampling(0.5, seed=1), Sampling(0.9, seed=2))
    cut = kinds_of(Sampling(0.5, top_p=0.9), Sampling(0.7, top_k=20))
    greedy = kinds_of(Sampling(), Sampling(seed=5))
    assert len(warm) == len(cut) == len(greedy) == 1 and len(warm | cut | greedy) == 3


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_p=0.95, seed=3)], ids=["greedy", "warm"])
def test_a_draft_with_a_ring_of_its_own(sampling, tapes, clock):  # noqa: F811
    """Its ring grows with the shapes: graphs over a smaller one are never replayed."""
    target = micro()
    plain = Engine(target, capture=False).generate(THREE, max_new_tokens=30, sampling=sampling)
    engine = Engine(target, Parts(draft=noisy_longspec(target), name="longspec"), capture=True)
    small = TreeShape((2,))
    for shape in (small, ShapeChoice(((2,), (2, 2), (3, 4, 2))), small, ShapeChoice(((2,), (4, 8, 8)))):
        out = engine.generate(THREE, max_new_tokens=30, sampling=sampling, shape=shape)
        assert out.tokens == plain.tokens, shape


@pytest.mark.parametrize("capture", [False, True], ids=["uncaptured", "captured"])
def test_a_paused_draft_is_restarted_with_the_text(capture, tapes, clock, monkeypatch):  # noqa: F811
    """It then holds what it would hold had it heard of every token, and the text is the plain one."""
    target = micro()
    plain = Engine(target, capture=False).generate(THREE, max_new_tokens=150, ignore_eos=True)
    draft, found = noisy_longspec(target), []
    start = draft.start

    def begin(tokens_BS, n_B, step, cache):
        start(tokens_BS, n_B, step, cache)
        assert n_B.tolist() == cache.len_B.tolist()
        whole = [p + t for p, t in zip(THREE, plain.tokens, strict=True)]
        assert all(whole[b][:n] == tokens_BS[b, :n].tolist() for b, n in enumerate(n_B.tolist()))
        found.append(int(n_B[0]))

    monkeypatch.setattr(draft, "start", begin)
    monkeypatch.setattr(control_module, "MEMORY", 8)
    monkeypatch.setattr(averages, "MAX_LOSS", 0.06)
    out = Engine(target, Parts(draft=draft, name="longspec"), capture=capture).generate(
        THREE, max_new_tokens=150, shape=ShapeChoice(((1,), (1, 1))), ignore_eos=True
    )
    assert out.tokens == plain.tokens and len(found) > 1 and (1,) in out.stats.shapes


class SlowStart(captured.Stopwatch):
    """A draft's start takes a minute, as far as `decode=auto` knows."""

    def seconds(self) -> float:
        return 60.0


@pytest.mark.parametrize("capture", [False, True], ids=["uncaptured", "captured"])
def test_a_draft_is_left_out_of_calls_in_which_its_start_does_not_pay(capture, tapes, clock, monkeypatch):  # noqa: F811
    """Two starts are measured; calls without the draft save for the next, which a long call brings in."""
    monkeypatch.setattr(engine_module, "Stopwatch", SlowStart)
    target = micro()
    texts = Engine(target, capture=False).generate(THREE, max_new_tokens=200, ignore_eos=True).tokens
    engine = Engine(target, Parts(draft=Recall(texts), name="recall"), capture=capture)

    def drafts(tokens: int) -> bool:
        out = engine.generate(THREE, max_new_tokens=tokens, shape=AUTO, ignore_eos=True)
        assert out.tokens == [text[:tokens] for text in texts]
        return out.stats.draft_bytes > 0

    assert [drafts(20) for _ in range(5)] == [True, True, False, False, False]
    before_s = engine.costs.budget.plain_total_s
    assert not drafts(200), "it would pay, but is not affordable yet"
    assert engine.costs.budget.plain_total_s - before_s == pytest.approx(199 * (clock(PLAIN) - 0.5))
    ((budget, _),) = engine.costs._past.values()
    budget.add(3000, None, 4.5, start_s=60.0)  # as other calls would
    assert not drafts(20) and drafts(200)


def test_a_start_counts_where_the_cache_is_not_decoded_from_static_buffers(clock, monkeypatch):
    """KVzap's cache that goes on evicting: whether it is captured is known after the prompt only."""
    monkeypatch.setattr(engine_module, "gains", lambda target: True)
    monkeypatch.setattr(engine_module, "_WORTH", 1)
    monkeypatch.setattr(engine_module, "Stopwatch", SlowStart)
    target = micro()
    thinned = attached("kvzap", target, {"budget_tokens": 12, "decoding": True}, hidden_dim=8)
    how = {"max_new_tokens": 20, "ignore_eos": True}
    texts = Engine(target, thinned, capture=False).generate(THREE, **how).tokens
    engine = Engine(target, Parts(draft=Recall(texts), evictor=thinned.evictor, name="recall"))
    started = [engine.generate(THREE, shape=AUTO, **how).stats.draft_bytes > 0 for _ in range(4)]
    assert started == [True, True, False, False]


def test_quantspec_decodes_its_own_cache(clock):
    target = random_target(ONE_LAYER, seed=3, dtype=torch.float64)
    parts = attached("quantspec", target)
    undrafted = Engine(target, Parts(cache=parts.cache, name="quantspec"), capture=False)
    prompts = [[token % 61 for token in ONE[0] * 23], ONE[0][:1] * 140]
    plain = undrafted.generate(prompts, max_new_tokens=130, ignore_eos=True)
    for capture in (False, True):
        out = Engine(target, parts, capture=capture).generate(
            prompts, max_new_tokens=130, shape=AUTO, ignore_eos=True
        )
        assert out.tokens == plain.tokens and len(out.stats.shapes) > 1


def laws(target: ToyTarget, prompt: list[int], text: list[int]) -> torch.Tensor:
    """The target's exact law of each token of a text, given all before it."""
    whole = torch.tensor(prompt + text)
    state = target.table_SVE[torch.arange(len(whole)) % 97, whole].cumsum(0)
    return probs(torch.sin(state) @ target.out_EV, WARM)[len(prompt) - 1 : -1]


def surprise(claimed: ChildChoice | None, children: ChildChoice) -> tuple[float, Counter]:
    """How far the texts' log probability lies from what the target's law lets expect, in standard deviations.

    Over many short runs, whose depths follow what was accepted in them. Given all before it, each token adds
    its log probability less that law's mean of it: a martingale, if the token was drawn from the law.
    """
    target, used, excess, variance = ToyTarget(8), Counter(), 0.0, 0.0
    engine = Engine(target, Parts(draft=OracleDraft(target, noise=0.6, children=claimed)))
    menu = ShapeChoice(((1,), (1, 1), (2, 2)), children)
    for call in range(24):
        ids = range(4 * call, 4 * call + 4)
        out = engine.generate(
            [[1, 2]] * 4, max_new_tokens=40, sampling=WARM, shape=menu, ignore_eos=True, sequence_ids=ids
        )
        for text in out.tokens:
            p_TV = laws(target, [1, 2], text)
            log_TV = p_TV.log()
            mean_T = (p_TV * log_TV).sum(1)
            excess += float((log_TV.gather(1, torch.tensor(text)[:, None])[:, 0] - mean_T).sum())
            variance += float(((p_TV * log_TV**2).sum(1) - mean_T**2).sum())
        used.update(out.stats.shapes)
    return excess / variance**0.5, used


@pytest.mark.parametrize("children", list(ChildChoice))
def test_sampled_texts_follow_the_targets_law(children, clock):
    """Depths differ from cycle to cycle, by what was accepted before: the law must not notice."""
    deviations, used = surprise(None, children)
    assert abs(deviations) < 3.3 and len([count for count in used.values() if count > 20]) > 1


def test_a_wrong_law_is_seen(clock):
    """A beam that claims to have been drawn gives likely tokens too often."""
    assert surprise(ChildChoice.IID, ChildChoice.POINT)[0] > 6


def test_equal_news_give_equal_choices(clock):
    """No clock, no coins: a run can be repeated where cycles take what they took."""
    target = micro()
    texts = Engine(target, capture=False).generate(THREE, max_new_tokens=60, ignore_eos=True).tokens
    runs = [
        Engine(target, Parts(draft=Recall(texts)), capture=False).generate(
            THREE, max_new_tokens=60, shape=AUTO, ignore_eos=True
        )
        for _ in range(2)
    ]
    assert runs[0].stats.rows == runs[1].stats.rows and len(runs[0].stats.shapes) > 1


@pytest.mark.gpu
def test_graphs_of_several_shapes_share_a_pool():
    """In fp32, as the other tests of graphs; costs are the device's own."""
    target = random_target("llama_micro", dtype=torch.float32, device="cuda")
    draft = noisy_longspec(target)
    draft.draft.to("cuda")
    plain = Engine(target).generate(THREE, max_new_tokens=200, ignore_eos=True)
    engine = Engine(target, Parts(draft=draft, name="longspec"), capture=True)
    for _ in range(2):
        out = engine.generate(THREE, max_new_tokens=200, ignore_eos=True, shape=AUTO)
        assert out.tokens == plain.tokens and out.stats.shapes
    pools = {cycles.pool for cycles in engine._kept._cycles.values() if cycles.pool is not None}
    assert len(pools) == 1
    assert all(0 < row["cycle_ms"] < 1000 for row in engine.costs.table())


def test_cycles_without_the_draft_lose_nothing():
    """A time of plain decoding that was measured in a fast moment must not make later plain cycles a loss."""
    costs, plain = Costs(), TreeShape(())
    control = Control((plain, TreeShape((1,))), costs)
    for seconds in (1.0, 1.0):
        assert control.choose(length=9, left=60) == plain and not control.paused
        control.learn(plain, [0], length=9, seconds=seconds)
    before_s = costs.budget.lost_s
    control.paused = True
    for _ in range(40):
        assert control.choose(length=9, left=1) == plain and control.paused
        control.learn(plain, [0], length=9, seconds=1.5)
    assert costs.budget.lost_s == control.budget.lost_s == before_s == 0.0
    assert costs.budget.plain_total_s == 41.0  # all but the first, before which no time was known
    chosen = []
    while TreeShape((1,)) not in chosen and len(chosen) < 100:
        chosen.append(control.choose(length=9, left=1000))
        control.learn(chosen[-1], [0], length=9, seconds=3.0 if chosen[-1].depth else 1.5)
    assert costs.budget.lost_s > 0.0
