"""Records the golden outputs of a module, and compares a module with recorded ones.

A load makes these four comparisons, so that a small error cannot hide behind the rounding of a
half-precision target. All stored tensors are compared, so a damaged one is detected too:

1. the module in fp32, on the target's tensors *as stored*: detects a position off by one, another rotary
   base, a missing window or a changed tensor;
2. if the outputs are scores, the KV entries chosen by the *stored* scores: no rounding is involved, and not
   one entry may differ;
3. the tensors of the actual target, in its own dtype, against the stored ones;
4. the module's outputs on that target, computed by the decoding code, against the stored ones.

The tolerance of 3 and 4 for a half-precision target is measured: the noise of each tensor is its distance
from the same target and module in fp32 (`WideTarget`). It is stored at export, and a load allows `MULTIPLE`
times as much.

Shapes: S tokens of a stored tensor, H query heads, G KV heads, K head dim, E hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.artifact.golden.checks import FAR, Check
from longtrain.artifact.golden.kinds import Attach, Kind, script_of
from longtrain.artifact.golden.stored_forward import StoredForward
from longtrain.artifact.golden.wide import WideTarget
from longtrain.errors import ArtifactError, first_line
from longtrain.layers import exact_products

if TYPE_CHECKING:
    from longtrain.targets.model import Target

FILE = "golden.safetensors"

STRICT = 3e-4
"""Largest relative distance of outputs in fp32 on stored inputs."""

ROUNDED = 1e-2
"""The same limit if the target had another dtype at export: its embeddings may be rounded differently."""

FLOOR = {"float64": 1e-4, "float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Relative distance that always passes on the actual target, by the coarser of its and the export's dtype."""

HALF = ("float16", "bfloat16")
"""Dtypes whose rounding noise is measured."""

MULTIPLE = 4.0
"""Limit as a multiple of the measured noise: two independent roundings differ by sqrt(2) times the noise, and
kernels that sum in another order by more."""

OUTPUTS = "outputs"
"""Key of the outputs' noise; the other keys are names of inputs."""

States = tuple[Tensor, Mapping[str, Tensor]]
"""Token ids [T] of a document, and the target's states [T, E] for it under the names of inputs."""

Found = tuple[Tensor, dict[str, Tensor]]
"""A module's outputs, and the target's tensors that it read to compute them."""


@dataclass(frozen=True)
class Golden:
    """The golden outputs of one module.

    Args:
        kind: the kind of outputs, by the module's role in an engine.
        own: the prompt's tokens, the module's outputs and the chosen entries, under the names of `kind.own`.
        inputs: the target's tensors that the module reads: `k_LAYER` and `v_LAYER` [S, G, K], `q_LAYER`
            [S, H, K], `hidden_LAYER` and `input_LAYER` (of a layer's attention) [S, E]; and the LM head's
            input `hidden_-1` [S, E] if another program computed them.
        dtype: the target's dtype when they were recorded, e.g. `bfloat16`.
        noise: relative rounding error in that dtype of each input and of the outputs (`OUTPUTS`); empty if
            the dtype is not in `HALF`, and of the outputs alone if another program computed the inputs.
    """

    kind: Kind
    own: dict[str, Tensor]
    inputs: dict[str, Tensor]
    dtype: str
    noise: dict[str, float]

    @classmethod
    def record(
        cls,
        kind: Kind,
        attach: Attach,
        target: Target,
        *,
        tokens: int,
        others: Sequence[Attach] = (),
        states: States | None = None,
    ) -> Golden:
        """Compute and record a module's outputs.

        Args:
            kind: the kind of outputs, by the module's role in an engine.
            attach: builds the module's parts.
            target: the frozen target.
            tokens: prompt length; longer than a draft's own window, or a missing window would go unnoticed.
            others: build variants of the parts that other machines may run (e.g. with a 4-bit copy of the LM
                head), whose rounding differences count as noise too.
            states: a document and the target's states for it, if the target cannot run; of a draft alone.

        Raises:
            ArtifactError: a tensor of the target is NaN or infinite.
        """
        with exact_products():
            ids_T, told = (None, None) if states is None else states
            prompt = kind.prompt(target.info, tokens) if ids_T is None else script_of(ids_T)
            half = next((one.dtype for one in (told or {}).values() if dtype_name(one.dtype) in HALF), None)
            golden = cls(kind, prompt, {}, dtype_name(half or target.dtype), {})
            found = golden._on_target(attach, target, told)
            for name, tensor in found[1].items():
                if not bool(torch.isfinite(tensor).all()):
                    raise ArtifactError(
                        f"the target gives {name} that is NaN or infinite in {golden.dtype}; its weights are "
                        "damaged, or too large for that type (pass target.dtype=float32)"
                    )
            golden, wide = replace(golden, inputs=found[1]), found
            if golden.dtype in HALF:
                wide = golden._on_target(attach, WideTarget(target), told)
                again = [wide, *(golden._on_target(other, target, told) for other in others)]
                noise = golden._noise(found, again)
                golden = replace(golden, noise=noise if told is None else {OUTPUTS: noise[OUTPUTS]})
            outputs = {kind.whole: wide[0], kind.near: golden._on_stored(attach, target)}
            golden = replace(golden, own={**prompt, **outputs})
            if kind.choose is None:
                return golden
            return replace(golden, own={**golden.own, kind.choice: golden._chosen(attach, target)})

    def measure(self, attach: Attach, target: Target) -> list[Check]:
        """Compute the outputs again and return all comparisons, the one on stored inputs first.

        A target without layers (`Target.runs`) is not compared itself.

        Args:
            attach: builds the module's parts.
            target: the frozen target that the module will run with.

        Raises:
            ArtifactError: names or shapes differ from the recorded ones, so that nothing can be compared.
        """
        self._check_tokens(target.info.vocab_size)
        with exact_products():
            return [
                *self._in_fp32(attach, target),
                *self._choosing(attach, target),
                *(self._in_its_dtype(attach, target) if target.runs else ()),
            ]

    def _in_fp32(self, attach: Attach, target: Target) -> Iterator[Check]:
        """Check the module in fp32 on stored inputs, and on the whole target if only first layers are stored.

        The error is the largest distance of any output.
        """
        role, same = self.kind.role, self.dtype == dtype_name(target.dtype)
        what = f"the {role} in fp32 on stored inputs"
        got = self._asked(lambda: self._on_stored(attach, target))
        distances = self._distances(what, got, self.own[self.kind.near])
        yield Check(what, as_number(distances.max()), STRICT if same else ROUNDED)
        if same and self.kind.near != self.kind.whole:
            what = f"the {role} and the target in fp32"
            got = self._on_target(attach, WideTarget(target))[0]
            distances = self._distances(what, got, self.own[self.kind.whole])
            yield Check(what, as_number(distances.max()), STRICT)

    def _choosing(self, attach: Attach, target: Target) -> Iterator[Check]:
        """Check the entries chosen by the stored scores; the error is the share that differs."""
        if self.kind.choose is None:
            return
        got, expected = self._asked(lambda: self._chosen(attach, target)), self.own[self.kind.choice]
        what = f"what the {self.kind.role} chooses by stored scores"
        self._check_same_shape(what, got, expected)
        yield Check(what, float((got != expected).double().mean()), 0.0)

    def _in_its_dtype(self, attach: Attach, target: Target) -> Iterator[Check]:
        """Check the actual target and the module on it, in the target's dtype, by mean distance."""
        role, dtype = self.kind.role, dtype_name(target.dtype)
        native, inputs = self._on_target(attach, target)
        noise = self._noise_at_hand(attach, target, (native, inputs))
        floor = max(FLOOR.get(one, FLOOR["bfloat16"]) for one in (self.dtype, dtype))
        for name, stored in self.inputs.items():
            limit = max(floor, MULTIPLE * noise.get(name, 0.0))
            if name in inputs:
                yield Check(f"the target's {name}", _apart(inputs[name], stored), limit)
            else:
                yield Check(f"the target's {name}, which the {role} does not read here", FAR, limit)
        what = f"{role} and target in {dtype}"
        distances = self._distances(what, native, self.own[self.kind.whole])
        yield Check(what, _average(distances), max(floor, MULTIPLE * noise.get(OUTPUTS, 0.0)))

    def _on_target(self, attach: Attach, target: Any, told: Mapping[str, Tensor] | None = None) -> Found:
        """Run the module on a target, or on `told` states; return outputs and tensors read, on the CPU."""
        forward = target.forward if told is None else StoredForward(target, told)
        stored = self.own | dict(self.inputs if told is None else told)
        output, read = self.kind.ask(self._part(attach, target), target, forward, stored)
        return output.float().cpu(), {name: tensor.cpu().contiguous() for name, tensor in read.items()}

    def _on_stored(self, attach: Attach, target: Target) -> Tensor:
        """Run the module in fp32 on stored inputs; return its outputs."""
        view = WideTarget(target)
        if self.kind.layers is not None:
            view.info = replace(target.info, n_layers=self.kind.layers(target.info))
        forward = StoredForward(view, self.inputs)
        output, read = self.kind.ask(self._part(attach, view), view, forward, self.own | self.inputs)
        if missing := [name for name in read if name not in self.inputs]:
            raise ArtifactError(
                f"the {self.kind.role} reads {missing[0]} of the target, which the artifact does not hold; "
                "export it again"
            )
        return output.float().cpu()

    def _chosen(self, attach: Attach, target: Target) -> Tensor:
        """Return the entries that the module chooses by the stored scores, on the CPU."""
        assert self.kind.choose is not None
        return self.kind.choose(self._part(attach, target), self.own[self.kind.whole], target.info)

    def _part(self, attach: Attach, target: Any) -> Any:
        part = getattr(attach(target), self.kind.role)
        if part is None:
            raise ArtifactError(
                f"golden {self.kind.outputs} need a method that brings an engine's {self.kind.role}; this "
                "one does not"
            )
        return part

    def _noise_at_hand(self, attach: Attach, target: Target, found: Found) -> dict[str, float]:
        """Return the stored noise, or measure it if it was stored for a finer dtype."""
        dtype = dtype_name(target.dtype)
        if dtype not in HALF or (len(self.noise) > len(self.inputs) and dtype == self.dtype):
            return self.noise
        now = self._noise(found, [self._on_target(attach, WideTarget(target))])
        return {name: max(value, self.noise.get(name, 0.0)) for name, value in now.items()}

    def _noise(self, found: Found, others: Sequence[Found]) -> dict[str, float]:
        """Return the largest distances from outputs and inputs that should agree up to rounding."""
        native, inputs = found
        noise = {
            name: max(_apart(given[name], tensor) for _, given in others) for name, tensor in inputs.items()
        }
        return {**noise, OUTPUTS: max(_average(self.kind.distance(native, other)) for other, _ in others)}

    def _asked(self, ask: Callable[[], Tensor]) -> Tensor:
        """Compute outputs on stored tensors; a failure means that the artifact is damaged."""
        try:
            return ask()
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            if type(error).__name__ == "OutOfMemoryError":
                raise
            raise ArtifactError(
                f"the {self.kind.role} cannot be asked for its golden {self.kind.outputs} "
                f"({type(error).__name__}: {first_line(error)}): longtrain.json or {FILE} is not what was "
                "exported; export it again"
            ) from error

    def facts(self) -> dict[str, Any]:
        """Return the manifest's entry on golden outputs."""
        about = {"dtype": self.dtype, "noise": self.noise}
        return about if self.kind.name == "laws" else {**about, "kind": self.kind.name}

    def tensors(self) -> dict[str, Tensor]:
        """Return the content of `golden.safetensors`, on the CPU."""
        return {name: tensor.cpu().contiguous() for name, tensor in (self.own | self.inputs).items()}

    @classmethod
    def from_tensors(
        cls, kind: Kind, tensors: Mapping[str, Tensor], dtype: str, noise: dict[str, float] | None = None
    ) -> Golden:
        """Rebuild golden outputs from `tensors()`, the dtype and the noise.

        Raises:
            ArtifactError: a tensor is missing.
        """
        if missing := [name for name in kind.own if name not in tensors]:
            raise ArtifactError(f"{FILE} lacks {', '.join(missing)}; export the artifact again")
        inputs = {name: tensor for name, tensor in tensors.items() if name not in kind.own}
        return cls(kind, {name: tensors[name] for name in kind.own}, inputs, dtype, noise or {})

    def _check_tokens(self, vocab_size: int) -> None:
        """Refuse a stored prompt with invalid token ids: an index out of range kills a CUDA process."""
        for name in self.kind.tokens:
            ids = self.own[name]
            whole = ids.dtype == torch.int64 and ids.numel() > 0
            if not whole or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
                raise ArtifactError(
                    f"{FILE}: {name} holds other numbers than the {vocab_size} token ids of the target; "
                    "export the artifact again"
                )

    def _distances(self, what: str, got: Tensor, expected: Tensor) -> Tensor:
        self._check_same_shape(what, got, expected)
        return self.kind.distance(got, expected)

    def _check_same_shape(self, what: str, got: Tensor, expected: Tensor) -> None:
        if got.shape != expected.shape:
            raise ArtifactError(
                f"golden {self.kind.outputs} are {tuple(expected.shape)}, {what} gives {tuple(got.shape)}; "
                "export it again"
            )


def dtype_name(dtype: torch.dtype) -> str:
    """Return `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def as_number(error: Tensor) -> float:
    """Return a distance as a float of at most `FAR`; NaN becomes `FAR`."""
    return float(torch.nan_to_num(error.double(), nan=FAR, posinf=FAR).clamp(max=FAR))


def _apart(got: Tensor, expected: Tensor) -> float:
    """Relative distance of two inputs, normalised for each token, so that large tokens do not hide others."""
    if got.shape != expected.shape:
        return FAR
    got_SE, expected_SE = got.flatten(1).float(), expected.flatten(1).float()
    return _average((got_SE - expected_SE).norm(dim=-1) / expected_SE.norm(dim=-1).clamp_min(1e-6))


def _average(distances: Tensor) -> float:
    """Return the root mean square."""
    return as_number(distances.double().square().mean().sqrt())
