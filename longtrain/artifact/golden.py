"""Golden outputs: what a module says of a fixed prompt, stored at export and asked again at every load.

Three things are asked, so that a small fault does not hide behind the rounding of a half-precision target:

1. the module in fp32, on the target's tensors *as stored*: a position off by one, another rotary base, a lost
   window or a changed tensor shows;
2. the target at hand, in its own dtype: does it give the stored tensors;
3. both together in that dtype, through the very code that decodes: do they give the stored outputs, roughly.

Shapes: T prompt tokens, S tokens of an input, H query heads, G KV heads, K head dim, E hidden dim, B batch.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from longtrain.decoding.roles import Parts
from longtrain.errors import ArtifactError

if TYPE_CHECKING:
    from longtrain.kernels.fused_layer import Rotation
    from longtrain.targets.model import Target

PERIOD = 61
"""The prompt repeats a block of this many random tokens: sharp attention, so that a shift by one shows."""

STRICT = 3e-4
"""Largest relative distance of outputs in fp32 on stored inputs."""

ROUNDED = 1e-2
"""The same where the target had another dtype then: its embeddings may have been rounded since."""

LOOSE = {"float64": 1e-3, "float32": 1e-2, "float16": 3e-2, "bfloat16": 1e-1}
"""Largest relative distance with the target at hand, by the coarser of its dtypes then and now."""

Attach = Callable[[Any], Parts]
"""Makes fresh parts, given the target or an fp32 view of it; the module must have that one's dtype."""


@dataclass(frozen=True)
class Golden(ABC):
    """Tensors that a target gave for a fixed prompt, and what the module made of them (in subclasses).

    Args:
        inputs: the target's tensors that the module reads: `k_LAYER` and `v_LAYER` [S, G, K], `q_LAYER`
            [S, H, K] and `hidden_LAYER` [S, E].
        dtype: the target's dtype when they were recorded, e.g. `bfloat16`.
    """

    inputs: dict[str, Tensor]
    dtype: str
    who: ClassVar[str] = ""
    """What the module is, for messages."""
    outputs: ClassVar[str] = ""
    """What is compared, for messages."""
    own: ClassVar[tuple[str, ...]] = ()
    """Names of the stored tensors that are no inputs."""
    ids: ClassVar[tuple[str, ...]] = ("ids_T",)
    """The names among them of what holds tokens; all other tensors hold floating-point numbers."""
    pattern: ClassVar[str] = ""
    """What names of inputs look like."""

    @classmethod
    @abstractmethod
    def record(cls, attach: Attach, target: Target, *, tokens: int) -> Self:
        """Ask a module for its outputs.

        Args:
            attach: makes the module's parts.
            target: the frozen target.
            tokens: prompt length; more than a draft's own window, or a lost window would not show.
        """

    @classmethod
    @abstractmethod
    def _made_of(cls, own: dict[str, Tensor], inputs: dict[str, Tensor], dtype: str) -> Self:
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
        """Relative distances of outputs; the largest of them counts."""

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
        self._check_shapes(target)
        strictly, loosely = self._expected()
        dtypes = {self.dtype, dtype_name(target.dtype)}
        wide = self._asked(attach, target)
        limit = STRICT if len(dtypes) == 1 else ROUNDED
        error = self._compare(f"the {self.who} in fp32 on stored inputs", wide, strictly, limit)
        limit = max(LOOSE.get(dtype, LOOSE["bfloat16"]) for dtype in dtypes)
        native, inputs = self._on_target(attach, target)
        for name, stored in self.inputs.items():
            if name not in inputs:
                raise ArtifactError(
                    f"the {self.who} no longer reads the target's {name}, which it was exported with"
                )
            rows = stored.flatten(1).float()
            distance = (inputs[name].flatten(1).float() - rows).norm() / rows.norm().clamp_min(1e-6)
            _judge(f"the target's {name}", float(distance), limit)
        self._compare(f"{self.who} and target in {dtype_name(target.dtype)}", native, loosely, limit)
        return error

    def _asked(self, attach: Attach, target: Target) -> Tensor:
        """The outputs on stored inputs; what cannot be computed at all is told as a damaged artifact."""
        try:
            with _exact_products():
                return self._on_stored(attach, target)
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
    def from_tensors(cls, tensors: dict[str, Tensor], dtype: str) -> Self:
        """Rebuild from `tensors()`.

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
        return cls._made_of({name: tensors[name] for name in cls.own}, inputs, dtype)

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
        elif name in cls.ids and (tensor.dtype != torch.int64 or bool((tensor < 0).any())):
            wrong = f"is no row of tokens ({dtype_name(tensor.dtype)}, or negative ones)"
        elif name not in cls.ids and dtype_name(tensor.dtype) not in LOOSE:
            wrong = f"is of type {dtype_name(tensor.dtype)}; allowed: {', '.join(LOOSE)}"
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
        highest = int(max(part.max() for part in self._own().values() if not part.is_floating_point()))
        if highest >= info.vocab_size:
            raise ArtifactError(
                f"golden tokens reach {highest}, the vocabulary is {info.vocab_size}; export again"
            )

    def _compare(self, what: str, got: Tensor, want: Tensor, limit: float) -> float:
        if got.shape != want.shape:
            raise ArtifactError(
                f"golden {self.outputs} are {tuple(want.shape)}, {what} gives {tuple(got.shape)}; "
                "export it again"
            )
        error = float(torch.nan_to_num(self._distance(got, want), nan=torch.inf).max())
        _judge(what, error, limit)
        return error


class WideTarget:
    """A target whose embedding, rotary and head work in fp32 (or better), for a module that does."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.dtype = torch.promote_types(target.dtype, torch.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    @property
    def head_weight(self) -> Tensor:
        """The LM head's weight."""
        return self._target.head_weight.to(self.dtype)

    @property
    def embed_weight(self) -> Tensor:
        """The input embeddings."""
        return self._target.embed_weight.to(self.dtype)

    @property
    def rotation(self) -> Rotation:
        """The rotary embedding."""
        return self.rope

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings."""
        return self._target.embed(ids).to(self.dtype)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits."""
        return linear(hidden, self.head_weight)

    def rope(self, pos_BT: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Cos and sin."""
        return self._target.rope(pos_BT, dtype=dtype or self.dtype)


def fixed_prompt(vocab_size: int, tokens: int, gen: torch.Generator) -> Tensor:
    """A block of `PERIOD` random tokens, repeated: ids_T, int64."""
    block_T = torch.randint(vocab_size, (PERIOD,), generator=gen)
    return block_T.repeat(tokens // PERIOD + 1)[:tokens]


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def _exact_products() -> Iterator[None]:
    """No TF32 inside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _judge(what: str, error: float, limit: float) -> None:
    """Refuse a relative error above the limit (and one that is not a number)."""
    if not error <= limit:
        raise ArtifactError(
            f"golden outputs are not reproduced by {what}: relative error {error:.2g}, allowed {limit:g}; "
            "it does not compute what was exported (position, window, rotary base, weights); export again"
        )
