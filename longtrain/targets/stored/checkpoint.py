"""Reads the weights of a target folder, dequantised and under the names of transformers' models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from longtrain.errors import ArtifactError
from longtrain.targets.config_file import read_object
from longtrain.targets.stored.files import INT8_FILE, StoredTensors
from longtrain.targets.stored.quantised import (
    ACTIVATIONS,
    BLOCKS,
    EXPONENTS,
    MXFP4,
    SCALES,
    Quantisation,
    Scales,
    method_of,
    not_read,
    of_mxfp4,
)

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
BUFFERS = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Tensors that old checkpoints store and a model computes itself."""
EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight$")
"""Weights of one expert, which models hold as one tensor of all experts of a layer."""
STACKED = {"gate_proj": ("gate_up_proj", 0), "w1": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
           "w3": ("gate_up_proj", 1), "down_proj": ("down_proj", 0), "w2": ("down_proj", 0)}  # fmt: skip
"""Name of one expert's weight -> that tensor's name, and the place of the weight in each expert's part."""
RENAMED = {".block_sparse_moe.": ".mlp."}
"""Parts of names that older checkpoints have (Mixtral), and the model's own."""
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_AT_ONCE = 1 << 24
"""Number of values that are compared at once."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight of a checkpoint, read on request.

    Args:
        name: its name in the file.
        file: for error messages.
        shape: shape of the whole tensor.
        rows: range along dim 0 -> its values, in a floating-point dtype.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    rows: Callable[[slice], Tensor]


class StoredWeights:
    """The weights of a target folder.

    Args:
        folder: folder with config.json and weights.
        device: device that they are read to.
        tied: True if config.json says that the LM head is the embeddings.

    Raises:
        ArtifactError: a file is missing or damaged, or a tensor belongs to no weight.
        TargetMismatchError: the weights are quantised by a method that is not read.
    """

    def __init__(self, folder: Path, *, device: torch.device, tied: bool) -> None:
        self.folder = folder
        self._tensors = StoredTensors(folder, device)
        config = read_object(folder / "config.json")
        self._quantisation = Quantisation.of(config, str(folder))
        layers, more = (
            int(config.get(key) or 0) for key in ("num_hidden_layers", "num_nextn_predict_layers")
        )
        self._beyond = tuple(f"layers.{layers + i}." for i in range(more))
        self._prefix = "" if any(name.startswith("model.") for name in self._tensors) else "model."
        weights = [name for name in self._tensors if self._is_weight(name)]
        self._weights = {self._name(stored): stored for stored in weights}
        self._stacked = self._experts()
        self.tied = tied and not self._has_other_head()
        """True if the LM head is the embeddings: transformers ties none if a different one is stored."""

    def __iter__(self) -> Iterator[tuple[str, StoredWeight]]:
        """Yield name and weight, one file after the other."""
        for name, parts in self._stacked.items():
            yield name, self._stack(name, parts)
        for name, stored in self._weights.items():
            if not (self.tied and name == HEAD):
                yield name, self._weight(stored)
            elif EMBEDDINGS not in self._weights:  # then the head is both, as in transformers
                yield EMBEDDINGS, self._weight(stored)

    def _has_other_head(self) -> bool:
        if HEAD not in self._weights or EMBEDDINGS not in self._weights:
            return False
        head, embeddings = self._weight(self._weights[HEAD]), self._weight(self._weights[EMBEDDINGS])
        if head.shape != embeddings.shape or len(head.shape) != 2:
            return True
        step = max(1, _AT_ONCE // head.shape[1])
        parts = (slice(first, first + step) for first in range(0, head.shape[0], step))
        return not all(torch.equal(head.rows(part), embeddings.rows(part)) for part in parts)

    def _name(self, stored: str) -> str:
        """Return a tensor's name in a model with an LM head; checkpoints of the body alone omit `model.`."""
        for old, new in RENAMED.items():
            stored = stored.replace(old, new)
        if self._quantisation.method == MXFP4:
            stored = stored.removesuffix(BLOCKS)
        return stored if stored == HEAD else self._prefix + stored

    def _experts(self) -> dict[str, list[list[str]]]:
        """Take the experts' weights out of `_weights`; return tensor -> stored names by expert."""
        found: dict[str, dict[tuple[int, int], str]] = {}
        for name, stored in list(self._weights.items()):
            if one := EXPERT.match(name):
                leaf, place = STACKED[one[3]]
                found.setdefault(f"{one[1]}.{leaf}", {})[int(one[2]), place] = stored
                del self._weights[name]
        stacked: dict[str, list[list[str]]] = {}
        for name, parts in found.items():
            count, places = (1 + max(key[i] for key in parts) for i in (0, 1))
            wanted = [(expert, place) for expert in range(count) for place in range(places)]
            if lacking := [key for key in wanted if key not in parts]:
                raise ArtifactError(
                    f"{self.folder} lacks a weight of expert {lacking[0][0]} of {name}; get the folder again"
                )
            stacked[name] = [[parts[expert, place] for place in range(places)] for expert in range(count)]
        return stacked

    def _stack(self, name: str, parts: list[list[str]]) -> StoredWeight:
        """Return the weights of a layer's experts as one, [experts, rows of all parts, columns]."""
        first = [self._weight(one) for one in parts[0]]
        shapes = {self._tensors.shape(one) for of_expert in parts for one in of_expert}
        if len(shapes) != 1:
            raise ArtifactError(
                f"{first[0].file}: the experts of {name} have shapes {sorted(shapes)}; expected one; get the "
                "folder again"
            )
        rows, columns = first[0].shape

        def read(experts: slice) -> Tensor:
            each = [
                torch.cat([self._weight(one).rows(slice(None)) for one in some]) for some in parts[experts]
            ]
            return torch.stack(each)

        return StoredWeight(name, first[0].file, (len(parts), rows * len(first), columns), read)

    def _is_weight(self, name: str) -> bool:
        """Return True if a tensor is a weight; False if it belongs to one, or to a layer that is not run."""
        if BUFFERS.search(name) or name.removeprefix("model.").startswith(self._beyond):
            return False
        if self._quantisation.method == MXFP4 and name.endswith((BLOCKS, EXPONENTS)):
            stem = name.removesuffix(BLOCKS).removesuffix(EXPONENTS)
            self._need_weight(f"{stem}{BLOCKS}", f"{stem}{EXPONENTS}")
            self._need_weight(f"{stem}{EXPONENTS}", f"{stem}{BLOCKS}")
            return name.endswith(BLOCKS)
        if method := method_of(name):
            raise not_read(str(self.folder), method)
        if name.endswith(".scale") and self._tensors.file_of[name].name == INT8_FILE:
            self._need_weight(name, name.removesuffix(".scale"))
            return False
        for ends in (*SCALES, ".weight_zero_point"):
            if name.endswith(ends):
                self._check_quantised(name, f"{name.removesuffix(ends)}.weight")
                return False
        return not (self._quantisation.method and name.endswith(ACTIVATIONS))

    def _check_quantised(self, name: str, weight: str) -> None:
        """Refuse scales without a quantization_config, or that belong to no weight."""
        if not self._quantisation.method:
            raise ArtifactError(
                f"{self._tensors.file_of[name]} has {name}, and config.json has no quantization_config that "
                "says what it is; get the folder again"
            )
        self._need_weight(name, weight)
        if name.endswith(".weight_zero_point") and self._tensors.read(name).any():
            raise not_read(str(self.folder), f"{self._quantisation.method} with zero points")

    def _need_weight(self, name: str, weight: str) -> None:
        if weight not in self._tensors:
            raise ArtifactError(
                f"{self._tensors.file_of[name]} has {name} and no {weight}; get the folder again"
            )

    def _weight(self, name: str) -> StoredWeight:
        tensors = self._tensors
        shape, read = tensors.shape(name), partial(self._plain, name)
        if self._quantisation.method == MXFP4 and name.endswith(BLOCKS):
            shape, read = (shape[0], 32 * shape[2], shape[1]), partial(self._mxfp4, name)
        if f"{name}.scale" in tensors:
            read = partial(self._int8_rows, name)
        for ends in SCALES:
            if (scale := f"{name.removesuffix('.weight')}{ends}") in tensors and name.endswith(".weight"):
                values = tensors.read(scale)
                inverse = ends == SCALES[0] or self._quantisation.method == "fp8"
                found = Scales.of(name, values, shape, self._quantisation, inverse=inverse)
                read = partial(self._dequantised, name, found)
        return StoredWeight(name, tensors.file_of[name], shape, read)

    def _plain(self, name: str, rows: slice) -> Tensor:
        values = self._tensors.read(name, rows)
        if values.dtype not in PLAIN:
            kind = str(values.dtype).removeprefix("torch.")
            raise ArtifactError(
                f"{self._tensors.file_of[name]}: {name} is stored as {kind} without a scale; expected bf16, "
                "fp16 or fp32; get the folder again"
            )
        return values

    def _mxfp4(self, name: str, rows: slice) -> Tensor:
        exponents = f"{name.removesuffix(BLOCKS)}{EXPONENTS}"
        return of_mxfp4(self._tensors.read(name, rows), self._tensors.read(exponents, rows))

    def _int8_rows(self, name: str, rows: slice) -> Tensor:
        values, scale = self._tensors.read(name, rows), self._tensors.read(f"{name}.scale", rows)
        return (values.float() * scale).to(torch.bfloat16)

    def _dequantised(self, name: str, scales: Scales, rows: slice) -> Tensor:
        return scales.dequantise(self._tensors.read(name, rows), rows, self._tensors.shape(name)[0])
