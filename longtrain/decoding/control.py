"""Draft lengths chosen at run time (`decode=auto`): the shape with the most expected tokens a second.

Two measurements decide: how often the target accepted drafts at each level, and how long a cycle of each
shape took; plain decoding is one of the shapes. The choice depends on past cycles alone, never on the drafts
of the coming one, so the distribution of the text is that of any fixed shape. The time that drafting loses
against plain decoding is counted, and a shape is only tried if the call can afford it.
"""

from __future__ import annotations

from collections import deque
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
from longtrain.decoding.roles import ChildChoice, Draft, TreeShape, completed, usual_children
from longtrain.errors import ConfigError

Widths: TypeAlias = tuple[int, ...]
CHAINS: tuple[Widths, ...] = tuple((1,) * n for n in (1, 2, 3, 4, 6, 8))
"""The shapes of a draft that offers no others."""
LEVEL_COST = 0.25
"""Expected cost of a level of drafts, as a share of a plain cycle, before any shape was measured."""
STARTED = 8
"""Cycles without accepted drafts that must be affordable after the draft's start, or it would be in vain, and
those after which it is, as long as it is not known what it costs in plain cycles."""
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


class _Chosen(NamedTuple):
    """A chosen cycle: seconds that it may lose, and the kind of its time."""

    risk_s: float
    kind: Hashable


class Control:
    """Chooses the shape of every cycle of one call of `Engine.generate`.

    It takes the shape with the most expected tokens a second among those that the call can afford
    (`LossBudget`). A shape without measured times gets an estimate from the others; if that makes it the
    best, it is tried and so measured. Budget, times and acceptance are those of all calls of this kind.

    A draft costs time in plain cycles too, since it processes every new token. So it is paused, that is left
    out of plain cycles, where this costs more than the call can afford, or, once, after `STARTED` more plain
    cycles than others without knowing what it costs. A paused draft that can start from a text alone is
    restarted for its next trial; any other is left out for the rest of the call, and only look-up joined to
    it may return.

    Args:
        shapes: smallest first; the first one is plain decoding.
        costs: measured times; kept from call to call.
        kind: what these cycles' times depend on beside shape and length, for `costs`.
        restarts: True for a draft that can be restarted (`Draft.begins_anew`).
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
        growth: Callable[[int, int], float] = lambda tokens, length: 1.0,
    ) -> None:
        self._growth_of = growth
        self._growth: list[float] = []  # of each shape's verification, in this octave of lengths
        self.costs, self.kind, self.restarts = costs, kind, restarts
        # kinds of times, by who hears of a cycle's tokens too: nobody; the draft, or look-up alone
        self._alone, self._heard = (kind, "alone"), kind
        self.budget, past = costs.past(kind)
        self.acceptance = Acceptance(past)
        self._sent = deque[_Chosen]()  # the cycles whose results have not arrived
        self.paused = False
        """True if the draft is left out of the cycle that was chosen last."""
        self._known: list[float | None] = []  # seconds of each shape; the first: plain, the draft not paused
        self._alone_s: float | None = None  # seconds of a plain cycle with the draft paused
        self._offer(shapes)
        self._plain_run = 0  # plain cycles in a row, or since the draft was paused
        self._in_vain = 0  # plain cycles with the draft not paused, less those that drafted
        self._planned = 0  # most new tokens of a sequence of this call
        self._start_s = 0.0  # of the draft's start with the prompts; 0: not known
        self._restart_s: float | None = None  # of a restart of what decodes this call; None: not known

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

    def begin(self, prompt_tokens: int, *, length: int, planned: int, hopeless: bool = False) -> bool:
        """Pause the draft from the start where that would not pay (`_start_pays`), or leave it out.

        Args:
            prompt_tokens: tokens of all prompts.
            length: tokens of the longest.
            planned: most new tokens of a sequence.
            hopeless: True leaves it out in any case.

        Returns:
            False if the draft is left out of the call; look-up alone takes its place unless `paused`.
        """
        self.paused = not self._start_pays(prompt_tokens, length, planned)
        if not hopeless and (self.restarts or not self.paused):
            return True
        self.paused = not self.leave_out()
        return False

    def leave_out(self) -> bool:
        """Leave a draft that cannot be restarted out of the rest of the call.

        Returns:
            True if look-up alone takes its place, which can be started at any time.
        """
        alone = [shape for shape in self.shapes if not shape.widths]
        self._restart_s = None
        self.restarts = len(alone) > 1
        if self.restarts:
            self._heard = self.kind, "look-up"
            self._offer(alone)
        return self.restarts

    def learn_start(self, seconds: float, prompt_tokens: int) -> None:
        """Add the time that the draft's start took with the prompts: lost, as it could have been left out.

        The first two of an engine do not count: there is compilation in the first, and what the second takes
        could not be known.
        """
        self.costs.learn_start(prompt_tokens, seconds)
        if self.costs.starts > 1:
            self._restart_s = seconds
        if self.costs.starts > TIMES:
            self.budget.lose(seconds)

    def choose(self, *, length: int, left: int) -> TreeShape:
        """Choose the next cycle's shape, and set `paused` if the draft is left out of it.

        Args:
            length: tokens of the longest sequence.
            left: most tokens that any sequence may still get.
        """
        if not self.free:
            return self.shapes[0]
        best, plain_s, pauses = 0, None, False
        self._planned = max(self._planned, left)
        # choosing takes host time: seldom while paused
        if not self.paused or self._plain_run % MEMORY == 0 or self._plain_run == TIMES + 1:
            self._look_up(length)
            plain_s = self._plain_s
            measures = plain_s is None or self.costs.count % REFRESH < TIMES
            if plain_s is not None and not measures and (self.restarts or not self.paused):
                restart_s = plain_s if self._restart_s is None else self._restart_s
                best = self._best(left, plain_s, restart_s if self.paused else 0.0)
            pauses = not best and not self.paused and not measures and self._pauses(left)
            self.paused = pauses or (self.paused and not best)
            if pauses and not self.restarts:
                self.leave_out()
        self._plain_run = 0 if best or pauses else self._plain_run + 1  # the first ones after it are timed
        self._in_vain = max(0, self._in_vain - 1) if best else self._in_vain + 1
        risk_s = max(0.0, self._seconds(best, plain_s) - plain_s) if best and plain_s else 0.0
        self._sent.append(_Chosen(risk_s, self._alone if self.paused else self._heard))
        return self.shapes[best]

    def learn(
        self,
        shape: TreeShape,
        accepted: Sequence[int],
        *,
        length: int,
        seconds: float | None = None,
        restart_s: float | None = None,
    ) -> None:
        """Add the results of the cycle that was chosen first of those whose results have not arrived.

        Args:
            shape: shape of the drafted tree.
            accepted: number of accepted drafts of each unfinished sequence.
            length: tokens of the longest sequence.
            seconds: its time; None: not measured.
            restart_s: seconds of the draft's restart before it; None: there was none.
        """
        if not self.free:
            return
        if accepted:
            self.acceptance.learn(shape, accepted)
        kind = self._sent.popleft().kind
        if seconds is not None:
            self.costs.learn(kind, shape, length, seconds)
            if self._octave == octave_of(length) and kind in (self._alone, self._heard):
                cost = self.costs.of(kind, shape, length)
                if kind == self._alone:
                    self._alone_s = cost
                else:
                    self._known[self.shapes.index(shape)] = self._known_s(shape, length)
                seconds = cost or seconds
        tokens = sum(accepted) / len(accepted) + 1 if accepted else 0.0
        if restart_s is not None:
            self._restart_s = restart_s
            self.budget.lose(restart_s)
        if (plain_s := self._plain_s) is not None:
            # without the draft a cycle is plain decoding, which loses nothing, however long it took
            seconds = None if kind == self._alone else seconds
            self.budget.add(tokens, seconds, plain_s, start_s=self._start_s)

    def _start_pays(self, prompt_tokens: int, length: int, planned: int) -> bool:
        """True if the draft's start with the prompts promises to pay in this call, by the times and the
        acceptance of earlier ones, and can be afforded; True as long as its time is not known. It is
        compared with look-up alone, where that needs no start. In the first call of a kind, only what all
        calls have left unspent counts.
        """
        self._planned = planned
        self._look_up(length)
        start_s, plain_s = self.costs.start_s(prompt_tokens), self._plain_s
        if start_s is None:
            return True
        self._restart_s = self._start_s = start_s
        if plain_s is None:  # what such a call may bring in is not known
            return self.costs.budget.affords(start_s)
        best = self._best(planned, plain_s, start_s)
        return best > 0 and (self.restarts or bool(self.shapes[best].widths))  # look-up alone needs no draft

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
            risk_s += sum(one.risk_s for one in self._sent) if risk_s > 0 else 0.0
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
            # known before and answers may be short, where the draft has brought nothing for a while.
            return self.restarts or left <= TIMES + 1 or self._in_vain > STARTED
        cycles = MEMORY if self.restarts else TIMES  # one that cannot come back stays while anything is left
        return not self._affords(cycles * (with_draft_s - alone_s), alone_s)

    def _affords(self, risk_s: float, plain_s: float) -> bool:
        """True if the budget allows to lose this, the tokens that this call plans counted in advance."""
        return self.budget.affords(risk_s, plain_s * min(self._planned, RESERVE))

    def _offer(self, shapes: Sequence[TreeShape]) -> None:
        """Choose among these shapes from now on."""
        self.shapes = tuple(shapes)
        self._levels = [levels(shape) for shape in self.shapes]
        self._octave = -1  # their times are not read yet

    def _look_up(self, length: int) -> None:
        """Read the times of all shapes in a new octave of lengths; `learn` updates them within one."""
        octave = octave_of(length)
        if self._octave != octave:
            self._known = [self._known_s(shape, length) for shape in self.shapes]
            self._alone_s = self.costs.of(self._alone, self.shapes[0], length)
            self._growth = [self._growth_of(shape.n_nodes, length) for shape in self.shapes]
            self._octave = octave

    def _known_s(self, shape: TreeShape, length: int) -> float | None:
        """Measured seconds of a shape; of look-up alone until then those beside the draft, which are more."""
        own = self.costs.of(self._heard, shape, length)
        return self.costs.of(self.kind, shape, length) if own is None and shape.depth else own

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
