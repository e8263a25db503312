"""Memory that a rank holds before any batch, and the rule that decides if it fits a GPU.

Loading a target, `longtrain plan` and the dry run of a training all use this check and its message.
"""

from __future__ import annotations

from dataclasses import dataclass

from longtrain.costs.hardware import GIB
from longtrain.costs.model import Sizes
from longtrain.costs.training import target_parameters
from longtrain.errors import ConfigError

GATHERED = 3
"""Memory for gathering, in layers: the one in use, the next one, and a buffer to reorder its shards."""

CONTEXT = 2 * GIB
"""Bytes of CUDA's context, NCCL's buffers and kernels on each GPU, which PyTorch's peak does not include."""

SPARE = 0.05
"""Extra share of the needed memory, for fragmentation and longer documents."""


@dataclass(frozen=True)
class Spread:
    """The distribution of a run over devices and machines.

    Args:
        devices: ranks of a machine.
        nodes: machines.
        zero: DeepSpeed's stage; 0: DDP, or one rank.
        offload: True if the optimizer's state is in host memory.
        shard: True if the ranks of a machine share one copy of the target's layers.
        mixed: True if trained weights are copied to 16 bits for the step.
        network_bytes_per_s: bandwidth between machines, per GPU.
        bucket: numbers in each of DeepSpeed's two gradient buckets (Lightning's default).
    """

    devices: int = 1
    nodes: int = 1
    zero: int = 0
    offload: bool = False
    shard: bool = False
    mixed: bool = True
    network_bytes_per_s: float = 50e9
    bucket: int = 200_000_000

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.devices * self.nodes

    def in_words(self) -> str:
        """Describe the distribution in words."""
        where = f"{self.devices} on each of {self.nodes} machines" if self.nodes > 1 else "on one machine"
        how = (
            f"DeepSpeed ZeRO-{self.zero}" if self.zero else "DDP" if self.ranks > 1 else "no strategy needed"
        )
        how += ", optimizer state in host memory" if self.offload else ""
        return f"{where}, {how}, target {'split over each machine' if self.shard else 'whole on each'}"


@dataclass(frozen=True)
class Footprint:
    """Bytes that one rank holds from its first step to its last; a batch's activations come on top.

    Args:
        target: the rank's weights of the target.
        gathered: buffers for gathered layers.
        weights: trained weights in fp32.
        optimizer: the optimizer's state on the GPU.
        gradients: gradients that persist between steps.
        offloaded: the optimizer's state in host memory, with copies of gradients.
        split: True if the ranks of a machine share the target's layers.
    """

    target: int
    gathered: int = 0
    weights: int = 0
    optimizer: int = 0
    gradients: int = 0
    offloaded: int = 0
    split: bool = False

    @property
    def bytes(self) -> int:
        """Sum of the parts on the GPU."""
        return self.target + self.gathered + self.weights + self.optimizer + self.gradients

    def lacks(self, has: float, place: str) -> str | None:
        """Return a message if a GPU is too small for any batch, with advice; None if it is not.

        Args:
            has: the GPU's memory in bytes, total or free.
            place: name of the GPU, for the message.
        """
        if fits(self.bytes, has):
            return None
        parts = {
            "the target's weights": self.target,
            "layers being gathered": self.gathered,
            "trained weights, optimizer and gradients": self.weights + self.optimizer + self.gradients,
        }
        named = ", ".join(f"{size / GIB:.4g} GiB for {name}" for name, size in parts.items() if size)
        advice = (
            "use machines with more GPUs, or a smaller target"
            if self.split
            else "train with the target split over the GPUs of a machine (trainer=ddp target.shard=fsdp2); "
            "other jobs can hold it in host memory (target.device=cpu)"
        )
        return (
            f"{place} has {has / GIB:.4g} GiB, and {needed(self.bytes) / GIB:.4g} GiB are needed before any "
            f"row: {named}, and what CUDA takes; {advice}"
        )


def held(
    size: Sizes | None,
    layout: Spread,
    *,
    tied: bool = False,
    itemsize: int = 2,
    trained: int = 0,
    moments: int = 0,
    layers: bool = True,
) -> Footprint:
    """Return the memory that a rank holds.

    Args:
        size: the target; None: there is none.
        layout: distribution of the run.
        tied: True if the target's LM head is its embedding.
        itemsize: bytes of a number of the target.
        trained: number of trained weights.
        moments: numbers in the optimizer's state (`Optim.moments`).
        layers: True: the target's layers are loaded; False: all features are stored.
    """
    layer = size.weights // size.n_layers * itemsize if size is not None and layers else 0
    deep = 0 if size is None else size.n_layers
    ends = 0 if size is None else (target_parameters(size, tied=tied) - size.weights) * itemsize
    on_gpu, on_host = optimizer_bytes(trained, moments, layout)
    return Footprint(
        target=ends + (layer * deep // layout.devices if layout.shard else layer * deep),
        gathered=min(GATHERED, deep) * layer if layout.shard else 0,
        weights=4 * trained,
        optimizer=on_gpu,
        gradients=0 if layout.zero else 4 * trained,
        offloaded=on_host,
        split=layout.shard,
    )


def optimizer_bytes(trained: int, moments: int, layout: Spread) -> tuple[int, int]:
    """Return the bytes of optimizer state on a rank's GPU, and in host memory.

    This includes the moments, ZeRO's fp32 weights, and with offload the gradients and their copy.
    """
    state = 4 * (moments + (trained if layout.zero else 0))
    share = layout.ranks if layout.zero else 1
    if layout.offload:
        return 0, (state + 8 * trained) // share
    return state // share, 0


def refuse_lack(what: Footprint, has: float, place: str) -> None:
    """Refuse a run that does not fit a GPU; see `Footprint.lacks`.

    Raises:
        ConfigError: the memory does not fit.
    """
    if sentence := what.lacks(has, place):
        raise ConfigError(sentence)


def needed(peak: float) -> float:
    """Return the GPU memory in bytes needed for a peak, with room for fragmentation and CUDA's context."""
    return peak * (1 + SPARE) + CONTEXT


def fits(peak: float, has: float) -> bool:
    """Return True if a GPU with so many bytes has room for a peak."""
    return needed(peak) <= has
