"""How much to draft: the shape that promises most tokens a second, chosen anew for every cycle.

Two things are known of the past: how often the target accepted drafts at each level, and how long a cycle of
each shape took. The choice for the next cycle follows from them alone, never from what that cycle will draft
or accept; so the law of the text is the same as with any fixed shape. What trials cost is counted, and none
is made that could bring a call more than a small share behind plain decoding.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from longtrain.decoding.captured import ShapeCycles, Stopwatch, TokenTransfer
from longtrain.decoding.output import Output
from longtrain.decoding.past import AHEAD, STALE, TIMES, Acceptance, Account, Costs, levels, octave_of
from longtrain.decoding.phases import CycleState
from longtrain.decoding.roles import Draft, Law, TreeShape, usual_law
from longtrain.errors import ConfigError

Widths: TypeAlias = tuple[int, ...]
CHAINS: tuple[Widths, ...] = tuple((1,) * n for n in (1, 2, 3, 4, 6, 8))
"""What is chosen among where a draft offers nothing else."""
_LEVEL = 0.25
"""Share of a plain cycle that a level of drafts is expected to cost as long as no drafting was timed."""
_PATIENCE = 4
"""Plain cycles in a row after which a draft whose next trial is too dear is left out of them."""
_HEARS = 0.01
"""Share of a plain cycle that a draft may take to hear of its token; one that takes more sleeps."""
_NAP = 32
"""Cycles without it before it may be taken in again, and so many later each time that it may not."""


@dataclass(frozen=True)
class ShapeChoice:
    """Shapes to choose among cycle by cycle; plain decoding is always one of them.

    Args:
        widths: of each shape; empty: those that the draft offers (`Draft`), else chains of 1 to 8.
        law: how children are chosen; None: as usual (`usual_law`).
    """

    widths: tuple[Widths, ...] = ()
    law: Law | None = None

    def shapes(self, draft: Draft | None, *, sampled: bool) -> tuple[TreeShape, ...]:
        """The shapes, smallest first; plain decoding alone without a draft.

        Raises:
            ConfigError: shapes are asked for, and there is no draft.
        """
        if draft is None:
            if any(self.widths):
                raise ConfigError(
                    f"shapes {[list(widths) for widths in self.widths]} ask for a draft and the engine has "
                    "none; pass an artifact that brings one"
                )
            return (TreeShape(()),)
        offered: Sequence[Widths] = self.widths or getattr(draft, "offers", CHAINS)
        found = {TreeShape(())}
        found |= {TreeShape(one, self.law or usual_law(one, sampled=sampled)) for one in offered if one}
        return tuple(sorted(found, key=lambda shape: (shape.depth, shape.n_nodes, shape.widths)))


class Control:
    """Chooses the shapes of one call of `Engine.generate`.

    Every cycle it takes the shape with the largest `tokens / seconds` among those that the call can afford
    (`Account`). The time of a shape not measured yet is guessed from those of less and greater depth; if the
    guess makes it the best, it is measured. What was learnt wears off, so a draft that was bad once is tried
    now and then. Where plain decoding stays the best and the next trial is too dear, the draft sleeps: it is
    left out of plain cycles, and taken in again for that trial if it can begin anew with a text.

    Args:
        shapes: smallest first.
        costs: kept from call to call.
        kind: of these cycles, for `costs`.
        planned: most new tokens of a text.
        wakes: whether the draft can be taken in again; one that cannot sleeps to the end of the call, and
            only where hearing of every token costs more than may be lost.

    Note: QuantSpec finds its draft length by a search for each data set and model (Appendix G); here none is
        needed, and a text whose predictability changes is followed.
    """

    def __init__(
        self,
        shapes: Sequence[TreeShape],
        costs: Costs,
        kind: Hashable = (),
        *,
        planned: int = AHEAD,
        wakes: bool = True,
    ) -> None:
        self.shapes, self.costs, self.kind, self.wakes = tuple(shapes), costs, kind, wakes
        self.acceptance, self.account = Acceptance(), Account(planned)
        self.asleep = False
        """Whether the draft is left out of the cycle that was chosen last."""
        self._levels = [levels(shape) for shape in self.shapes]
        self._known: list[float | None] = []
        self._alone_s: float | None = None  # a plain cycle without the draft
        self._octave, self._age = -1, 0
        self._plain = 0  # plain cycles in a row

    @property
    def free(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.shapes) > 1

    @property
    def times(self) -> bool:
        """Whether the time of the cycle that was chosen last is wanted."""
        return self.free and (not self.asleep or self._plain % _NAP <= TIMES)

    def choose(self, *, length: int, left: int) -> TreeShape:
        """The next cycle's shape; `asleep` says whether the draft hears of it.

        Args:
            length: tokens of the longest text.
            left: most tokens that any text lacks.
        """
        if not self.free:
            return self.shapes[0]
        if self.asleep and self._plain % _NAP:  # plain cycles of a small target leave the host no time
            self._plain += 1
            self.account.begin(0.0)
            return self.shapes[0]
        self._look_up(length)
        plain_s = self._plain_s
        best = 0 if plain_s is None else self._best(left, plain_s)
        self._plain = 0 if best else self._plain + 1
        if best:
            self.asleep = False
        elif not self.asleep:
            self.asleep = self._tires(left)
        self.account.begin(self._seconds(best, plain_s) - plain_s if best and plain_s else 0.0)
        return self.shapes[best]

    def learn(
        self,
        shape: TreeShape,
        accepted: Sequence[int],
        *,
        length: int,
        seconds: float | None = None,
        asleep: bool = False,
        waking_s: float | None = None,
    ) -> None:
        """Take in a cycle that is over.

        Args:
            shape: what was drafted.
            accepted: drafts accepted in each text that was not over.
            length: tokens of the longest text.
            seconds: the time that the cycle took; None: not measured.
            asleep: whether the draft was left out of it.
            waking_s: the time that taking the draft in again took before it; None: nothing of the kind.
        """
        if not self.free:
            return
        if accepted:
            self.acceptance.learn(shape, accepted)
        if seconds is not None:
            kind = (self.kind, "alone") if asleep else self.kind
            self.costs.learn(kind, shape, length, seconds)
            if self._octave == octave_of(length):
                cost = self.costs.of(kind, shape, length)
                if asleep:
                    self._alone_s = cost
                else:
                    self._known[self.shapes.index(shape)] = cost
                seconds = cost or seconds
        tokens = sum(accepted) / len(accepted) + 1 if accepted else 0.0
        if waking_s is not None:
            self.costs.waking_s = waking_s
            self.account.lost_s += waking_s
        self.account.end(tokens, seconds, self._plain_s)

    @property
    def _plain_s(self) -> float | None:
        """Seconds of plain decoding's cycle, as it is without a draft where that was measured."""
        known = [one for one in (self._alone_s, *self._known[:1]) if one is not None]
        return min(known, default=None)

    def _best(self, left: int, plain_s: float) -> int:
        """The shape of most tokens a second that the call can afford."""
        best, most, waking_s = 0, 1.0 / plain_s, 0.0
        if self.asleep:
            if not self.wakes:
                return 0
            known_s = self.costs.waking_s
            waking_s = plain_s if known_s is None else known_s
        timed = any(one is not None for one in self._known[1:])
        for i in range(1, len(self.shapes) if timed else 2):  # the first trials are the cheapest
            seconds = self._seconds(i, plain_s)
            speed = self.acceptance.tokens(self._levels[i][: left - 1]) / seconds
            if speed > most and self.account.affords(seconds - plain_s, plain_s, before_s=waking_s):
                best, most = i, speed
        return best

    def _tires(self, left: int) -> bool:
        """Whether the draft is left out of plain cycles from now on."""
        known_s, alone_s = self._known[0], self._alone_s
        if known_s is None:
            return False
        if alone_s is None and left <= TIMES + 1:  # no draft is needed any more: time for a look at them
            return True
        if alone_s is None:  # one nap tells what hearing of each token costs
            return self.wakes and self._plain > _PATIENCE
        if not self.wakes:
            return not self.account.affords(known_s - alone_s, alone_s)
        poor = not self.account.affords(self._seconds(1, alone_s) - alone_s, alone_s)
        return poor and self._plain > _PATIENCE and known_s > (1 + _HEARS) * alone_s

    def _look_up(self, length: int) -> None:
        """What cycles of each shape take; all are looked up now and then, for times that are too old."""
        octave = octave_of(length)
        self._age += 1
        if self._octave != octave or self._age >= STALE // 8:
            self._known = [self.costs.of(self.kind, shape, length) for shape in self.shapes]
            self._alone_s = self.costs.of((self.kind, "alone"), self.shapes[0], length)
            self._octave, self._age = octave, 0

    def _seconds(self, i: int, plain_s: float) -> float:
        """The cost of a shape: as measured, or else by a straight line through the known ones around it."""
        known, depth = self._known[i], self.shapes[i].depth
        if known is not None:
            return known
        pairs = zip(self.shapes[1:], self._known[1:], strict=True)
        points = [(0, plain_s), *((shape.depth, cost) for shape, cost in pairs if cost is not None)]
        below = max((at for at in points if at[0] <= depth), key=lambda at: (at[0], -at[1]))
        above = min((at for at in points if at[0] > depth), default=None)
        if above is not None:
            slope = (above[1] - below[1]) / (above[0] - below[0])
        else:
            slope = (below[1] - plain_s) / below[0] if below[0] else _LEVEL * plain_s
        return below[1] + max(0.0, slope) * (depth - below[0])


class _Sent(NamedTuple):
    """A cycle whose tokens have not arrived: what was drafted, whether the draft slept, and both times."""

    shape: TreeShape
    watch: Stopwatch | None
    asleep: bool
    waking: Stopwatch | None


def run_cycles(
    cycles: ShapeCycles,
    control: Control,
    out: Output,
    texts: CycleState,
    begin_anew: Callable[[], None],
    *,
    before: int,
    late: int,
) -> Counter[TreeShape]:
    """Run cycles until every text is over.

    Args:
        cycles: cycles of the shapes that `control` chooses.
        control: hears of a cycle when its tokens arrive.
        out: takes the tokens.
        texts: closed as they end.
        begin_anew: begins the draft anew with the texts as `out` has them.
        before: tokens of the longest prompt.
        late: cycles that tokens are read behind.

    Returns:
        How many cycles of each shape were run.
    """
    used: Counter[TreeShape] = Counter()
    transfer, sent = TokenTransfer(late), deque[_Sent]()
    most = out.ending.max_new_tokens
    length = 0

    def take_in(*, rest: bool) -> None:
        for emitted in transfer.arrived(rest=rest):
            one = sent.popleft()
            accepted = [new.accepted for new, end in zip(emitted, out.finish, strict=True) if not end]
            seconds, waking_s = (watch.seconds() if watch else None for watch in (one.watch, one.waking))
            control.learn(
                one.shape, accepted, length=length, seconds=seconds, asleep=one.asleep, waking_s=waking_s
            )
            texts.close(out.take(emitted, one.shape))

    def wake() -> None:
        take_in(rest=True)
        begin_anew()

    while not out.done:
        lengths, slept = out.lengths(), control.asleep
        length = before + max(lengths)
        if used.total() < most - 1:  # each gives every text at least one token
            shape = control.choose(length=length, left=most - min(lengths))
            waking = cycles.between(wake) if slept and not control.asleep else None
            if out.done:
                break
            drafts = not control.asleep
            news_BX, watch = cycles.run(shape, timed=control.times, drafts=drafts)
            transfer.send(news_BX)
            sent.append(_Sent(shape, watch, not drafts, waking))
            used[shape] += 1
        take_in(rest=used.total() == most - 1)
    return used
