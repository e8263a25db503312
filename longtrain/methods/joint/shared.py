"""Shares one packed forward of the target among several objectives that each request different outputs.

An objective runs until it requests its forward. There it waits, as a frame on the call stack, while the next
one does the same; when all have requested, the target runs once with the union of the requests, and each
continues with its own outputs. So the objectives are unchanged, and one that observes attention during the
forward (`hook`) works as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.errors import ConfigError
from longtrain.targets.step import OutputRequest, PackedStep

if TYPE_CHECKING:
    from longtrain.methods.spec import Loss
    from longtrain.targets.attention import AttentionHook
    from longtrain.targets.model import Target


@dataclass(frozen=True)
class Modes:
    """Gradient and autocast modes at some point of the program, to be restored at another."""

    device: str
    grad: bool
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def here(cls, device: str) -> Modes:
        """Return the modes that are active where this is called."""
        on = torch.is_autocast_enabled(device)
        return cls(device, torch.is_grad_enabled(), on, torch.get_autocast_dtype(device))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context manager that sets these modes."""
        with (
            torch.set_grad_enabled(self.grad),
            torch.autocast(self.device, dtype=self.dtype, enabled=self.autocast),
        ):
            yield


@dataclass(frozen=True)
class Asked:
    """A member's request for a forward, with the modes that were active when it was made."""

    member: str
    ids_T: Tensor
    pos_T: Tensor
    bounds: tuple[int, ...]
    outputs: OutputRequest
    hook: AttentionHook | None
    modes: Modes

    def see(self, layer: int, *tensors: Tensor) -> None:
        """Pass a layer's attention to the member, unless its own forward would have stopped before."""
        stop = self.outputs.stop_at_layer
        if self.hook is not None and (stop is None or layer <= stop):
            with self.modes.again():
                self.hook(layer, *tensors)

    def share(self, step: PackedStep) -> PackedStep:
        """Return the outputs that this member requested, from those of the shared forward."""
        hidden = {layer: step.hidden[layer] for layer in self.outputs.hidden if layer in step.hidden}
        kv = {layer: step.kv[layer] for layer in self.outputs.kv}
        return PackedStep(hidden, kv, step.top if -1 in self.outputs.hidden else None)


class Seat:
    """Replaces the target for one member; all calls but the first `packed` go to the real target.

    Args:
        real: the target, or a `StoredTarget`.
    """

    def __init__(self, real: Target) -> None:
        self.real = real
        self.ask: Callable[..., PackedStep] | None = None
        """Answers the next call of `packed`; None: the target does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def packed(
        self,
        ids_T: Tensor,
        pos_T: Tensor,
        bounds: tuple[int, ...],
        outputs: OutputRequest = OutputRequest("none", hidden=(-1,)),  # noqa: B008 (frozen)
        *,
        hook: AttentionHook | None = None,
    ) -> PackedStep:
        """Same as `Target.packed`."""
        ask, self.ask = self.ask, None
        if ask is None:
            return self.real.packed(ids_T, pos_T, bounds, outputs, hook=hook)
        return ask(ids_T, pos_T, bounds, outputs, hook)


class SharedPass:
    """One proxy of the target for each member, and the forward that they share.

    Args:
        target: the frozen target, or a `StoredTarget`.
        names: names of the members.
    """

    def __init__(self, target: Target, names: Iterable[str]) -> None:
        self.target = target
        self.seats = {name: Seat(target) for name in names}
        self._compared = False

    def losses(self, calls: Mapping[str, Callable[[], Loss]], device: torch.device) -> dict[str, Loss]:
        """Run every member's objective, with one forward of the target for all.

        Args:
            calls: member -> its objective on the packed sequence.
            device: device of the packed sequence.

        Returns:
            member -> its loss.

        Raises:
            ConfigError: members that request forwards over different tokens or positions.
        """
        names, found = list(calls), {}
        outside = Modes.here(device.type)
        asked: list[Asked] = []
        given: list[PackedStep] = []

        def turn(at: int) -> None:
            """Run members from number `at` on up to their requests, then the forward, then the rest."""
            if at == len(names):
                if asked:
                    given.append(self._run(asked))
                return
            name, seat = names[at], self.seats[names[at]]

            def ask(
                ids_T: Tensor,
                pos_T: Tensor,
                bounds: tuple[int, ...],
                outputs: OutputRequest,
                hook: AttentionHook | None,
            ) -> PackedStep:
                mine = Asked(name, ids_T, pos_T, bounds, outputs, hook, Modes.here(device.type))
                asked.append(mine)
                # The next member starts inside this call, so that this one stays suspended until the forward
                # is done.
                with outside.again():
                    turn(at + 1)
                return mine.share(given[0])

            seat.ask = ask
            try:
                found[name] = calls[name]()
                waiting = seat.ask is not None
            finally:
                seat.ask = None
            if waiting:  # it requested no forward
                turn(at + 1)

        turn(0)
        return {name: found[name] for name in names}

    def _run(self, asked: list[Asked]) -> PackedStep:
        """Run the target with the union of the requests."""
        first = asked[0]
        for other in asked[1:]:
            self._compare(first, other)
        self._compared = True
        watching = [one for one in asked if one.hook is not None]

        def hook(layer: int, *tensors: Tensor) -> None:
            for one in watching:
                one.see(layer, *tensors)

        modes = Modes(
            first.modes.device,
            grad=any(one.modes.grad for one in asked),
            autocast=all(one.modes.autocast for one in asked),
            dtype=first.modes.dtype,
        )
        more = {"hook": hook} if watching else {}
        with modes.again():
            return self.target.packed(
                first.ids_T, first.pos_T, first.bounds, together([one.outputs for one in asked]), **more
            )

    def _compare(self, one: Asked, other: Asked) -> None:
        """Refuse forwards over different tokens or positions.

        Positions are compared in the first batch only, because the host waits for the device to read them.
        """
        same = one.bounds == other.bounds and one.ids_T is other.ids_T
        if not same or not (self._compared or torch.equal(one.pos_T, other.pos_T)):
            raise ConfigError(
                f"method.members: {one.member} and {other.member} cannot train on the same sequences, since "
                "they place the tokens at different positions; leave one of them out"
            )


def together(requests: list[OutputRequest]) -> OutputRequest:
    """Return the union of several output requests for a packed sequence."""
    stops = [outputs.stop_at_layer for outputs in requests]
    return OutputRequest(
        "none",
        hidden=tuple(sorted({layer for outputs in requests for layer in outputs.hidden})),
        stop_at_layer=None if None in stops else max(stop for stop in stops if stop is not None),
        kv=tuple(sorted({layer for outputs in requests for layer in outputs.kv})),
    )
