"""Costs of a training run for each rank: GPU and host memory, and time.

A rank holds the frozen target (whole, or a shard of each layer), the trained weights with optimizer and
gradients as the strategy stores them, and the allocations of one micro-batch. Memory is the peak over the
phases of a step; PyTorch reserves more. Times follow from data-sheet peaks and measured shares of them.
Source: Lightning 2.6 (gradients of a step stay until the forward of the next has ended), PyTorch's DDP
(buckets beside the gradients) and DeepSpeed 0.19.8 (`runtime/zero/stage_1_and_2.py`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from longtrain.costs.footprint import CONTEXT, GATHERED, SPARE, Footprint, Spread, held
from longtrain.costs.hardware import BYTES_SHARE, GIB, Gpu
from longtrain.costs.model import Sizes
from longtrain.costs.training import (
    PackedSequence,
    StepCost,
    target_attention_flops,
    target_flops,
    target_pass_bytes,
)

LINEAR_SHARE, ATTENTION_SHARE = 0.64, 0.56
"""Shares of a GPU's peak that matrix products and attention reach. Fitted, with STEP_S and LAYER_S, to 22
training steps on H100 and H200, measured since attention of long documents is cuDNN's. In recipes/results:
`scaling` and `sharded` of cluster/four_gpus.json, lookaheadkv_step.json, draft_step.json,
longspec_training.json, and LongSpec's in h100. All are within 15% but that on an H100 with a 28M target and
documents of 8K, whose plan is 18% too short."""

LINK_SHARE = 0.8
"""Share of a link's peak that collectives of large tensors reach; an assumption."""

LAUNCH_S, STEP_S, LAYER_S = 8e-6, 0.014, 0.0002
"""Seconds for a kernel launch, and those that a micro-batch and each of the target's layers take beside what
is counted (data, launches, norms, rotations). Small targets decide them: ten of the steps above."""

WORKSPACE = 64 * 2**20
"""Workspace bytes of cuBLAS and cuBLASLt on Hopper."""

PROCESS = 4 * GIB
"""Host memory of a rank's process (Python, PyTorch and CUDA) in bytes; an assumption."""

CPU_ADAM_S = 4e-9
"""Seconds per weight of AdamW on the host; an assumption."""

PCIE = 20e9
"""Bytes per second between host and GPU; an assumption."""


@dataclass(frozen=True)
class Job:
    """A micro-batch of a method on a target.

    Args:
        size: the target.
        tied: True if its LM head is its embedding.
        itemsize: bytes of a number of the target.
        trained: number of trained weights.
        moments: numbers in the optimizer's state.
        row: the packed sequence.
        step: cost of the module's step on it.
        offline: True if all features are stored, and the target's layers are not loaded.
    """

    size: Sizes
    tied: bool
    itemsize: int
    trained: int
    moments: int
    row: PackedSequence
    step: StepCost
    offline: bool = False

    @property
    def layer_bytes(self) -> int:
        """Bytes of a decoder layer's weights."""
        return 0 if self.offline else self.size.weights // self.size.n_layers * self.itemsize

    def held(self, layout: Spread) -> Footprint:
        """Return the memory that a rank holds for the target and the trained weights."""
        return held(
            self.size,
            layout,
            tied=self.tied,
            itemsize=self.itemsize,
            trained=self.trained,
            moments=self.moments,
            layers=not self.offline,
        )

    @property
    def pass_bytes(self) -> int:
        """Return the bytes of activations of the target's pass."""
        return 0 if self.offline else target_pass_bytes(self.size, self.row, itemsize=self.itemsize)


@dataclass(frozen=True)
class Memory:
    """A rank's memory, in bytes.

    Args:
        target: the rank's weights of the target.
        gathered: buffers for gathered layers.
        trained: fp32 weights, the optimizer's state, and the copy in 16 bits.
        gradients: gradients kept between steps, DDP's buckets, and the sums of a chunked gradient.
        inputs: inputs of the module's step for the whole sequence.
        pass_: activations of the target's pass.
        module: activations of the module's step.
        peak: largest sum of memory at any time.
        phase: the phase of the step at the peak.
        host: host memory of all ranks of a machine.
    """

    target: int
    gathered: int
    trained: int
    gradients: int
    inputs: int
    pass_: int
    module: int
    peak: int
    phase: str
    host: int

    def largest(self) -> str:
        """Name the largest part of the peak."""
        parts = {
            "the target's weights": self.target + self.gathered,
            "trained weights, gradients and optimizer": self.trained + self.gradients,
            "activations of the target's pass": self.pass_ if self.phase != MODULE else 0,
            "activations of the module's step": self.inputs + self.module,
        }
        return max(parts, key=parts.__getitem__)


PASS, AGAIN, MODULE, BACKWARD = "the target's pass", "the guard's pass", "the module's step", "backward"


def memory(job: Job, layout: Spread) -> Memory:
    """Return a rank's memory at the peak of a step, and the host's."""
    weights, step = 4 * job.trained, job.step
    kept_by = job.held(layout)
    gathered, kept = kept_by.gathered, kept_by.gradients
    copies = weights // 2 if layout.mixed else 0
    buckets = weights if layout.ranks > 1 and not layout.zero else 0
    sums = weights if step.chunked else 0
    fixed = kept_by.target + weights + kept_by.optimizer + WORKSPACE + buckets
    beside = step.inputs + step.module + copies if step.beside_pass else 0
    phases = {PASS: fixed + gathered + kept + job.pass_bytes + beside}
    if step.again:
        phases[AGAIN] = fixed + gathered + kept + sums + copies + step.again + job.pass_bytes
    if not step.beside_pass:
        back = max(step.backward, sums)
        phases[MODULE] = fixed + kept + copies + sums + step.inputs + max(step.module, back)
    left = 0 if step.chunked else step.inputs + step.backward + copies
    reduced = weights if not layout.zero else weights + 2 * 4 * layout.bucket  # fp32, while backward runs
    regathered = gathered if step.beside_pass else 0
    phases[BACKWARD] = fixed + regathered + sums + reduced + left
    phase = max(phases, key=phases.__getitem__)
    return Memory(
        target=kept_by.target,
        gathered=gathered,
        trained=weights + kept_by.optimizer + copies,
        gradients=kept + buckets + sums,
        inputs=step.inputs,
        pass_=job.pass_bytes,
        module=step.module,
        peak=phases[phase],
        phase=phase,
        host=layout.devices * (PROCESS + kept_by.offloaded),
    )


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step of one rank, over all its micro-batches.

    Args:
        target: the target's passes.
        module: the module's steps.
        gather: waiting for gathered layers, as far as not overlapped with the passes.
        reduce: communication of gradients and, with ZeRO, of weights.
        optimizer: clipping and AdamW, for Muon too.
        host: what micro-batches and layers take beside the rest.
        step: the whole step.
    """

    target: float
    module: float
    gather: float
    reduce: float
    optimizer: float
    host: float
    step: float

    def to_json(self) -> dict[str, float]:
        """Return the fields in seconds."""
        return {f"{key}_s": value for key, value in asdict(self).items()}


def seconds(job: Job, layout: Spread, gpu: Gpu, *, rows: int, stored: float = 0.0) -> StepTime:
    """Predict the time of an optimizer step.

    Args:
        job: a micro-batch.
        layout: distribution of the run.
        gpu: the device.
        rows: micro-batches of a rank in a step.
        stored: share of the sequences whose features are read from disk instead of computed.
    """
    size, step, n = job.size, job.step, layout.ranks
    linear, attention = LINEAR_SHARE * gpu.flops_per_s, ATTENTION_SHARE * gpu.flops_per_s
    link, moved = LINK_SHARE * gpu.link_bytes_per_s, BYTES_SHARE * gpu.bytes_per_s
    across = link if layout.nodes == 1 else min(link, LINK_SHARE * layout.network_bytes_per_s)
    attended = target_attention_flops(size, job.row)
    through = (target_flops(size, job.row) - attended) / linear + attended / attention
    pass_s = (1 - stored) * through * rows
    module_s = rows * (
        (step.flops - step.attention_flops) / linear
        + step.attention_flops / attention
        + step.moved / moved
        + step.kernels * LAUNCH_S
    )
    gather_s = 0.0
    if layout.shard and layout.devices > 1:
        layer_s = job.layer_bytes * (1 - 1 / layout.devices) / link
        hidden_s = through / size.n_layers
        gather_s = (1 - stored) * rows * (layer_s + (size.n_layers - 1) * max(0.0, layer_s - hidden_s))
    weights = 4 * job.trained
    spread = 1 - 1 / n
    times = 1 + (rows if layout.zero == 2 else 1) if layout.zero else 2  # ZeRO-2 reduces every micro-batch
    reduce_s = times * spread * weights / across
    mine = job.trained / (n if layout.zero else 1)
    optimizer_s = 40 * mine / moved
    if layout.offload:
        optimizer_s = mine * (CPU_ADAM_S + 8 / PCIE)
    host_s = rows * (STEP_S + (1 - stored) * LAYER_S * size.n_layers)
    parts = (pass_s, module_s, gather_s, reduce_s, optimizer_s, host_s)
    return StepTime(*parts, sum(parts))


def assumptions(gpu: Gpu, layout: Spread) -> dict[str, float]:
    """Return all constants that a plan assumes, under names with units, for comparison with measurements."""
    return {
        "gpu_flops_per_s": gpu.flops_per_s,
        "gpu_bytes_per_s": gpu.bytes_per_s,
        "gpu_memory_bytes": gpu.memory_bytes,
        "link_bytes_per_s": gpu.link_bytes_per_s,
        "network_bytes_per_s": layout.network_bytes_per_s,
        "linear_share": LINEAR_SHARE,
        "attention_share": ATTENTION_SHARE,
        "bytes_share": BYTES_SHARE,
        "link_share": LINK_SHARE,
        "launch_s": LAUNCH_S,
        "host_step_s": STEP_S,
        "host_layer_s": LAYER_S,
        "workspace_bytes": WORKSPACE,
        "zero_bucket_bytes": 2 * 4 * layout.bucket,
        "gathered_layers": GATHERED,
        "context_bytes": CONTEXT,
        "spare_share": SPARE,
        "process_bytes": PROCESS,
        "cpu_adam_s_per_weight": CPU_ADAM_S,
        "pcie_bytes_per_s": PCIE,
    }
