"""One packed pass of the target for several objectives that each ask for their own.

An objective runs until it asks for its pass. There it waits while the next one does the same; when all have
asked, the target runs once and gives what any of them wants, and each goes on with its own share. So the
objectives are not changed, and one that works inside of the pass (`watch`) does so here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.errors import ConfigError
from longtrain.targets.step import PackedStep, Want

if TYPE_CHECKING:
    from longtrain.methods.spec import Loss
    from longtrain.targets.attention import Watch
    from longtrain.targets.model import Target


@dataclass(frozen=True)
class Modes:
    """Whether gradients are recorded, and autocast, at some place of the program."""

    device: str
    grad: bool
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def here(cls, device: str) -> Modes:
        """The modes that hold where this is called."""
        on = torch.is_autocast_enabled(device)
        return cls(device, torch.is_grad_enabled(), on, torch.get_autocast_dtype(device))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Set these modes for the block."""
        with (
            torch.set_grad_enabled(self.grad),
            torch.autocast(self.device, dtype=self.dtype, enabled=self.autocast),
        ):
            yield


@dataclass(frozen=True)
class Asked:
    """A pass that a member asked for, with the modes it asked in."""

    member: str
    ids_T: Tensor
    pos_T: Tensor
    bounds: tuple[int, ...]
    want: Want
    watch: Watch | None
    modes: Modes

    def see(self, layer: int, *tensors: Tensor) -> None:
        """Show the member a layer, if its own pass would have come so far."""
        stop = self.want.stop_at_layer
        if self.watch is not None and (stop is None or layer <= stop):
            with self.modes.again():
                self.watch(layer, *tensors)

    def share(self, step: PackedStep) -> PackedStep:
        """What the member asked for, of all that the pass gave."""
        hidden = {layer: step.hidden[layer] for layer in self.want.hidden if layer in step.hidden}
        kv = {layer: step.kv[layer] for layer in self.want.kv}
        return PackedStep(hidden, kv, step.top if -1 in self.want.hidden else None)


class Seat:
    """Stands in the target's place for one member; everything but a row's first pass is the real target's.

    Args:
        real: the target, or what stands for it.
    """

    def __init__(self, real: Target) -> None:
        self.real = real
        self.ask: Callable[..., PackedStep] | None = None
        """Answers the next pass; None: the target does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def packed(
        self,
        ids_T: Tensor,
        pos_T: Tensor,
        bounds: tuple[int, ...],
        want: Want = Want("none", hidden=(-1,)),  # noqa: B008 (frozen)
        *,
        watch: Watch | None = None,
    ) -> PackedStep:
        """As `Target.packed`."""
        ask, self.ask = self.ask, None
        if ask is None:
            return self.real.packed(ids_T, pos_T, bounds, want, watch=watch)
        return ask(ids_T, pos_T, bounds, want, watch)


class SharedPass:
    """The seats of all members, and the pass that they share.

    Args:
        target: the frozen target, or what stands for it.
        names: of the members.
    """

    def __init__(self, target: Target, names: Iterable[str]) -> None:
        self.target = target
        self.seats = {name: Seat(target) for name in names}
        self._compared = False

    def losses(self, calls: Mapping[str, Callable[[], Loss]], device: torch.device) -> dict[str, Loss]:
        """What each call gives, with one pass of the target for all.

        Args:
            calls: member -> its objective on the row.
            device: the device that the row is on.

        Raises:
            ConfigError: members that ask for passes over different rows or positions.
        """
        names, found = list(calls), {}
        outside = Modes.here(device.type)
        asked: list[Asked] = []
        given: list[PackedStep] = []

        def turn(at: int) -> None:
            """Let the members from number `at` on ask, then run the pass; they have finished afterwards."""
            if at == len(names):
                if asked:
                    given.append(self._run(asked))
                return
            name, seat = names[at], self.seats[names[at]]

            def ask(
                ids_T: Tensor, pos_T: Tensor, bounds: tuple[int, ...], want: Want, watch: Watch | None
            ) -> PackedStep:
                mine = Asked(name, ids_T, pos_T, bounds, want, watch, Modes.here(device.type))
                asked.append(mine)
                with outside.again():
                    turn(at + 1)
                return mine.share(given[0])

            seat.ask = ask
            try:
                found[name] = calls[name]()
                waiting = seat.ask is not None
            finally:
                seat.ask = None
            if waiting:  # it needed no pass
                turn(at + 1)

        turn(0)
        return {name: found[name] for name in names}

    def _run(self, asked: list[Asked]) -> PackedStep:
        """The target's pass over the row."""
        first = asked[0]
        for other in asked[1:]:
            self._compare(first, other)
        self._compared = True
        watching = [one for one in asked if one.watch is not None]

        def watch(layer: int, *tensors: Tensor) -> None:
            for one in watching:
                one.see(layer, *tensors)

        modes = Modes(
            first.modes.device,
            grad=any(one.modes.grad for one in asked),
            autocast=all(one.modes.autocast for one in asked),
            dtype=first.modes.dtype,
        )
        more = {"watch": watch} if watching else {}
        with modes.again():
            return self.target.packed(
                first.ids_T, first.pos_T, first.bounds, together([one.want for one in asked]), **more
            )

    def _compare(self, one: Asked, other: Asked) -> None:
        """Refuse passes that are not the same.

        Positions are compared on the first row alone: the host waits for the device to know them.
        """
        same = one.bounds == other.bounds and one.ids_T is other.ids_T
        if not same or not (self._compared or torch.equal(one.pos_T, other.pos_T)):
            raise ConfigError(
                f"method.members: {one.member} and {other.member} cannot train from the same rows, since "
                "they place a row's tokens at different positions; leave one of them out"
            )


def together(wants: list[Want]) -> Want:
    """What serves all of some wishes for a packed row."""
    stops = [want.stop_at_layer for want in wants]
    return Want(
        "none",
        hidden=tuple(sorted({layer for want in wants for layer in want.hidden})),
        stop_at_layer=None if None in stops else max(stop for stop in stops if stop is not None),
        kv=tuple(sorted({layer for want in wants for layer in want.kv})),
    )
