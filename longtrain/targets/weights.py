"""Fills a model with stored or random weights, and computes the hash that identifies weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longtrain.errors import ArtifactError, TargetMismatchError
from longtrain.targets.sharded import rows_of
from longtrain.targets.stored.checkpoint import EMBEDDINGS, HEAD, StoredWeight, StoredWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longtrain.targets.sharded import Shards

_SAMPLES = 256


def assign_weights(
    model: nn.Module, checkpoint: StoredWeights, *, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Fill a model built on the meta device, one file at a time; split weights get this rank's part.

    Returns:
        Samples of each stored weight by name, for `gathered`, taken before the cast to `dtype`.

    Raises:
        ArtifactError: a file is damaged, a tensor is missing, or the model has none of its name.
        TargetMismatchError: a tensor's shape is not the config's.
    """
    missing = {name: value.shape for name, value in _empty(model)}
    known, samples = dict(missing), {}
    for name, stored in checkpoint:
        check_shape(name, stored, known)
        samples[name] = _fill(model, name, stored.rows, dtype=dtype, device=device)
        missing.pop(name, None)
    refuse_missing(missing, checkpoint.folder)
    return samples


def check_shape(name: str, stored: StoredWeight, shapes: Mapping[str, torch.Size]) -> None:
    """Refuse a tensor that does not belong to the model.

    Args:
        name: the tensor's name in the model.
        stored: the tensor.
        shapes: name -> shape of each of the model's tensors.

    Raises:
        ArtifactError: the model has none of its name.
        TargetMismatchError: the model's has another shape.
    """
    if name not in shapes:
        raise ArtifactError(
            f"{stored.file} has {stored.name}, which the model of config.json has not; get the folder "
            "again, or the config.json that belongs to these weights"
        )
    if stored.shape != tuple(shapes[name]):
        raise TargetMismatchError(
            f"{stored.file}: {stored.name} has shape {stored.shape}, config.json says {tuple(shapes[name])}"
        )


def refuse_missing(missing: Collection[str], folder: Path) -> None:
    """Refuse a folder without all tensors of the model.

    Raises:
        ArtifactError: a tensor is missing.
    """
    if missing:
        raise ArtifactError(
            f"{folder} lacks {len(missing)} tensors, the first is {min(missing)}; get the folder again"
        )


def random_weights(model: nn.Module, seed: int, *, dtype: torch.dtype, device: torch.device) -> None:
    """Fill a model built on the meta device with random weights, in place.

    They depend on the seed and the kind of device, and not on how weights are split.
    """
    for name, empty in list(_empty(model)):
        value = random_tensor(name, empty.shape, seed=seed, dtype=dtype, device=device)
        _fill(model, name, value.__getitem__, dtype=dtype, device=device)


def random_tensor(
    name: str, shape: torch.Size, *, seed: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Draw a weight from a generator seeded by its name, so that other weights do not change it."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    rng = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:7], "big"))
    return draw(name, torch.empty(shape, dtype=dtype, device=device), rng)


def draw(name: str, tensor: Tensor, rng: torch.Generator) -> Tensor:
    """Fill a tensor with random weights: norms are 1, and matrices preserve the scale of their input."""
    if tensor.dim() == 1 and name.endswith("norm.weight"):
        return tensor.fill_(1.0)
    return tensor.normal_(0.0, tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.02, generator=rng)


def stored_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a checkpoint stores, by name: parameters, and buffers such as the biases of routers."""
    yield from model.named_parameters()
    kept = model.state_dict().keys()
    yield from ((name, value) for name, value in model.named_buffers() if name in kept)


def _empty(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that have no values yet, by name."""
    for name, value in stored_values(model):
        if value.is_meta or isinstance(value, DTensor) or not isinstance(value, nn.Parameter):
            yield name, value


def _fill(
    model: nn.Module,
    name: str,
    rows: Callable[[slice], Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Fill a weight with the values that `rows` reads; return samples of them, on `device`.

    A weight that the model keeps in a wider dtype, such as a router's, stays in that.
    """
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    param: Tensor = getattr(module, leaf)
    if isinstance(param, DTensor):
        mine = rows_of(param)
        if mine.start >= mine.stop:
            return _samples(param, param.to_local()).to(device)
        read = rows(mine)
        with torch.no_grad():
            param.to_local().copy_(read)
        return _samples(param, read).to(device)
    read = rows(slice(None))
    value = read.to(device=device, dtype=torch.promote_types(param.dtype, dtype))
    if isinstance(param, nn.Parameter):
        value = nn.Parameter(value, requires_grad=False)
    setattr(module, leaf, value)
    return _samples(param, read).to(device)


def sampled(model: nn.Module) -> dict[str, Tensor]:
    """Return samples of a model's weights by name, for `gathered`, from this rank's part of split ones."""
    values = {name: value.detach() for name, value in stored_values(model)}
    return {
        name: _samples(value, value.to_local() if isinstance(value, DTensor) else value)
        for name, value in values.items()
    }


def gathered(
    model: nn.Module, samples: Mapping[str, Tensor], shards: Shards | None = None
) -> dict[str, tuple[torch.Size, bytes]]:
    """Return shape and samples of each weight of a model, as needed by `identity`.

    Args:
        model: the model, on any device, in any dtype.
        samples: samples of all its weights, on one device.
        shards: its layers, if they are split; every rank that shares them calls this.
    """
    mine = _on_host(dict(sorted(samples.items())))
    if shards is not None:
        split = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
        parts = shards.node.gather({name: mine[name] for name in split})
        mine |= {name: b"".join(part[name] for part in parts) for name in split}
    return {name: (value.shape, mine[name]) for name, value in stored_values(model)}


def sample(weight: Tensor) -> bytes:
    """Return evenly spaced values of a whole weight, in bf16."""
    return _samples(weight, weight).view(torch.int16).cpu().numpy().tobytes()


def identity(samples: Mapping[str, tuple[torch.Size, bytes]], facts: dict[str, Any]) -> str:
    """Return the sha256 that identifies weights: over facts, and name, shape and bf16 samples of each tensor.

    The same for one folder in any dtype, on any device and over any number of ranks; and whether an LM head
    equal to the embeddings is tied to them or stored beside them.

    Args:
        samples: name -> the tensor's shape, and its sample.
        facts: JSON values that belong to the identity.
    """
    if HEAD in samples and samples[HEAD] == samples.get(EMBEDDINGS):
        samples = {name: one for name, one in samples.items() if name != HEAD}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, (shape, _) in sorted(samples.items()):
        digest.update(f"{name}{tuple(shape)}".encode())
    digest.update(b"".join(values for _, (_, values) in sorted(samples.items())))
    return digest.hexdigest()


def _samples(weight: Tensor, values: Tensor) -> Tensor:
    """Return evenly spaced values of a weight, in bf16.

    Args:
        weight: the weight, whose shape decides which values; if it is split, those within this rank's part.
        values: this rank's part, or all.
    """
    stride, first = max(1, weight.numel() // _SAMPLES), 0
    if isinstance(weight, DTensor):
        # the first sampled position of the whole weight that lies in this rank's part
        first = -rows_of(weight).start * (weight.numel() // weight.shape[0]) % stride
    return values.reshape(-1)[first::stride].to(torch.bfloat16)


def _on_host(samples: dict[str, Tensor]) -> dict[str, bytes]:
    """Convert tensors of 16 bits to bytes, in one transfer."""
    numbers = torch.cat(list(samples.values())).view(torch.int16).cpu()
    cut = numbers.split([len(value) for value in samples.values()])
    return {name: part.numpy().tobytes() for name, part in zip(samples, cut, strict=True)}


def rebuild_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute what is not among the weights on disk: rotary frequencies (fp32) and the embeddings' scale."""
    body: Any = model.model
    body.rotary_emb = type(body.rotary_emb)(config=model.config).to(device)
    if hasattr(body.embed_tokens, "embed_scale"):
        dtype = torch.promote_types(body.embed_tokens.weight.dtype, torch.float32)
        body.embed_tokens.embed_scale = torch.tensor(
            model.config.hidden_size**0.5, device=device, dtype=dtype
        )
