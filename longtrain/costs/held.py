"""What a rank's GPU holds of a run whatever its rows are like, and the one judgement whether bytes fit a GPU.

Loading a target, `longtrain plan` and the dry run of a training all ask here and say the same sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

from longtrain.costs.hardware import GIB
from longtrain.costs.model import Sizes
from longtrain.costs.training import target_parameters
from longtrain.errors import ConfigError

GATHERED = 3
"""Layers' worth of memory that gathering takes: the one in use, the next one, and room to order its parts."""

CONTEXT = 2 * GIB
"""CUDA's context, NCCL's buffers and kernels on each GPU: outside of the peak that PyTorch counts."""

SPARE = 0.05
"""Share of what is needed that stays free, for fragments and longer documents."""


@dataclass(frozen=True)
class Spread:
    """How a run is spread.

    Args:
        devices: ranks of a machine.
        nodes: machines.
        zero: DeepSpeed's stage; 0: DDP, or one rank.
        offload: whether the optimizer's state is in host memory.
        shard: whether each machine holds one copy of the target's layers.
        mixed: whether trained weights are copied to 16 bits for the step.
        network_bytes_per_s: between machines, a GPU.
        bucket: numbers in each of DeepSpeed's two buckets of gradients; as Lightning sets it.
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
        """All ranks."""
        return self.devices * self.nodes

    def in_words(self) -> str:
        """For people."""
        where = f"{self.devices} on each of {self.nodes} machines" if self.nodes > 1 else "on one machine"
        how = (
            f"DeepSpeed ZeRO-{self.zero}" if self.zero else "DDP" if self.ranks > 1 else "no strategy needed"
        )
        how += ", optimizer state in host memory" if self.offload else ""
        return f"{where}, {how}, target {'split over each machine' if self.shard else 'whole on each'}"


@dataclass(frozen=True)
class Held:
    """What one rank holds from its first step to its last, in bytes; what a row takes comes on top.

    Args:
        target: the target's weights that the rank keeps.
        gathered: room for the layers that are gathered.
        weights: trained weights in fp32.
        optimizer: the optimizer's state on the GPU.
        gradients: gradients that stay from one step to the next.
        offloaded: the optimizer's state in host memory, with the gradients that are copied there.
        split: whether the ranks of a machine share the target's layers.
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
        """All of it that is on the GPU."""
        return self.target + self.gathered + self.weights + self.optimizer + self.gradients

    def lacks(self, has: float, place: str) -> str | None:
        """Why a GPU is too small for any row at all, and what to do, in one sentence; None where it is not.

        Args:
            has: bytes of the GPU, or those that are free there.
            place: the GPU, for the message.
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
    layers: bool = True,
) -> Held:
    """What a rank holds.

    Args:
        size: the target; None where there is none.
        layout: how the run is spread.
        tied: whether the target's head is its embedding.
        itemsize: bytes of one of its numbers.
        trained: weights that are trained.
        layers: whether the target's layers are loaded; they are not where all features are read.
    """
    layer = size.weights // size.n_layers * itemsize if size is not None and layers else 0
    deep = 0 if size is None else size.n_layers
    ends = 0 if size is None else (target_parameters(size, tied=tied) - size.weights) * itemsize
    on_gpu, on_host = optimizer_bytes(trained, layout)
    return Held(
        target=ends + (layer * deep // layout.devices if layout.shard else layer * deep),
        gathered=min(GATHERED, deep) * layer if layout.shard else 0,
        weights=4 * trained,
        optimizer=on_gpu,
        gradients=0 if layout.zero else 4 * trained,
        offloaded=on_host,
        split=layout.shard,
    )


def optimizer_bytes(trained: int, layout: Spread) -> tuple[int, int]:
    """What the optimizer keeps of the trained weights on a rank's GPU, and in host memory.

    That is Adam's two moments, ZeRO's own fp32 weights, and with offload gradients and their copy.
    """
    state, share = 4 * trained * (3 if layout.zero else 2), layout.ranks if layout.zero else 1
    if layout.offload:
        return 0, (state + 8 * trained) // share
    return state // share, 0


def refuse_lack(what: Held, has: float, place: str) -> None:
    """Refuse a run that a GPU has no room for; see `Held.lacks`.

    Raises:
        ConfigError: what is held does not fit.
    """
    if sentence := what.lacks(has, place):
        raise ConfigError(sentence)


def needed(peak: float) -> float:
    """Bytes of a GPU that a peak takes with room for fragments and for CUDA itself."""
    return peak * (1 + SPARE) + CONTEXT


def fits(peak: float, has: float) -> bool:
    """Whether a GPU of so many bytes has room for a peak."""
    return needed(peak) <= has
