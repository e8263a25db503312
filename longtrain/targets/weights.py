"""Weights of a target folder (safetensors, int8 rows with scales, legacy `.bin`), and their fingerprint."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from longtrain.errors import ArtifactError, TargetMismatchError

INT8_FILE = "weights.int8.safetensors"
"""Rows stored as int8 with one scale each (`name` and `name.scale`); int8 * scale in bf16 is the weight."""
_SAMPLES = 256


def assign_weights(model: nn.Module, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
    """Fill a model built on the meta device, in place, one file at a time.

    Raises:
        ArtifactError: a file is missing, truncated or unreadable, or a tensor is missing.
        TargetMismatchError: a tensor's shape is not the config's.
    """
    missing = {name: param.shape for name, param in model.named_parameters() if param.is_meta}
    for file in weight_files(folder):
        for name, tensor in _tensors(file, device):
            if name not in missing:
                continue  # rotary buffers of old checkpoints, a tied head
            if tensor.shape != missing[name]:
                raise TargetMismatchError(
                    f"{file}: {name} has shape {tuple(tensor.shape)}, config.json says {tuple(missing[name])}"
                )
            owner, _, leaf = name.rpartition(".")
            value = nn.Parameter(tensor.to(device=device, dtype=dtype), requires_grad=False)
            setattr(model.get_submodule(owner), leaf, value)
            del missing[name]
    if missing:
        raise ArtifactError(
            f"{folder} lacks {len(missing)} tensors, the first is {min(missing)}; get the folder again"
        )


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, shards in order.

    Raises:
        ArtifactError: there are none, or an index names a file that is not there.
    """
    for name in ("model.safetensors", INT8_FILE, "model.safetensors.index.json", "pytorch_model.bin",
                 "pytorch_model.bin.index.json"):  # fmt: skip
        file = folder / name
        if not file.is_file():
            continue
        if not name.endswith(".index.json"):
            return [file]
        try:
            shards = sorted(set(json.loads(file.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ArtifactError(f"{file} is not a weight index ({error}); get the folder again") from error
        absent = [shard for shard in shards if not (folder / shard).is_file()]
        if absent:
            raise ArtifactError(f"{folder} lacks {absent[0]}, which {name} names; get the folder again")
        return [folder / shard for shard in shards]
    raise ArtifactError(
        f"{folder} has no weights; expected model.safetensors (or shards with an index), or {INT8_FILE}"
    )


def fingerprint(model: nn.Module, facts: dict[str, Any]) -> str:
    """Who the weights are: sha256 over facts of the config and, of each tensor, name, shape and bf16 samples.

    The same for one folder loaded in fp32 on a CPU and in bf16 on a GPU.

    Args:
        model: the model, on any device, in any dtype that holds its bf16 weights.
        facts: JSON values that belong to the identity.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    samples = []
    for name, param in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(param.shape)}".encode())
        flat = param.detach().reshape(-1)
        stride = max(1, flat.numel() // _SAMPLES)
        samples.append(flat[::stride].to(torch.bfloat16))
    digest.update(torch.cat(samples).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()


def _tensors(file: Path, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of one file, expanded if it holds int8 rows."""
    if file.suffix == ".bin":
        try:
            yield from torch.load(file, map_location="cpu", weights_only=True, mmap=True).items()
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ArtifactError(_damaged(file, error)) from error
        return
    try:
        with safe_open(file, framework="pt", device=str(device)) as store:
            names = list(store.keys())
            for name in names:
                if name.endswith(".scale") and name.removesuffix(".scale") in names:
                    continue
                tensor = store.get_tensor(name)
                if f"{name}.scale" in names:
                    tensor = (tensor.float() * store.get_tensor(f"{name}.scale")).to(torch.bfloat16)
                yield name, tensor
    except (SafetensorError, OSError) as error:
        raise ArtifactError(_damaged(file, error)) from error


def _damaged(file: Path, error: Exception) -> str:
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{file} is damaged or truncated ({first_line}); get the folder again"
