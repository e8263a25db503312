"""What jobs share: the target, the drafts and the sampling that a configuration names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from longtrain.errors import ArtifactError, ConfigError
from longtrain.settings import AUTO, Count, Words, convert, fulfils, one_of, wrong

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omegaconf import DictConfig
    from torch import Tensor, nn

    from longtrain.artifact import Artifact
    from longtrain.decoding.control import ShapeChoice
    from longtrain.decoding.roles import Law, TreeShape
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target


NO_TARGET = (
    "no target model is chosen (target.path=null); pass target=NAME or target.path=FOLDER; "
    "longtrain train --help lists the names"
)

NO_CUDA = (
    "trainer.accelerator={}, and torch sees no CUDA device here; with a target that is small enough for a "
    "CPU pass trainer=cpu"
)

Device = Annotated[
    str, fulfils(re.compile(r"auto|cpu|cuda(:\d+)?").fullmatch), Words("auto, cpu, cuda, cuda:0, ...")
]
LONGEST_PATH = 4095
"""Bytes of a path that the system takes; a part of it may have 255."""
TARGET_KEYS: dict[str, tuple[Any, Any]] = {
    "dtype": (one_of([AUTO, "float64", "float32", "bfloat16", "float16"]), AUTO),
    "device": (Device, AUTO),
    "weights": (Literal["stored", "random"], "stored"),
    "shard": (Literal["fsdp2"] | None, None),
    "fused": (Literal["auto", True, False], AUTO),
    "max_positions": (Count | None, None),
    "chat_template": (str | None, None),
}
"""Key of the group `target` that is read one by one -> what it may be, and what it is where it is missing."""


def target_key(cfg: DictConfig, key: str) -> Any:
    """A key of `TARGET_KEYS`, checked.

    Raises:
        ConfigError: a value that is not allowed.
    """
    kind, usual = TARGET_KEYS[key]
    return convert((cfg.target or {}).get(key, usual), kind, f"target.{key}")


def device_of(cfg: DictConfig) -> str:
    """`target.device`, with `auto` settled: CUDA where there is one, else the CPU."""
    import torch

    device = str(target_key(cfg, "device"))
    if device != AUTO:
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_target_from(
    cfg: DictConfig,
    *,
    device: str | None = None,
    path: str | None = None,
    fuse: bool = True,
    training: bool = False,
    layers: bool = True,
) -> Target:
    """The frozen target that `cfg.target` names.

    Args:
        cfg: the resolved configuration.
        device: the device to put it on, instead of `target.device`.
        path: what to load when `target.path` is not set (the target an artifact was trained for, say).
        fuse: do as `target.fused` says; False keeps the model's own decoder.
        training: split it as `target.shard` says; other jobs are done by one process, which holds all of it.
        layers: False: without its decoder layers, see `load_target`.

    Raises:
        ConfigError: neither `target.path` nor `path` names a target, or a key of `target` is not allowed.
    """
    from longtrain.targets.loading import load_target

    where = (cfg.target and cfg.target.path) or path
    if not where:
        raise ConfigError(NO_TARGET)
    shard = target_key(cfg, "shard")
    target = load_target(
        str(where),
        dtype=target_key(cfg, "dtype"),
        device=device or device_of(cfg),
        weights=target_key(cfg, "weights"),
        seed=convert(cfg.seed, int, "seed"),
        shard=shard if training else None,
        layers=layers,
        **target_overrides(cfg),
    )
    wanted = target_key(cfg, "fused")
    usual = target.device.type == "cuda" and target.shards is None
    fused = usual if wanted == AUTO else wanted
    return target.fuse() if fuse and fused else target


def target_overrides(cfg: DictConfig) -> dict[str, Any]:
    """`target.max_positions` and `target.chat_template`: what is said of a target over its own files.

    Raises:
        ConfigError: `target.max_positions` is no count.
    """
    return {key: target_key(cfg, key) for key in ("max_positions", "chat_template")}


def shape_from(cfg: DictConfig, widths: Sequence[int] | None = None) -> TreeShape:
    """What to draft, as `cfg.decode` says; `decode.law=auto` is `decoding.roles.usual_law`.

    Args:
        cfg: the resolved configuration.
        widths: the shape, instead of `decode.shape`.

    Raises:
        ConfigError: no such law, or a shape that is not a list of widths.
    """
    from longtrain.decoding.roles import TreeShape, usual_law

    typed_widths: Any = plain(cfg.decode.shape) if widths is None else list(widths)
    if typed_widths == AUTO:
        raise ConfigError(
            "decode.shape=auto chooses a shape for each cycle, and this job wants one for all; pass widths, "
            "e.g. decode.shape=[1,1,1,1]"
        )
    shape: tuple[int, ...] = convert(typed_widths, tuple[Count, ...], "decode.shape")
    law, keep = _law_from(cfg), convert(cfg.decode.get("keep"), Count | None, "decode.keep")
    sampled = convert(cfg.decode.temperature, float, "decode.temperature") > 0
    law = law or usual_law(shape, sampled=sampled)
    return TreeShape(shape, law, None if set(shape) <= {1} else keep)


def drafting_from(cfg: DictConfig) -> TreeShape | ShapeChoice:
    """What to draft, as `cfg.decode` says: a shape, or with `decode.shape=auto` those to choose among.

    Raises:
        ConfigError: no such law, or what is no list of widths.
    """
    from longtrain.decoding.control import ShapeChoice

    menu = cfg.decode.get("menu")
    if cfg.decode.shape != AUTO:
        if menu is not None:
            raise ConfigError(
                f"decode.menu={plain(menu)} and decode.shape={plain(cfg.decode.shape)}; a menu is for "
                "decode.shape=auto, leave one out"
            )
        return shape_from(cfg)
    if (keep := cfg.decode.get("keep")) is not None:
        raise ConfigError(f"decode.keep={keep} and decode.shape=auto; it goes with widths, leave it out")
    return ShapeChoice(
        convert(plain(menu) or [], tuple[tuple[Count, ...], ...], "decode.menu"), _law_from(cfg)
    )


def _law_from(cfg: DictConfig) -> Law | None:
    """How children are chosen; None: as usual."""
    from longtrain.decoding.roles import Law

    name = convert(cfg.decode.law, one_of([AUTO, *(law.value for law in Law)]), "decode.law")
    return None if name == AUTO else Law(name)


def sampling_from(cfg: DictConfig) -> Sampling:
    """How tokens are drawn, as `cfg.decode` and `cfg.seed` say.

    Raises:
        ConfigError: a value is no number, or out of its range.
    """
    from longtrain.decoding.sampling import Sampling

    kinds = {"temperature": float, "top_p": float, "top_k": int}
    values = {key: convert(cfg.decode[key], kind, f"decode.{key}") for key, kind in kinds.items()}
    return Sampling(**values, seed=convert(cfg.seed, int, "seed"))


def systems_of(cfg: DictConfig) -> tuple[list[Any], dict[str, Artifact]]:
    """The entries of `suite.systems` as typed, `artifact=` and an untrained `method=` before them.

    `suite.policies` is read as another name of `suite.systems`.

    Returns:
        The entries, and every artifact that one of them names.

    Raises:
        ConfigError: an entry is wrong.
        ArtifactError: an artifact that is not there, or damaged.
    """
    from longtrain import methods
    from longtrain.systems.system import check_methods, parse_all

    suite = plain(cfg.suite)
    values: list[Any] = [{"artifact": name} for name in artifact_names(cfg)]
    if cfg.method is not None and methods.get(str(cfg.method.name)).objective is None and not values:
        values.append({"method": plain(cfg.method)})
    if chosen := {key: value for key, value in plain(cfg.select).items() if value is not None}:
        _choose(values, chosen, cfg)
    listed = suite["policies"] if "policies" in suite else suite["systems"]
    check_methods(parse_all(listed or []))
    values += [value for value in listed or [] if value not in values]
    wanted = dict.fromkeys(name for entry in parse_all(values) for name in entry.artifacts)
    return values, {name: load_artifact(name, cfg) for name in wanted}


def _choose(values: list[Any], chosen: dict[str, Any], cfg: DictConfig) -> None:
    """Give the keys of `select` to the entries that choose which rows a step reads.

    Raises:
        ConfigError: none of them does.
    """
    from longtrain import methods

    names = [
        value["method"]["name"] if "method" in value else load_artifact(value["artifact"], cfg).method
        for value in values
    ]
    readers = [
        value
        for value, name in zip(values, names, strict=True)
        if "every" in methods.get(name).inference_keys
    ]
    if not readers:
        key, value = next(iter(chosen.items()))
        raise ConfigError(
            f"select.{key}={value} and neither artifact= nor method= chooses rows; entries of suite.systems "
            f"say it themselves: {{artifact: NAME, {key}: {value}}}"
        )
    for value in readers:
        value |= chosen


def load_artifact(name: str, cfg: DictConfig) -> Artifact:
    """An artifact, or another tool's folder in its place, as `home`, `trained_by` and `unverified` say.

    With `unverified` a comparison that fails is noted (`Artifact.verified`), then and when it is attached.

    Raises:
        ArtifactError: there is none, or it is damaged.
    """
    from longtrain.artifact import Artifact

    unverified = convert(cfg.get("unverified", False), bool, "unverified")
    return Artifact.load(name, home=str(cfg.home), trained_by=cfg.get("trained_by"), unverified=unverified)


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], where: str, advice: str) -> None:
    """Give a module its trained tensors.

    Raises:
        ArtifactError: they are those of another module than the configuration describes.
    """
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ArtifactError(
            f"{where} does not fit the module that the configuration describes: {reason}; {advice}"
        ) from None


def artifact_names(cfg: DictConfig) -> list[str]:
    """The artifacts that are named: `artifact=NAME` or `artifact=[NAME,NAME]`.

    Raises:
        ConfigError: something else stands there.
    """
    value = plain(cfg.artifact)
    names = value if isinstance(value, list) else [value] if value else []
    if not all(isinstance(name, str) and name for name in names):
        raise wrong(
            "artifact",
            value,
            "a name, or a list of names such as [draft,eviction], in quotes where one reads as a number",
        )
    for name in names:
        if len(name.encode()) > LONGEST_PATH or any(len(part.encode()) > 255 for part in name.split("/")):
            raise wrong("artifact", f"{name[:60]}... ({len(name)} characters)", "a name that a file can have")
    return names


def plain(cfg: Any) -> Any:
    """A configuration, or a part of one, as plain containers with every interpolation resolved.

    A value that is no container comes back as it is.
    """
    from omegaconf import OmegaConf

    return OmegaConf.to_container(cfg, resolve=True) if OmegaConf.is_config(cfg) else cfg
