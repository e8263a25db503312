"""Golden outputs: what a module says of a fixed prompt, stored at export and asked again at every load.

Three things are asked, so that a small fault does not hide behind the rounding of a half-precision target:

1. the module in fp32, on the target's tensors *as stored*: a position off by one, another rotary base, a lost
   window or a changed tensor shows;
2. the target at hand, in its own dtype: does it give the stored tensors;
3. both together in that dtype, through the very code that decodes: do they give the stored outputs, roughly.

Where the outputs are scores, what is chosen by them is stored too: the tokens that stay or that are read, for
every layer and KV head. A load chooses anew by the *stored* scores, so that rounding has no part in it and
not one entry may differ.

How far a half-precision target may be off in 2 and 3 is measured, not assumed: the noise of each tensor is
its distance from what the same target and module give in fp32 (`WideTarget`). It is stored at export, and a
load allows `MULTIPLE` times as much.

Shapes: T prompt tokens, S tokens of an input, H query heads, G KV heads, K head dim, E hidden dim, B batch.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from longtrain.artifact.verification import FAR, Check, refuse
from longtrain.artifact.wide import WideTarget, exact_products
from longtrain.decoding.roles import Parts
from longtrain.errors import ArtifactError

if TYPE_CHECKING:
    from longtrain.targets.model import Target

PERIOD = 61
"""The prompt repeats a block of this many random tokens: sharp attention, so that a shift by one shows."""

STRICT = 3e-4
"""Largest relative distance of outputs in fp32 on stored inputs."""

ROUNDED = 1e-2
"""The same where the target had another dtype then: its embeddings may have been rounded since."""

FLOOR = {"float64": 1e-4, "float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""A relative distance that always passes with the target at hand, by the coarser of its dtypes."""

HALF = ("float16", "bfloat16")
"""The dtypes whose noise is measured."""

MULTIPLE = 4.0
"""Times the measured noise that passes: two roundings are sqrt(2) apart, and those of other kernels are
larger by a factor that depends on how they sum."""

OUTPUTS = "outputs"
"""The name of the noise of the outputs; other names are those of inputs."""

Attach = Callable[[Any], Parts]
"""Makes fresh parts, given the target or an fp32 view of it; the module must have that one's dtype."""


@dataclass(frozen=True)
class Golden(ABC):
    """Tensors that a target gave for a fixed prompt, and what the module made of them (in subclasses).

    Args:
        inputs: the target's tensors that the module reads: `k_LAYER` and `v_LAYER` [S, G, K], `q_LAYER`
            [S, H, K] and `hidden_LAYER` [S, E].
        dtype: the target's dtype when they were recorded, e.g. `bfloat16`.
        noise: what rounding in that dtype does to each input and to the outputs (`OUTPUTS`), as a relative
            distance; empty where the dtype is none of `HALF`.
    """

    inputs: dict[str, Tensor]
    dtype: str
    noise: dict[str, float]
    who: ClassVar[str] = ""
    """What the module is, for messages."""
    outputs: ClassVar[str] = ""
    """What is compared, for messages."""
    own: ClassVar[tuple[str, ...]] = ()
    """Names of the stored tensors that are no inputs."""
    ids: ClassVar[tuple[str, ...]] = ("ids_T",)
    """The names among them of what holds tokens; all other tensors hold floating-point numbers."""
    choice: ClassVar[str] = ""
    """The name among them of what is chosen by the stored scores; empty: the outputs are no scores."""
    pattern: ClassVar[str] = ""
    """What names of inputs look like."""

    @classmethod
    def record(cls, attach: Attach, target: Target, *, tokens: int, others: Sequence[Attach] = ()) -> Self:
        """Ask a module for its outputs.

        Args:
            attach: makes the module's parts.
            target: the frozen target.
            tokens: prompt length; more than a draft's own window, or a lost window would not show.
            others: make parts that other machines run in their place (an LM head copied in 4 bits, say) and
                whose outputs differ by their rounding alone: that counts as noise too.

        Raises:
            ArtifactError: the target gives something that is no number, which nothing can be compared with.
        """
        with exact_products():
            asked = cls._prompt(target, tokens)
            found = asked._on_target(attach, target)
            for name, tensor in found[1].items():
                if not bool(torch.isfinite(tensor).all()):
                    raise ArtifactError(
                        f"the target gives {name} that is NaN or infinite in {asked.dtype}; its weights are "
                        "damaged, or too large for that type (pass target.dtype=float32)"
                    )
            asked, noise, wide = replace(asked, inputs=found[1]), {}, found
            if asked.dtype in HALF:
                wide = asked._on_target(attach, WideTarget(target))
                noise = asked._noise(found, [wide, *(asked._on_target(other, target) for other in others)])
            made = replace(asked._filled(asked._on_stored(attach, target), wide[0]), noise=noise)
            return made._with_choice(attach, target)

    @classmethod
    @abstractmethod
    def _prompt(cls, target: Target, tokens: int) -> Self:
        """The tokens to ask with; inputs and outputs are still empty."""

    @abstractmethod
    def _filled(self, on_stored: Tensor, on_target: Tensor) -> Self:
        """With outputs: in fp32 on the inputs, and with a target that computes in fp32 too."""

    @classmethod
    @abstractmethod
    def _made_of(
        cls, own: dict[str, Tensor], inputs: dict[str, Tensor], dtype: str, noise: dict[str, float]
    ) -> Self:
        """Put the tensors together.

        Raises:
            ArtifactError: their shapes do not fit each other.
        """

    @abstractmethod
    def _own(self) -> dict[str, Tensor]:
        """The stored tensors that are no inputs, in the order of `own`."""

    @abstractmethod
    def _expected(self) -> tuple[Tensor, Tensor]:
        """The outputs in fp32 on stored inputs, and those with the target."""

    @abstractmethod
    def _on_stored(self, attach: Attach, target: Target) -> Tensor:
        """The module's outputs in fp32 on stored inputs."""

    @abstractmethod
    def _on_target(self, attach: Attach, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        """The module's outputs with the target at hand, and what it read of the target, on the CPU."""

    @staticmethod
    @abstractmethod
    def _distance(got: Tensor, want: Tensor) -> Tensor:
        """Relative distances of outputs, one for each law, head or set."""

    def verify(self, attach: Attach, target: Target) -> float:
        """Ask again and compare.

        Args:
            attach: makes the module's parts.
            target: the frozen target at hand.

        Returns:
            The relative distance of the outputs in fp32.

        Raises:
            ArtifactError: something is further off than rounding explains.
        """
        checks = self.measure(attach, target)
        refuse(checks)
        return checks[0].error

    def measure(self, attach: Attach, target: Target) -> list[Check]:
        """Ask again: every comparison with its limit, the one in fp32 on stored inputs first.

        Args:
            attach: makes the module's parts.
            target: the frozen target at hand.

        Raises:
            ArtifactError: there is nothing to compare, since shapes or names are others.
        """
        self._check_shapes(target)
        with exact_products():
            return [
                self._strictly(attach, target),
                *self._in_fp32(attach, target),
                *self._choosing(attach, target),
                *self._loosely(attach, target),
            ]

    def _strictly(self, attach: Attach, target: Target) -> Check:
        """The module in fp32 on stored inputs; the furthest output counts."""
        limit = STRICT if self.dtype == dtype_name(target.dtype) else ROUNDED
        what = f"the {self.who} in fp32 on stored inputs"
        got = self._asked(lambda: self._on_stored(attach, target))
        distances = self._distances(what, got, self._expected()[0])
        return Check(what, as_number(distances.max()), limit)

    def _in_fp32(self, attach: Attach, target: Target) -> list[Check]:
        """Further comparisons in fp32, where stored inputs do not reach the whole module."""
        return []

    def _with_choice(self, attach: Attach, target: Target) -> Self:
        """With what is chosen by the scores that it holds."""
        if not self.choice:
            return self
        chosen: dict[str, Any] = {self.choice: self._chosen(attach(target), target)}
        return replace(self, **chosen)

    def _choosing(self, attach: Attach, target: Target) -> Iterator[Check]:
        """What is chosen by the stored scores; the error is the share of entries that differ."""
        if not self.choice:
            return
        got, want = self._asked(lambda: self._chosen(attach(target), target)), self._own()[self.choice]
        what = f"what the {self.who} chooses by stored scores"
        self._check_same_shape(what, got, want)
        yield Check(what, float((got != want).double().mean()), 0.0)

    def _chosen(self, parts: Parts, target: Target) -> Tensor:
        """What a module's parts choose by the stored scores (`choice`), on the CPU."""
        raise NotImplementedError

    def _loosely(self, attach: Attach, target: Target) -> Iterator[Check]:
        """The target at hand, and the module with it, in the target's dtype; outputs count on average."""
        dtype = dtype_name(target.dtype)
        native, inputs = self._on_target(attach, target)
        noise = self._noise_at_hand(attach, target, (native, inputs))
        floor = max(FLOOR.get(one, FLOOR["bfloat16"]) for one in (self.dtype, dtype))
        for name, stored in self.inputs.items():
            limit = max(floor, MULTIPLE * noise.get(name, 0.0))
            if name in inputs:
                yield Check(f"the target's {name}", _apart(inputs[name], stored), limit)
            else:
                yield Check(f"the target's {name}, which the {self.who} does not read here", FAR, limit)
        what = f"{self.who} and target in {dtype}"
        distances = self._distances(what, native, self._expected()[1])
        yield Check(what, _average(distances), max(floor, MULTIPLE * noise.get(OUTPUTS, 0.0)))

    def _noise_at_hand(
        self, attach: Attach, target: Target, found: tuple[Tensor, dict[str, Tensor]]
    ) -> dict[str, float]:
        """The noise that was stored, or what is measured now where it was stored for a finer dtype."""
        dtype = dtype_name(target.dtype)
        if dtype not in HALF or (self.noise and dtype == self.dtype):
            return self.noise
        now = self._noise(found, [self._on_target(attach, WideTarget(target))])
        return {name: max(value, self.noise.get(name, 0.0)) for name, value in now.items()}

    def _noise(
        self, found: tuple[Tensor, dict[str, Tensor]], others: Sequence[tuple[Tensor, dict[str, Tensor]]]
    ) -> dict[str, float]:
        """The largest distances from what others give that compute the same up to rounding."""
        native, inputs = found
        noise = {
            name: max(_apart(given[name], tensor) for _, given in others) for name, tensor in inputs.items()
        }
        return {**noise, OUTPUTS: max(_average(self._distance(native, other)) for other, _ in others)}

    def _asked(self, ask: Callable[[], Tensor]) -> Tensor:
        """What the module makes of stored tensors; where that fails, the artifact is damaged."""
        try:
            return ask()
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            if type(error).__name__ == "OutOfMemoryError":
                raise
            reason = (str(error).splitlines() or [""])[0]
            raise ArtifactError(
                f"the {self.who} cannot be asked for its golden {self.outputs} ({type(error).__name__}: "
                f"{reason}): longtrain.json or golden.safetensors is not what was exported; export it again"
            ) from error

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, on the CPU."""
        return {name: tensor.cpu().contiguous() for name, tensor in (self._own() | self.inputs).items()}

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, Tensor], dtype: str, noise: dict[str, float] | None = None
    ) -> Self:
        """Rebuild from `tensors()`, the dtype and the noise.

        Raises:
            ArtifactError: a tensor is missing, unknown, of another shape or type, or not finite.
        """
        if missing := [name for name in cls.own if name not in tensors]:
            raise ArtifactError(f"golden.safetensors lacks {', '.join(missing)}; export the artifact again")
        inputs = {name: tensor for name, tensor in tensors.items() if name not in cls.own}
        if unknown := [name for name in inputs if not re.fullmatch(cls.pattern, name)]:
            raise ArtifactError(
                f"golden.safetensors holds unknown tensors: {', '.join(unknown)}; export again"
            )
        for name, tensor in tensors.items():
            cls._check_values(name, tensor)
        return cls._made_of({name: tensors[name] for name in cls.own}, inputs, dtype, noise or {})

    @classmethod
    def _check_values(cls, name: str, tensor: Tensor) -> None:
        """Refuse a tensor of another type or rank than is stored under its name, and what is no number.

        Raises:
            ArtifactError: what is wrong.
        """
        ranks = {"k": 3, "v": 3, "q": 3, "hidden": 2, "input": 2}
        wanted = None if name in cls.own else ranks[name.partition("_")[0]]
        wrong = ""
        if tensor.dim() == 0 or tensor.numel() == 0 or (wanted is not None and tensor.dim() != wanted):
            wrong = f"is of shape {tuple(tensor.shape)}"
        elif name == cls.choice:
            wrong = "" if not tensor.is_floating_point() else f"is of type {dtype_name(tensor.dtype)}"
        elif name in cls.ids and (tensor.dtype != torch.int64 or bool((tensor < 0).any())):
            wrong = f"is no row of tokens ({dtype_name(tensor.dtype)}, or negative ones)"
        elif name not in cls.ids and dtype_name(tensor.dtype) not in FLOOR:
            wrong = f"is of type {dtype_name(tensor.dtype)}; allowed: {', '.join(FLOOR)}"
        elif name not in cls.ids and not bool(torch.isfinite(tensor).all()):
            wrong = "holds NaN or infinite values"
        if wrong:
            raise ArtifactError(f"golden.safetensors: {name} {wrong}; export the artifact again")

    @staticmethod
    def _unfitting(**shapes: Any) -> ArtifactError:
        shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        return ArtifactError(
            f"golden.safetensors has shapes that do not fit each other: {shown}; export the artifact again"
        )

    def _check_shapes(self, target: Target) -> None:
        info = target.info
        kv = (info.n_kv_heads, info.head_dim)
        wanted = {"k": kv, "v": kv, "q": (info.n_heads, info.head_dim), "hidden": (info.hidden_size,)}
        wanted["input"] = wanted["hidden"]
        for name, tensor in self.inputs.items():
            rest = wanted[name.partition("_")[0]]
            if tensor.shape[1:] != rest:
                shown = ", ".join(map(str, ("S", *rest)))
                raise ArtifactError(
                    f"golden input {name} is {tuple(tensor.shape)}, not [{shown}]; export again"
                )
        own = self._own()
        highest = max(int(own[name].max()) for name in self.ids)
        if highest >= info.vocab_size:
            raise ArtifactError(
                f"golden tokens reach {highest}, the vocabulary is {info.vocab_size}; export again"
            )

    def _distances(self, what: str, got: Tensor, want: Tensor) -> Tensor:
        self._check_same_shape(what, got, want)
        return self._distance(got, want)

    def _check_same_shape(self, what: str, got: Tensor, want: Tensor) -> None:
        if got.shape != want.shape:
            raise ArtifactError(
                f"golden {self.outputs} are {tuple(want.shape)}, {what} gives {tuple(got.shape)}; "
                "export it again"
            )


def fixed_prompt(vocab_size: int, tokens: int, gen: torch.Generator) -> Tensor:
    """A block of `PERIOD` random tokens, repeated: ids_T, int64."""
    block_T = torch.randint(vocab_size, (PERIOD,), generator=gen)
    return block_T.repeat(tokens // PERIOD + 1)[:tokens]


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _apart(got: Tensor, want: Tensor) -> float:
    """Relative distance of two inputs, each row on its own scale: a few huge rows do not hide the others."""
    got_SE, want_SE = got.flatten(1).float(), want.flatten(1).float()
    return _average((got_SE - want_SE).norm(dim=-1) / want_SE.norm(dim=-1).clamp_min(1e-6))


def _average(distances: Tensor) -> float:
    """Root mean square."""
    return as_number(distances.double().square().mean().sqrt())


def as_number(error: Tensor) -> float:
    """A distance as a number; what is none counts as far off."""
    return float(torch.nan_to_num(error.double(), nan=FAR, posinf=FAR).clamp(max=FAR))
