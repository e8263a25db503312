"""A run in numbers before anything is loaded: the target's shape, the ranks, and the memory of each rank.

`plan`, `train`, its dry run and the fitting of packed sequences to free memory all use one `RunPlan`, whose
numbers are computed at first access.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.costs import hardware, ranks
from longtrain.costs.footprint import Footprint, Spread, fits, held, refuse_lack
from longtrain.costs.model import Sizes
from longtrain.costs.ranks import Job, Memory
from longtrain.costs.training import PackedSequence, target_parameters
from longtrain.errors import ConfigError
from longtrain.files import read_json
from longtrain.jobs.planning.data import Lengths, document_lengths
from longtrain.jobs.planning.target_shape import target_shape
from longtrain.settings import AUTO, Count, convert
from longtrain.targets.at_hand import folder_of
from longtrain.training import strategy as strategies

if TYPE_CHECKING:
    import torch
    from torch import nn

    from longtrain.config import RunConfig
    from longtrain.costs.hardware import Gpu
    from longtrain.methods.spec import MethodSpec
    from longtrain.targets.info import TargetInfo
    from longtrain.training.settings import LoopConfig

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ROW_STEP, LONGEST_ROW = 1024, 2**22
"""Resolution and upper bound, in tokens, of the search for the largest sequence that fits."""


@dataclass(frozen=True)
class Setting:
    """A way of running the recipe: its layout over ranks and the method's settings.

    Args:
        words: command-line words that select it; empty: the recipe as given.
        layout: ranks, strategy and sharding.
        config: the method's settings.
        why: the reason why it needs less memory, in words.
    """

    words: tuple[str, ...]
    layout: Spread
    config: Any
    why: str = ""


@dataclass(frozen=True)
class RunPlan:
    """A run in numbers. Each property raises if its value is unknown or impossible.

    Args:
        cfg: the configuration.
        devices: ranks per machine; None: the meaning of `trainer.devices` on this machine.
        nodes: number of machines; None: `trainer.num_nodes`.
    """

    cfg: RunConfig
    devices: int | None = None
    nodes: int | None = None

    @property
    def spec(self) -> MethodSpec | None:
        """The method's spec, or None if none is chosen."""
        return None if self.cfg.method is None else self.cfg.method.spec

    @property
    def config(self) -> Any:
        """The method's settings, or None if none is chosen."""
        return None if self.cfg.method is None else self.cfg.method.settings

    @property
    def trained_method(self) -> MethodSpec:
        """The method's spec, for runs that train one."""
        assert self.spec is not None
        return self.spec

    @cached_property
    def _shape(self) -> tuple[TargetInfo, bool]:
        return target_shape(self.cfg.target, served=self.cfg.features.mode != "engine")

    @property
    def info(self) -> TargetInfo:
        """The target's shape.

        Raises:
            ConfigError: the shape is not available.
        """
        return self._shape[0]

    @property
    def tied(self) -> bool:
        """True if the target's LM head shares its embedding's weights."""
        return self._shape[1]

    @property
    def size(self) -> Sizes:
        """The target's sizes."""
        return Sizes.of(self.info)

    @property
    def itemsize(self) -> int:
        """Bytes per element of the target's dtype; `auto` is fp32 on a CPU, else bf16."""
        return ITEMSIZE.get(self.cfg.target.dtype, 4 if self.on_cpu else 2)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the target's weights."""
        return target_parameters(self.size, tied=self.tied) * self.itemsize

    @property
    def gpu(self) -> Gpu:
        """The GPU named by `gpu=`."""
        return hardware.named(self.cfg.plan.gpu, "gpu")

    @property
    def on_cpu(self) -> bool:
        """True if training runs on a CPU, whose speed is not modelled."""
        return self.cfg.trainer.accelerator == "cpu"

    @property
    def offline(self) -> bool:
        """True if training reads stored features and loads no layers of the target."""
        return self.cfg.features.without_layers

    @cached_property
    def layout(self) -> Spread:
        """The distribution of the run over ranks by `trainer` and `target.shard`.

        Raises:
            ConfigError: an unsupported strategy, or a single rank with `target.shard`.
        """
        check_strategy(self.cfg)
        trainer, shard = self.cfg.trainer, self.cfg.target.shard is not None
        devices = devices_of(trainer) if self.devices is None else self.devices
        zero = _zero(trainer.strategy) if strategies.is_deepspeed(trainer.strategy) else {}
        if shard and devices == 1 and not self.offline:  # with `offline`, no layers are loaded
            raise ConfigError(
                "target.shard=fsdp2 splits the target over the GPUs of a machine, and trainer.devices is 1; "
                "pass trainer=ddp trainer.devices=2 or more"
            )
        mixed = trainer.precision in ("auto", "bf16-mixed", "16-mixed")
        return Spread(
            devices=devices,
            nodes=trainer.num_nodes if self.nodes is None else self.nodes,
            shard=shard,
            mixed=mixed and not self.on_cpu,
            network_bytes_per_s=self.cfg.plan.network_gbits * 1e9 / 8,
            **zero,
        )

    @cached_property
    def _optimized(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that the method trains, by name, on the meta device."""
        spec = self.trained_method
        from longtrain.layers import shapes_alone

        with shapes_alone():
            module = spec.build(self.config, None if spec.export is not None else self.info)
        return self.cfg.optim.trainable(module.named_parameters())

    @cached_property
    def trained(self) -> int:
        """Number of weights that the method trains.

        Raises:
            ConfigError: the module cannot be built, or not be trained with `optim`.
        """
        return sum(parameter.numel() for _, parameter in self._optimized)

    @cached_property
    def moments(self) -> int:
        """Numbers in the optimizer's state."""
        return self.cfg.optim.moments(self._optimized)

    @cached_property
    def held(self) -> Footprint:
        """Memory of a rank that does not depend on its packed sequences."""
        if self.trained_method.export is not None:  # the method trains a target
            return held(None, self.layout, trained=self.trained, moments=self.moments)
        return held(
            self.size,
            self.layout,
            tied=self.tied,
            itemsize=self.itemsize,
            trained=self.trained,
            moments=self.moments,
            layers=not self.offline,
        )

    def refuse_lack(self, device: torch.device) -> None:
        """Refuse a training run that leaves a GPU no room for a packed sequence, before anything is loaded.

        Args:
            device: this rank's device; a CPU is not checked.

        Raises:
            ConfigError: a rank's fixed memory does not fit.
        """
        from longtrain.targets import loading

        if (has := loading.device_bytes(device)) is None:
            return
        if self.cfg.target.path:
            folder_of(self.cfg.target.path)  # downloads a Hub id now
        refuse_lack(self.held, has, f"the run does not fit: {device}")

    @property
    def given(self) -> Setting:
        """The setting of the recipe and the command line."""
        return Setting((), self.layout, self.config)

    @cached_property
    def sequences_per_step(self) -> int:
        """Packed sequences of all ranks in an optimizer step.

        Raises:
            ConfigError: the number is not divisible by the ranks.
        """
        ranks = self.layout.ranks
        return self.cfg.trainer.sequences_of_a_rank(ranks) * ranks

    def job(self, row: PackedSequence, setting: Setting) -> Job:
        """The job (micro-batch) of a packed sequence under a setting."""
        step = self.trained_method.cost.training(setting.config, self.size, row, self.trained, self.itemsize)
        counted = self.trained, self.moments
        return Job(self.size, self.tied, self.itemsize, *counted, row, step, self.offline)

    def memory(self, row: PackedSequence, setting: Setting) -> Memory:
        """A rank's memory for a packed sequence under a setting."""
        return ranks.memory(self.job(row, setting), setting.layout)

    def fits(self, row: PackedSequence, setting: Setting) -> bool:
        """True if the GPU of `gpu=` has room for the packed sequence."""
        return fits(self.memory(row, setting).peak, self.gpu.memory_bytes)

    @cached_property
    def rows(self) -> list[PackedSequence]:
        """The packed sequence of each stage that takes the most memory: the one with the most documents."""
        answer = int(self.cfg.data_values.get("answer_tokens") or 0)
        found = [PackedSequence(one.sequence_tokens, one.doc_tokens, answer) for one in self.cfg.stages]
        least = [None if one is None else one[1] for one in self._lengths]
        return [replace(row, usual_tokens=usual) for row, usual in zip(found, least, strict=True)]

    @cached_property
    def usual_rows(self) -> list[PackedSequence]:
        """A packed sequence of each stage with the average number of documents."""
        usual = [None if one is None else one[0] for one in self._lengths]
        return [replace(row, usual_tokens=mean) for row, mean in zip(self.rows, usual, strict=True)]

    @cached_property
    def _lengths(self) -> list[Lengths | None]:
        if self.trained_method.data is not None:  # the method has documents of its own
            return [None for _ in self.cfg.stages]
        return document_lengths(self.cfg, self.sequences_per_step)

    def largest(self, row: PackedSequence, setting: Setting) -> int:
        """The largest packed sequence that fits, in tokens, a multiple of 1024; 0 if none fits.

        Documents keep their length; one that fills its sequence grows with it, up to the
        target's number of positions.
        """
        whole = row.doc_tokens >= row.tokens

        def fits(blocks: int) -> bool:
            tokens = blocks * ROW_STEP
            document = min(tokens, self.info.max_positions) if whole else row.doc_tokens
            return self.fits(replace(row, tokens=tokens, doc_tokens=document), setting)

        low, high = 0, LONGEST_ROW // ROW_STEP
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low * ROW_STEP


def devices_of(trainer: LoopConfig) -> int:
    """Number of ranks per machine given by `trainer.devices`; `auto` is the number of GPUs present.

    Raises:
        ConfigError: `auto` on GPUs, and there are none on this machine.
    """
    import torch

    value = trainer.devices
    if isinstance(value, list) and value:
        return len(value)
    if value not in (AUTO, -1, "-1", None):
        return int(convert(value, Count, "trainer.devices"))
    here = 0 if trainer.accelerator == "cpu" else torch.cuda.device_count()
    if not here and trainer.accelerator not in ("cpu", AUTO):
        raise ConfigError(
            f"trainer.devices={value} means the GPUs of this machine, and it has none; pass how many the run "
            "will have, e.g. trainer.devices=8"
        )
    return max(1, here)


def check_strategy(cfg: RunConfig) -> None:
    """Refuse a strategy that is not supported, or not with the precision, the optimizer or the method.

    Raises:
        ConfigError: the strategy is refused; the message lists the allowed ones.
    """
    trainer, method = cfg.trainer, cfg.method
    strategies.check(trainer.strategy, precision=trainer.precision, optimizer=cfg.optim.name)
    clipped = trainer.gradient_clip_val
    several = method is not None and method.spec.members is not None
    if several and clipped and strategies.is_deepspeed(trainer.strategy):
        assert method is not None
        raise ConfigError(
            f"trainer.gradient_clip_val={clipped}: DeepSpeed clips all members of method={method.name} by "
            "one norm, so that one holds back the others; pass trainer=ddp, or trainer.gradient_clip_val=null"
        )


def _zero(strategy: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's settings as fields of `Spread`.

    The keys are Lightning's, or those of DeepSpeed's own `config`, a mapping or a JSON file.
    """
    stage: Any = strategy.get("stage")
    bucket = strategy.get("reduce_bucket_size")
    offload = convert(strategy.get("offload_optimizer", False), bool, "trainer.strategy.offload_optimizer")
    config = strategy.get("config")
    if config is not None:
        zero = _own_config(config).get("zero_optimization") or {}
        stage, bucket = zero.get("stage"), zero.get("reduce_bucket_size", 500_000_000)  # DeepSpeed's default
        offload = (zero.get("offload_optimizer") or {}).get("device") == "cpu"
    strategies.check_stage(stage)
    found = {"zero": int(stage), "offload": offload}
    return found if bucket is None else {**found, "bucket": int(bucket)}


def _own_config(config: Any) -> Mapping[str, Any]:
    """Read DeepSpeed's own configuration."""
    try:
        found = config if isinstance(config, Mapping) else read_json(Path(str(config)))
        if isinstance(found, Mapping):
            return found
        reason = "no mapping"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise ConfigError(
        f"trainer.strategy.config={config} cannot be read ({reason}); allowed: a mapping or a JSON file"
    )
