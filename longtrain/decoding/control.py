"""Draft lengths chosen at run time (`decode=auto`): the shape with the most expected tokens a second.

Two measurements decide: how often the target accepted drafts at each level, and how long a cycle of each
shape took; plain decoding is one of the shapes. The choice depends on past cycles alone, never on the drafts
of the coming one, so the distribution of the text is that of any fixed shape. The time that drafting loses
against plain decoding is counted, and a shape is only tried if the call can afford it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from longtrain.decoding.averages import (
    MEMORY,
    RESERVE,
    TIMES,
    Acceptance,
    Costs,
    levels,
    octave_of,
    work_of,
)
from longtrain.decoding.captured import ShapeCycles, Stopwatch
from longtrain.decoding.decode_step import CycleState
from longtrain.decoding.output import Output, TokenTransfer
from longtrain.decoding.roles import ChildChoice, Draft, TreeShape, completed, usual_children
from longtrain.errors import ConfigError

Widths: TypeAlias = tuple[int, ...]
CHAINS: tuple[Widths, ...] = tuple((1,) * n for n in (1, 2, 3, 4, 6, 8))
"""The shapes of a draft that offers no others."""
LEVEL_COST = 0.25
"""Expected cost of a level of drafts, as a share of a plain cycle, before any shape was measured."""
STARTED = 8
"""Cycles without accepted drafts that must be affordable after the draft's start, or it would be in vain."""
REFRESH = 512
"""Measured cycles between two new measurements of the plain cycle, where drafting is always chosen."""


@dataclass(frozen=True)
class ShapeChoice:
    """The shapes that `decode=auto` chooses among cycle by cycle; plain decoding is always one of them.

    Args:
        widths: widths of each shape; empty: those that the draft offers (`Draft`), else chains of 1 to 8.
        children: how a draft chooses the children of a node; None: by `usual_children`.
    """

    widths: tuple[Widths, ...] = ()
    children: ChildChoice | None = None

    def shapes(self, draft: Draft | None, *, sampled: bool) -> tuple[TreeShape, ...]:
        """The shapes, smallest first; plain decoding alone without a draft.

        Raises:
            ConfigError: there are `widths`, and no draft.
        """
        if draft is None:
            if any(self.widths):
                raise ConfigError(
                    f"shapes {[list(widths) for widths in self.widths]} ask for a draft and the engine has "
                    "none; pass an artifact that brings one"
                )
            return (TreeShape(()),)
        offered: Sequence[Widths] = self.widths or getattr(draft, "offers", CHAINS)
        found = {TreeShape(()), *(TreeShape((), copied=n) for n in getattr(draft, "copies_alone", ()))}
        drafted = [
            TreeShape(one, self.children or usual_children(one, sampled=sampled)) for one in offered if one
        ]
        found |= {completed(shape, draft) for shape in drafted}
        found |= {shape for shape in drafted if shape.is_chain}  # where copies bring nothing, without them
        return tuple(sorted(found, key=cheapest_first))


def cheapest_first(shape: TreeShape) -> tuple[int, bool, int, Widths]:
    """A key that sorts shapes by the expected cost of a cycle; of equal ones, look-up alone is first."""
    return work_of(shape), bool(shape.widths), shape.n_nodes, shape.widths


class Control:
    """Chooses the shape of every cycle of one call of `Engine.generate`.

    It takes the shape with the most expected tokens a second among those that the call can afford
    (`LossBudget`). A shape without measured times gets an estimate from the others; if that makes it the
    best, it is tried and so measured. Budget, times and acceptance are those of all calls of this kind.

    A draft costs time in plain cycles too, since it processes every new token. So it is paused, that is left
    out of plain cycles, where this costs more than the call can afford, or, once, after `MEMORY` more plain
    cycles than others without knowing what it costs. A paused draft that can start from a text alone is
    restarted for its next trial; any other stays paused to the end of the call. A call begins with the draft
    paused where its start would not pay (`starts`).

    Args:
        shapes: smallest first; the first one is plain decoding.
        costs: measured times; kept from call to call.
        kind: what these cycles' times depend on beside shape and length, for `costs`.
        restarts: True for a draft that can be restarted (`Draft.begins_anew`).
        paused: True if the draft has not been started yet.
        growth: (tokens of a pass of the target, length) -> its time over that of a pass over one token, as
            expected before it is measured: with experts, a longer draft makes verification read more weights.

    Note: QuantSpec searches its draft length for each dataset and model (Appendix G); here none is needed,
        and a text whose predictability changes is followed.
    """

    def __init__(
        self,
        shapes: Sequence[TreeShape],
        costs: Costs,
        kind: Hashable = (),
        *,
        restarts: bool = True,
        paused: bool = False,
        growth: Callable[[int, int], float] = lambda tokens, length: 1.0,
    ) -> None:
        self._growth_of = growth
        self._growth: list[float] = []  # of each shape's verification, in this octave of lengths
        self.shapes, self.costs, self.kind, self.restarts = tuple(shapes), costs, kind, restarts
        self.budget, past = costs.past(kind)
        self.acceptance = Acceptance(past)
        self._risks = deque[float]()  # of the cycles whose results have not arrived
        self.paused = paused
        """True if the draft is left out of the cycle that was chosen last."""
        self._levels = [levels(shape) for shape in self.shapes]
        self._known: list[float | None] = []  # seconds of each shape; the first: plain, the draft not paused
        self._alone_s: float | None = None  # seconds of a plain cycle with the draft paused
        self._octave = -1
        self._plain_run = 0  # plain cycles in a row
        self._in_vain = 0  # plain cycles with the draft not paused, less those that drafted
        self._planned = 0  # most new tokens of a sequence of this call
        self._restart_s: float | None = None  # of the draft's start with these texts; None: not known

    @property
    def free(self) -> bool:
        """True if there is more than one shape."""
        return len(self.shapes) > 1

    @property
    def times(self) -> bool:
        """True if the next cycle is to be timed.

        Of cycles with a paused draft only the first few of `MEMORY` are: a plain cycle of a small target
        leaves the host no time for more.
        """
        return self.free and (not self.paused or self._plain_run % MEMORY <= TIMES)

    def starts(self, prompt_tokens: int, *, length: int, planned: int) -> bool:
        """True if the draft's start with the prompts promises to pay in this call, by the times and the
        acceptance of earlier ones, and can be afforded; True as long as its time is not known. It is
        compared with look-up alone, where that needs no start. In the first call of a kind, only what all
        calls have left unspent counts.

        Args:
            prompt_tokens: tokens of all prompts.
            length: tokens of the longest.
            planned: most new tokens of a sequence.
        """
        self._planned = planned
        self._look_up(length)
        start_s, plain_s = self.costs.start_s, self._plain_s
        if start_s is None:
            return True
        start_s *= prompt_tokens
        self._restart_s = self.costs.present_start_s = start_s
        if plain_s is None:  # what such a call may bring in is not known
            return self.costs.budget.affords(start_s)
        best = self._best(planned, plain_s, start_s)
        return best > 0 and (self.restarts or bool(self.shapes[best].widths))  # look-up alone needs no draft

    def learn_start(self, seconds: float, prompt_tokens: int) -> None:
        """Add the time that the draft's start took with the prompts: lost, as it could have been left out.

        The first two of an engine do not count: there is compilation in the first, and what the second takes
        could not be known.
        """
        self.costs.starts_s.append(seconds / prompt_tokens)
        if len(self.costs.starts_s) > 1:
            self._restart_s = seconds
        if len(self.costs.starts_s) > TIMES:
            self.budget.lose(seconds)

    def choose(self, *, length: int, left: int) -> TreeShape:
        """Choose the next cycle's shape, and set `paused` if the draft is left out of it.

        Args:
            length: tokens of the longest sequence.
            left: most tokens that any sequence may still get.
        """
        if not self.free:
            return self.shapes[0]
        best, plain_s = 0, None
        self._planned = max(self._planned, left)
        # choosing takes host time: seldom while paused
        if not self.paused or self._plain_run % MEMORY == 0 or self._plain_run == TIMES + 1:
            self._look_up(length)
            plain_s = self._plain_s
            measures = plain_s is None or self.costs.count % REFRESH < TIMES
            if plain_s is not None and not measures and (self.restarts or not self.paused):
                restart_s = plain_s if self._restart_s is None else self._restart_s
                best = self._best(left, plain_s, restart_s if self.paused else 0.0)
            self.paused = not best and (self.paused or (not measures and self._pauses(left)))
        self._plain_run = 0 if best else self._plain_run + 1
        self._in_vain = max(0, self._in_vain - 1) if best else self._in_vain + 1
        self._risks.append(max(0.0, self._seconds(best, plain_s) - plain_s) if best and plain_s else 0.0)
        return self.shapes[best]

    def learn(
        self,
        shape: TreeShape,
        accepted: Sequence[int],
        *,
        length: int,
        seconds: float | None = None,
        paused: bool = False,
        restart_s: float | None = None,
    ) -> None:
        """Add the results of a cycle.

        Args:
            shape: shape of the drafted tree.
            accepted: number of accepted drafts of each unfinished sequence.
            length: tokens of the longest sequence.
            seconds: its time; None: not measured.
            paused: True if the draft was left out of it.
            restart_s: seconds of the draft's restart before it; None: there was none.
        """
        if not self.free:
            return
        if accepted:
            self.acceptance.learn(shape, accepted)
        if seconds is not None:
            kind = (self.kind, "alone") if paused else self.kind
            self.costs.learn(kind, shape, length, seconds)
            if self._octave == octave_of(length):
                cost = self.costs.of(kind, shape, length)
                if paused:
                    self._alone_s = cost
                else:
                    self._known[self.shapes.index(shape)] = cost
                seconds = cost or seconds
        tokens = sum(accepted) / len(accepted) + 1 if accepted else 0.0
        if restart_s is not None:
            self._restart_s = restart_s
            self.budget.lose(restart_s)
        if self._risks:
            self._risks.popleft()
        if (plain_s := self._plain_s) is not None:
            # without the draft a cycle is plain decoding, which loses nothing, however long it took
            self.budget.add(tokens, None if paused else seconds, plain_s, start_s=self.costs.present_start_s)

    @property
    def _plain_s(self) -> float | None:
        """Seconds of a plain cycle: without a draft where that was measured."""
        known = [one for one in (self._alone_s, *self._known[:1]) if one is not None]
        return min(known, default=None)

    def _best(self, left: int, plain_s: float, start_s: float = 0.0) -> int:
        """Index of the affordable shape with which the tokens left take least time; 0: plain decoding.

        Args:
            left: most tokens that any sequence may still get.
            plain_s: seconds of a plain cycle.
            start_s: what the draft's start takes before its first cycle. Look-up alone needs none where the
                draft cannot be restarted.
        """
        best, least_s = 0, left * plain_s
        measured = any(one is not None for one in self._known[1:])
        for i in range(1, len(self.shapes) if measured else 2):  # the first trial is the cheapest one
            seconds = self._seconds(i, plain_s)
            before_s = start_s if self.restarts or self.shapes[i].widths else 0.0
            total_s = before_s + left * seconds / self.acceptance.tokens(self._levels[i][: left - 1])
            trials = TIMES if self._known[i] is None else 1  # number of them before its time is known
            risked = STARTED if before_s else trials
            risk_s = before_s + risked * (seconds - plain_s)
            risk_s += sum(self._risks) if risk_s > 0 else 0.0
            if total_s < least_s and self._affords(risk_s, plain_s):
                best, least_s = i, total_s
        return best

    def _pauses(self, left: int) -> bool:
        """True if the draft is to be left out of plain cycles from now on."""
        with_draft_s, alone_s = self._known[0], self._alone_s
        if with_draft_s is None:
            return False
        if alone_s is None:
            # Measure it: by a pause, in the last cycles, which need no draft any more, or, as the loss is not
            # known before, where the draft has long brought nothing.
            return self.restarts or left <= TIMES + 1 or self._in_vain > MEMORY
        cycles = MEMORY if self.restarts else TIMES  # one that cannot come back stays while anything is left
        return not self._affords(cycles * (with_draft_s - alone_s), alone_s)

    def _affords(self, risk_s: float, plain_s: float) -> bool:
        """True if the budget allows to lose this, the tokens that this call plans counted in advance."""
        return self.budget.affords(risk_s, plain_s * min(self._planned, RESERVE))

    def _look_up(self, length: int) -> None:
        """Read the times of all shapes in a new octave of lengths; `learn` updates them within one."""
        octave = octave_of(length)
        if self._octave != octave:
            self._known = [self.costs.of(self.kind, shape, length) for shape in self.shapes]
            self._alone_s = self.costs.of((self.kind, "alone"), self.shapes[0], length)
            self._growth = [self._growth_of(shape.n_nodes, length) for shape in self.shapes]
            self._octave = octave

    def _seconds(self, i: int, plain_s: float) -> float:
        """Seconds of a shape: measured; or the expected time of its verification, and of its levels by the
        measured shape with the nearest work. Shapes with the draft tell nothing of look-up alone, and the
        other way round.
        """
        known, work = self._known[i], work_of(self.shapes[i])
        if known is not None:
            return known
        level_s = LEVEL_COST * plain_s
        verify_s = [plain_s * growth for growth in self._growth]
        rows = zip(self.shapes[1:], self._known[1:], verify_s[1:], strict=True)
        alike = [row for row in rows if bool(row[0].widths) == bool(self.shapes[i].widths)]
        done = [(work_of(one), cost - verified) for one, cost, verified in alike if cost is not None]
        others = [(abs(one - work), one, cost) for one, cost in done]
        if others:
            _, near, cost = min(others)
            level_s = max(0.0, cost) / near
        return verify_s[i] + work * level_s


class _Sent(NamedTuple):
    """A cycle whose tokens have not arrived: its shape and time, and the pause of the draft."""

    shape: TreeShape
    stopwatch: Stopwatch | None
    paused: bool
    restart: Stopwatch | None


def run_cycles(
    cycles: ShapeCycles,
    control: Control,
    out: Output,
    texts: CycleState,
    restart: Callable[[], None],
    *,
    before: int,
    late: int,
) -> Counter[TreeShape]:
    """Run cycles until every sequence is over.

    Args:
        cycles: cycles of the shapes that `control` chooses.
        control: gets a cycle's results when its tokens arrive.
        out: collects the tokens.
        texts: state of the sequences; each is closed as it ends.
        restart: starts the draft with the sequences as they are in `out`.
        before: tokens of the longest prompt.
        late: number of cycles that may be launched before the tokens of an earlier one are read.

    Returns:
        the number of cycles of each shape.
    """
    used: Counter[TreeShape] = Counter()
    transfer, sent = TokenTransfer(late), deque[_Sent]()
    most = out.ending.max_new_tokens
    length = 0

    def take_in(*, rest: bool) -> None:
        for emitted in transfer.arrived(rest=rest):
            one = sent.popleft()
            accepted = [new.accepted for new, end in zip(emitted, out.finish, strict=True) if not end]
            seconds, restart_s = (
                watch.seconds() if watch else None for watch in (one.stopwatch, one.restart)
            )
            control.learn(
                one.shape, accepted, length=length, seconds=seconds, paused=one.paused, restart_s=restart_s
            )
            texts.close(out.take(emitted, one.shape))

    def restart_with_all() -> None:
        take_in(rest=True)  # a restart needs the tokens that are still on their way
        restart()

    while not out.done:
        lengths, was_paused = out.lengths(), control.paused
        length = before + max(lengths)
        if used.total() < most - 1:  # each cycle gives every sequence at least one token
            shape = control.choose(length=length, left=most - min(lengths))
            restarted = cycles.between(restart_with_all) if was_paused and not control.paused else None
            if out.done:
                break
            news_BX, stopwatch = cycles.run(shape, timed=control.times, drafts=not control.paused)
            transfer.send(news_BX)
            sent.append(_Sent(shape, stopwatch, control.paused, restarted))
            used[shape] += 1
        take_in(rest=used.total() == most - 1)
    return used
