"""A machine of known costs and acceptance, on which a controller of `decode=auto` chooses cycle by cycle."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from longtrain.decoding.control import Control
from longtrain.decoding.roles import TreeShape


def first_coins(rng: random.Random, shape: TreeShape, rate: float) -> int:
    """Accepted drafts of a path if each is accepted with probability `rate`."""
    return next((n for n in range(shape.depth) if rng.random() >= rate), shape.depth)


class Machine:
    """Counts tokens and seconds of one call. The news of a cycle is read one cycle late.

    Args:
        control: chooses the shapes.
        cost: shape -> seconds of a cycle.
        heard_s: seconds of the draft in a plain cycle.
        restart_s: seconds of its restart.
        look_restart_s: seconds of the start of look-up alone, which takes the place of a draft that cannot be
            restarted; None: the draft can.
    """

    def __init__(
        self,
        control: Control,
        cost: Callable[[TreeShape], float],
        *,
        heard_s: float = 0.0,
        restart_s: float = 0.0,
        look_restart_s: float | None = None,
    ) -> None:
        self.control, self.cost = control, cost
        self._look_restart_s = look_restart_s
        self.heard_s, self.restart_s = heard_s, restart_s
        self.tokens, self.seconds = 0, 0.0
        self.depths: list[int] = []
        """Depth of each cycle's shape."""
        self._sent: deque[tuple[TreeShape, int, dict[str, Any]]] = deque()

    def look_up_alone(self) -> None:
        """Look-up alone takes the draft's place."""
        assert self._look_restart_s is not None
        self.heard_s, self.restart_s = 0.0, self._look_restart_s

    def cycle(self, accepted: Callable[[TreeShape], int], *, length: int, left: int) -> None:
        """One cycle: a shape is chosen, `accepted` says how many of its drafts are, and time passes."""
        was_paused = self.control.paused
        shape = self.control.choose(length=length, left=left)
        paused = self.control.paused
        if was_paused and not paused and self._look_restart_s is not None:
            self.look_up_alone()
        restart_s = self.restart_s if was_paused and not paused else None
        seconds = self.cost(shape) + (0.0 if paused else self.heard_s)
        count = accepted(shape)
        self.tokens += 1 + count
        self.seconds += seconds + (restart_s or 0.0)
        self.depths.append(shape.depth)
        self._sent.append((shape, count, {"seconds": seconds, "restart_s": restart_s}))

    def hear(self, *, length: int, late: int = 1) -> None:
        """Tell the controller of all cycles but the last `late`."""
        while len(self._sent) > late:
            shape, count, about = self._sent.popleft()
            self.control.learn(shape, [count], length=length, **about)
