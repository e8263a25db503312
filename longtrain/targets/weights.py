"""Weights of a target folder (safetensors, int8 rows with scales, legacy `.bin`), and their fingerprint."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longtrain.errors import ArtifactError, TargetMismatchError
from longtrain.files import read_json
from longtrain.targets.sharded import rows_of

if TYPE_CHECKING:
    from longtrain.targets.sharded import Shards

INT8_FILE = "weights.int8.safetensors"
"""Rows stored as int8 with one scale each (`name` and `name.scale`); int8 * scale in bf16 is the weight."""
_SAMPLES = 256


def assign_weights(model: nn.Module, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
    """Fill a model built on the meta device, in place, one file at a time; of a split weight its own rows.

    Raises:
        ArtifactError: a file is missing, truncated or unreadable, or a tensor is missing.
        TargetMismatchError: a tensor's shape is not the config's.
    """
    missing = {name: param.shape for name, param in _empty(model)}
    for file in weight_files(folder):
        for name, stored in tensors_of(file, device):
            if name not in missing:
                continue  # rotary buffers of old checkpoints, a tied head
            if stored.shape != tuple(missing[name]):
                raise TargetMismatchError(
                    f"{file}: {name} has shape {stored.shape}, config.json says {tuple(missing[name])}"
                )
            _fill(model, name, stored.rows, dtype=dtype, device=device)
            del missing[name]
    if missing:
        raise ArtifactError(
            f"{folder} lacks {len(missing)} tensors, the first is {min(missing)}; get the folder again"
        )


def random_weights(model: nn.Module, seed: int, *, dtype: torch.dtype, device: torch.device) -> None:
    """Fill a model built on the meta device with random weights, in place.

    They depend on the seed and the kind of device, and not on how weights are split.
    """
    for name, param in list(_empty(model)):
        value = random_tensor(name, param.shape, seed=seed, dtype=dtype, device=device)
        _fill(model, name, value.__getitem__, dtype=dtype, device=device)


def random_tensor(
    name: str, shape: torch.Size, *, seed: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A weight by its name; no other weight changes it."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    coins = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:7], "big"))
    return draw(name, torch.empty(shape, dtype=dtype, device=device), coins)


def draw(name: str, tensor: Tensor, coins: torch.Generator) -> Tensor:
    """Fill a tensor with random weights: norms are 1, and a matrix keeps the size of what it multiplies."""
    if tensor.dim() == 1 and name.endswith("norm.weight"):
        return tensor.fill_(1.0)
    return tensor.normal_(0.0, tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 0.02, generator=coins)


def _empty(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that have no values yet, by name."""
    for name, param in model.named_parameters():
        if param.is_meta or isinstance(param, DTensor):
            yield name, param


def _fill(
    model: nn.Module,
    name: str,
    rows: Callable[[slice], Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Give a parameter its values; `rows` reads some of them."""
    param = model.get_parameter(name)
    if isinstance(param, DTensor):
        mine = rows_of(param)
        if mine.start < mine.stop:
            with torch.no_grad():
                param.to_local().copy_(rows(mine))
        return
    owner, _, leaf = name.rpartition(".")
    value = rows(slice(None)).to(device=device, dtype=dtype)
    setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))


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
            shards = sorted(set(read_json(file)["weight_map"].values()))
            if not shards or not all(isinstance(one, str) and Path(one).name == one for one in shards):
                raise ValueError("weight_map must give file names of this folder")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ArtifactError(f"{file} is not a weight index ({error}); get the folder again") from error
        absent = [shard for shard in shards if not (folder / shard).is_file()]
        if absent:
            raise ArtifactError(f"{folder} lacks {absent[0]}, which {name} names; get the folder again")
        return [folder / shard for shard in shards]
    raise ArtifactError(
        f"{folder} has no weights; expected model.safetensors (or shards with an index), or {INT8_FILE}"
    )


def fingerprint(model: nn.Module, facts: dict[str, Any], shards: Shards | None = None) -> str:
    """Who the weights of a model are; see `identity`.

    Args:
        model: the model, on any device, in any dtype that holds its bf16 weights.
        facts: JSON values that belong to the identity.
        shards: its layers, if they are split; every rank that shares them calls this.
    """
    samples: dict[str, Tensor] = {}
    for name, param in sorted(model.named_parameters()):
        first, flat = 0, param.detach()
        if isinstance(flat, DTensor):
            first = -rows_of(flat).start * (param.numel() // param.shape[0]) % _stride(param)
            flat = flat.to_local()
        samples[name] = flat.reshape(-1)[first :: _stride(param)].to(torch.bfloat16)
    mine = _on_host(samples)
    if shards is not None:
        split = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
        parts = shards.node.gather({name: mine[name] for name in split})
        mine |= {name: b"".join(part[name] for part in parts) for name in split}
    return identity({name: (param.shape, mine[name]) for name, param in model.named_parameters()}, facts)


def sample(weight: Tensor, dtype: torch.dtype) -> bytes:
    """Evenly spaced values of a whole weight as it will be in `dtype`, in bf16."""
    few = weight.reshape(-1)[:: _stride(weight)].to(dtype).to(torch.bfloat16)
    return few.view(torch.int16).cpu().numpy().tobytes()


def identity(samples: Mapping[str, tuple[torch.Size, bytes]], facts: dict[str, Any]) -> str:
    """Who weights are: sha256 over facts of the config and, of each tensor, name, shape and bf16 samples.

    The same for one folder loaded in fp32 on a CPU, in bf16 on a GPU, or split over ranks.

    Args:
        samples: name -> the tensor's shape, and its sample.
        facts: JSON values that belong to the identity.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, (shape, _) in sorted(samples.items()):
        digest.update(f"{name}{tuple(shape)}".encode())
    digest.update(b"".join(values for _, (_, values) in sorted(samples.items())))
    return digest.hexdigest()


def _stride(weight: Tensor) -> int:
    return max(1, weight.numel() // _SAMPLES)


def _on_host(samples: dict[str, Tensor]) -> dict[str, bytes]:
    """Tensors of 16 bits as bytes, in one transfer."""
    numbers = torch.cat(list(samples.values())).view(torch.int16).cpu()
    cut = numbers.split([len(value) for value in samples.values()])
    return {name: part.numpy().tobytes() for name, part in zip(samples, cut, strict=True)}


@dataclass(frozen=True)
class _Stored:
    """A tensor of a file, read when its rows are asked for.

    Args:
        file: for error messages.
        shape: of the whole tensor.
        read: rows -> their values.
    """

    file: Path
    shape: tuple[int, ...]
    read: Callable[[slice], Tensor]

    def rows(self, which: slice) -> Tensor:
        """Some rows.

        Raises:
            ArtifactError: the file is damaged.
        """
        try:
            return self.read(which)
        except (SafetensorError, OSError) as error:
            raise ArtifactError(_damaged(self.file, error)) from error


def tensors_of(file: Path, device: torch.device) -> Iterator[tuple[str, _Stored]]:
    """Name and tensor of one file, expanded if it holds int8 rows."""
    if file.suffix == ".bin":
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ArtifactError(_damaged(file, error)) from error
        for name, tensor in state.items():
            yield name, _Stored(file, tuple(tensor.shape), tensor.__getitem__)
        return
    try:
        with safe_open(file, framework="pt", device=str(device)) as store:
            names = set(store.keys())
            for name in store.keys():  # noqa: SIM118 (it is no mapping)
                if name.endswith(".scale") and name.removesuffix(".scale") in names:
                    continue
                shape = tuple(store.get_slice(name).get_shape())
                yield name, _Stored(file, shape, partial(_rows, store, name, f"{name}.scale" in names))
    except (SafetensorError, OSError) as error:
        raise ArtifactError(_damaged(file, error)) from error


def _rows(store: Any, name: str, scaled: bool, which: slice) -> Tensor:
    """Rows of a tensor of an open file; int8 rows times their scales in bf16."""
    if which == slice(None):
        tensor, scale = store.get_tensor(name), store.get_tensor(f"{name}.scale") if scaled else None
    else:
        tensor = store.get_slice(name)[which]
        scale = store.get_slice(f"{name}.scale")[which] if scaled else None
    return tensor if scale is None else (tensor.float() * scale).to(torch.bfloat16)


def _damaged(file: Path, error: Exception) -> str:
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{file} is damaged or truncated ({first_line}); get the folder again"
