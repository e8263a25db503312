"""A frozen target whose decoder layers are split over the GPUs of a node and gathered one at a time.

Every rank stores an equal part of each decoder layer (`torch.distributed.fsdp.fully_shard`), and all of the
embeddings, the final norm and the LM head: a loss reads the head for as long as it runs, so splitting
it would not lower the peak. A layer is gathered while the one before it computes, and freed after its use;
nodes are copies of each other. The trained module is not sharded here.

Gathering needs all ranks of a node, but their batches may need different forwards. So the ranks agree, before
each forward, on how many layers to gather, and a rank that needs no more forwards helps the others
(`Shards.join_ranks`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from longtrain.errors import ConfigError, ConflictError, TrainingError
from longtrain.provenance import machine_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PATIENCE = timedelta(days=7)
"""Longest wait for a rank that prepares data or writes answers; a rank that ends is noticed at once."""


@dataclass(frozen=True)
class Node:
    """The ranks that share a target.

    Args:
        mesh: the ranks as a mesh of one dimension, over which weights are gathered.
        host: the same ranks as a gloo group, over which they agree without using the GPU.
    """

    mesh: DeviceMesh
    host: Any

    @classmethod
    def join(cls, device: torch.device) -> Node:
        """Build the node of this machine's ranks; every rank of the run must call this.

        Raises:
            ConfigError: there is no process group, or the machines have different numbers of ranks.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "target.shard=fsdp2 splits the target over the ranks of a training run, and this is a single "
                "process; train with trainer=ddp trainer.devices=2 (or more) or under torchrun, or leave "
                "target.shard=null"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.empty(0, device=device)
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, machine_name())
        hosts = machines(names)
        mesh = init_device_mesh(device.type, (len(hosts), len(hosts[0])), mesh_dim_names=("node", "shard"))
        host, _ = dist.new_subgroups_by_enumeration(hosts, backend="gloo", timeout=PATIENCE)
        return cls(mesh["shard"], host)

    @property
    def size(self) -> int:
        """Number of ranks on the machine."""
        return self.mesh.size()

    def gather(self, value: Any) -> list[Any]:
        """Return a value of each rank of the machine, in rank order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.host)
        return found


def machines(names: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each machine.

    Args:
        names: name of the machine of each rank.

    Raises:
        ConfigError: machines have different numbers of ranks, or ranks that are not consecutive.
    """
    hosts = [list(ranks) for _, ranks in groupby(range(len(names)), key=names.__getitem__)]
    if len({len(ranks) for ranks in hosts}) > 1 or len(hosts) != len(set(names)):
        raise ConfigError(
            "target.shard=fsdp2 needs the same number of neighbouring ranks on every machine, and ranks "
            f"0..{len(names) - 1} are on {', '.join(names)}; start as many on each, machine by machine"
        )
    return hosts


class _Split(nn.Module):
    """Wraps a layer for `fully_shard`, so that its parameters are split without hooks on the layer's forward.

    Those hooks do not survive a forward that is left by an exception (`LeaveEarly`), and store an entry for
    each forward until a backward that never comes.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


class Shards:
    """The decoder layers of a target, each split over the ranks of a node.

    Args:
        layers: layers of a model on the meta device; they are replaced by empty ones on `device`.
        node: the ranks that share them.
        device: this rank's device.
    """

    def __init__(self, layers: Sequence[nn.Module], node: Node, device: torch.device) -> None:
        self.node, self.device = node, device
        self._split: list[Any] = []
        self._coming: dict[int, Any] = {}
        self._here: set[int] = set()
        self._until: int | None = None
        """Number of layers that the ranks gather in the current forward; None: there is none."""
        self._reached = 0
        """Number of layers that have been gathered in the current forward."""
        self._waits: list[tuple[Any, Any]] = []
        for index, layer in enumerate(layers):
            split = _Split(layer.requires_grad_(False))
            fully_shard(split, mesh=node.mesh, reshard_after_forward=True)
            self._split.append(split.to_empty(device=device))
            layer.register_forward_pre_hook(self._before(index))
            layer.register_forward_hook(self._after(index))

    @contextmanager
    def running(self, layers: int) -> Iterator[None]:
        """Context manager of a forward through `layers` layers; ranks gather the most that any requests.

        Raises:
            TrainingError: another rank of the node ended.
        """
        self._free_all()
        self._until, self._reached = self._agree(layers), 0
        try:
            yield
            self._free_all()
            # layers that this rank does not need, but another one does
            self._follow(layers, self._until)
        except Exception:  # other ranks wait for this one's part of the layers that it did not reach
            with suppress(Exception):
                self._free_all()
                self._follow(self._reached, self._until)
            raise
        finally:
            self._until = None
            self._free_all()

    def join_ranks(self) -> None:
        """Help with the forwards of the node's other ranks until all of them have called this.

        Raises:
            TrainingError: another rank of the node ended.
        """
        while until := self._agree(0):
            self._follow(0, until)

    def seconds_alone(self) -> float:
        """Measure the seconds to gather all layers while nothing computes; all ranks of the node call it."""
        self._follow(0, 1)  # the first gather also connects the ranks
        self.seconds_waited()
        self._follow(0, len(self._split))
        return self.seconds_waited()

    def gather(self, layer: int, then: int | None) -> None:
        """Wait for a layer's weights, and start to gather those of layer `then` meanwhile."""
        if layer not in self._here:
            coming = self._coming.pop(layer, None) or self._split[layer].unshard(async_op=True)
            began = self._now()
            coming.wait()
            self._waits.append((began, self._now()))
            self._here.add(layer)
            self._reached = layer + 1
        # prefetch: the next layer is gathered while this one computes
        if then is not None and then not in self._here and then not in self._coming:
            self._coming[then] = self._split[then].unshard(async_op=True)

    def free(self, layer: int) -> None:
        """Free a layer's weights except this rank's part."""
        if layer in self._here:
            self._here.remove(layer)
            self._split[layer].reshard()

    def regather(self, x: Tensor, *, enter: int | None, leave: int | None) -> Tensor:
        """Return the same tensor; backward frees layer `leave` here and gathers `enter` and the one below it.

        It is placed between layers whose weights a gradient flows through: autograd saves their tensors,
        which are empty until the layer is gathered again. All ranks of a node must go through the same
        layers.
        """
        return _Regather.apply(x, self, enter, leave) if x.requires_grad else x

    def seconds_waited(self) -> float:
        """Return the seconds since the last call that the device waited for layers.

        Arrival and reordering count; what overlapped with another layer's computation does not.
        """
        waits, self._waits = self._waits, []
        if self.device.type != "cuda":
            return sum(ended - began for began, ended in waits)
        if waits:
            waits[-1][1].synchronize()
        return sum(began.elapsed_time(ended) for began, ended in waits) / 1e3

    def _before(self, index: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            if self._until is None:
                raise ConflictError(
                    "a layer of a sharded target was called directly; call Target.forward or Target.packed"
                )
            self.gather(index, index + 1 if index + 1 < self._until else None)

        return hook

    def _after(self, index: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            self.free(index)

        return hook

    def _follow(self, start: int, stop: int) -> None:
        """Take part in gathering layers that another rank computes."""
        for layer in range(start, stop):
            self.gather(layer, layer + 1 if layer + 1 < stop else None)
            self.free(layer)

    def _free_all(self) -> None:
        for layer in sorted(self._here):
            self.free(layer)

    def _agree(self, layers: int) -> int:
        """Return the most layers that any rank of the node requests; 0 once all call `join_ranks`."""
        most = torch.tensor([layers])
        try:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.node.host)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:120]
            raise TrainingError(
                f"another rank that shares the target ended; its own message says why ({reason})"
            ) from error
        return int(most)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Regather(torch.autograd.Function):
    """Autograd function of `Shards.regather`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, enter: int | None, leave: int | None) -> Tensor:
        ctx.shards, ctx.enter, ctx.leave = shards, enter, leave
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.leave is not None:
            ctx.shards.free(ctx.leave)
        if ctx.enter is not None:
            ctx.shards.gather(ctx.enter, ctx.enter - 1 if ctx.enter else None)
        return grads[0], None, None, None


def rows_of(weight: DTensor) -> slice:
    """Return the range along dim 0 of a split weight that this rank stores."""
    mesh = weight.device_mesh
    each = -(-weight.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * each, weight.shape[0])
    return slice(first, min(first + each, weight.shape[0]))


def whole(weight: Tensor) -> Tensor:
    """Return a whole weight, gathering it if it is split; then every rank of the node must call this."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
