"""A run in numbers before anything is loaded: its target's shape, its ranks, and what each of them holds.

Whatever must fit is judged by `costs.held`; `plan`, `train` and its dry run ask here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from longtrain import methods
from longtrain.costs.held import Held, Spread, held, refuse_lack
from longtrain.costs.model import Sizes
from longtrain.errors import ConfigError
from longtrain.files import read_json
from longtrain.jobs.features import settings_of
from longtrain.jobs.setup import plain, target_key
from longtrain.settings import AUTO, Count, convert
from longtrain.settings import read as typed
from longtrain.targets.at_hand import folder_of
from longtrain.targets.info import TargetInfo
from longtrain.training import strategy as strategies

if TYPE_CHECKING:
    import torch

    from longtrain.methods.spec import MethodSpec


@dataclass(frozen=True)
class _Shape:
    """A target's sizes, as `target.shape` gives them."""

    n_layers: Count
    n_heads: Count
    n_kv_heads: Count
    head_dim: Count
    hidden_size: Count
    intermediate_size: Count
    vocab_size: Count
    max_positions: Count
    tied: bool = False


ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def itemsize_of(cfg: DictConfig) -> int:
    """Bytes of one of the target's numbers; `auto` is fp32 on a CPU, else bf16."""
    usual = 4 if str(cfg.trainer.get("accelerator")) == "cpu" else 2
    return ITEMSIZE.get(str(cfg.target.dtype), usual)


def trained_weights(spec: MethodSpec, config: Any, info: TargetInfo | None) -> int:
    """How many weights a method trains, counted on its module without memory."""
    import torch

    with torch.device("meta"):
        module = spec.build(config, info)
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def devices_of(cfg: DictConfig) -> int:
    """How many ranks of a machine `trainer.devices` means; `auto`: one for each GPU that is here.

    Raises:
        ConfigError: `auto` on GPUs, and there are none here.
    """
    import torch

    words = cfg.trainer
    value, accelerator = plain(words.get("devices")), str(words.get("accelerator"))
    if isinstance(value, list) and value:
        return len(value)
    if value not in (AUTO, -1, "-1", None):
        return convert(value, Count, "trainer.devices")
    here = 0 if accelerator == "cpu" else torch.cuda.device_count()
    if not here and accelerator not in ("cpu", AUTO):
        raise ConfigError(
            f"trainer.devices={value} means the GPUs of this machine, and it has none; say how many the run "
            "will have, e.g. trainer.devices=8"
        )
    return max(1, here)


def held_of(cfg: DictConfig, *, devices: int, nodes: int) -> tuple[Held, int]:
    """What a rank of a training run holds whatever its rows are like, and how many weights are trained.

    Args:
        cfg: the resolved configuration, with a method.
        devices: ranks of a machine.
        nodes: machines.

    Raises:
        ConfigError: the target's shape is not at hand, or a strategy that cannot be.
    """
    spec = methods.get(str(cfg.method.name))
    config: Any = typed(spec.config, plain(cfg.method), "method", ignore=("name",))
    layout = layout_of(cfg, devices=devices, nodes=nodes)
    if spec.export is not None:  # it trains a target
        trained = trained_weights(spec, config, None)
        return held(None, layout, trained=trained), trained
    info, tied = target_shape(cfg)
    trained = trained_weights(spec, config, info)
    layers, itemsize = settings_of(cfg).mode != "offline", itemsize_of(cfg)
    size = Sizes.of(info)
    return held(size, layout, tied=tied, itemsize=itemsize, trained=trained, layers=layers), trained


def check_room(cfg: DictConfig, *, device: torch.device, devices: int, nodes: int) -> None:
    """Refuse a training run that leaves a GPU no room for a row, before anything is loaded.

    Args:
        cfg: the resolved configuration.
        device: this rank's; a CPU is not asked.
        devices: ranks of a machine.
        nodes: machines.

    Raises:
        ConfigError: what a rank holds does not fit.
    """
    from longtrain.targets import loading

    if (has := loading.device_bytes(device)) is None:
        return
    if cfg.target and cfg.target.path:
        folder_of(str(cfg.target.path))  # a Hub id is fetched now
    what, _ = held_of(cfg, devices=devices, nodes=nodes)
    refuse_lack(what, has, f"the run does not fit: {device}")


def check_strategy(cfg: DictConfig) -> None:
    """Refuse a strategy that does not train, or does not with the precision, the optimizer or the method.

    Raises:
        ConfigError: what is allowed instead.
    """
    words = cfg.trainer
    precision, optimizer = (
        str(words.get("precision", AUTO)),
        str((cfg.get("optim") or {}).get("name", "adamw")),
    )
    strategy = plain(words.get("strategy"))
    strategies.check(strategy, precision=precision, optimizer=optimizer)
    clipped = words.get("gradient_clip_val")
    several = bool(cfg.get("method")) and methods.get(str(cfg.method.name)).members is not None
    if several and clipped and strategies.is_deepspeed(strategy):
        raise ConfigError(
            f"trainer.gradient_clip_val={clipped}: DeepSpeed clips all members of method={cfg.method.name} "
            "by one norm, so that one holds back the others; pass trainer=ddp, or "
            "trainer.gradient_clip_val=null"
        )


def layout_of(cfg: DictConfig, *, devices: int, nodes: int) -> Spread:
    """How `trainer` and `target.shard` spread a run over `devices` ranks on each of `nodes` machines.

    Raises:
        ConfigError: a strategy that does not train, a wrong `target.shard`, or one rank alone with it.
    """
    words = cfg.trainer
    strategy = plain(words.get("strategy"))
    check_strategy(cfg)
    zero = _zero(strategy) if strategies.is_deepspeed(strategy) else {}
    shard = target_key(cfg, "shard")
    if shard is not None and devices == 1 and settings_of(cfg).mode != "offline":  # which loads no layers
        raise ConfigError(
            "target.shard=fsdp2 splits the target over the GPUs of a machine, and trainer.devices is 1; pass "
            "trainer=ddp trainer.devices=2 or more"
        )
    mixed = str(words.get("precision")) in ("auto", "bf16-mixed", "16-mixed")
    return Spread(
        devices=devices,
        nodes=nodes,
        shard=shard is not None,
        mixed=mixed and str(words.get("accelerator")) != "cpu",
        **zero,
    )


def _zero(strategy: Mapping[str, Any]) -> dict[str, Any]:
    """What DeepSpeed does, as fields of `Spread`.

    Its keys are Lightning's, or those of DeepSpeed's own `config`, a mapping or a JSON file.

    Raises:
        ConfigError: another stage than 1 and 2, or a file that cannot be read.
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
    """DeepSpeed's own configuration.

    Raises:
        ConfigError: it is neither a mapping nor a JSON file with one.
    """
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


def target_shape(cfg: DictConfig) -> tuple[TargetInfo, bool]:
    """The target's shape, and whether its head is its embedding: from config.json, else from `target.shape`.

    Raises:
        ConfigError: neither is there.
    """
    where = str(cfg.target.path or "")
    if (file := config_file(where)) is not None:
        raw = read_json(file)
        shape = {
            **asdict(Sizes.of_keys(raw)),
            "max_positions": cfg.target.get("max_positions") or raw["max_position_embeddings"],
            "tied": raw.get("tie_word_embeddings", False),
        }
    elif cfg.target.shape is not None:
        shape = _shape_of(plain(cfg.target.shape))
    else:
        raise ConfigError(
            f"cannot know the shape of target.path={where or 'null'}: no config.json there and no "
            "target.shape; pass +recipe=NAME, target=NAME, target.path=FOLDER or target.shape=llama31_8b, say"
        )
    tied = bool(shape.pop("tied", False))
    shape |= {"family": "", "rms_norm_eps": 1e-6, "rope": {}, "qk_norm": False, "attention_bias": False}
    return TargetInfo(name=where, **shape), tied


def _shape_of(shape: Any) -> dict[str, Any]:
    """`target.shape` as a mapping of sizes; the name of a published shape stands for its sizes.

    Raises:
        ConfigError: no such name, or a size is missing or none.
    """
    from longtrain.targets.shapes import SHAPES

    if isinstance(shape, Mapping):
        return vars(typed(_Shape, shape, "target.shape"))
    if shape not in SHAPES:
        sizes = ", ".join(one.name for one in fields(_Shape))
        raise ConfigError(
            f"target.shape={shape}; allowed: one of {', '.join(SHAPES)}, or a mapping with {sizes}"
        )
    keys = SHAPES[shape]
    most, tied = keys["max_position_embeddings"], keys["tie_word_embeddings"]
    return {**asdict(Sizes.of_keys(keys)), "max_positions": most, "tied": tied}


def config_file(where: str) -> Path | None:
    """`config.json` of a target that is on this machine; None where it is not."""
    try:
        file = folder_of(where, fetch=False) / "config.json" if where else None
    except ConfigError:
        return None
    return file if file is not None and file.is_file() else None
