"""The jobs of the command line, one module each: `run(cfg)` reads as the story of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omegaconf import DictConfig, ListConfig

    from longtrain.decoding.roles import TreeShape
    from longtrain.target.model import Target

JOBS: dict[str, tuple[str, str]] = {
    "prepare": ("longtrain.jobs.prepare", "turn manifests or your own files into tokenised, packed data"),
    "train": ("longtrain.jobs.train", "train a module against a frozen target (also without any job word)"),
    "export": (
        "longtrain.jobs.export",
        "write the trained module as an artifact folder; push=org/name uploads it",
    ),
    "eval": ("longtrain.jobs.eval", "measure an artifact against plain decoding: JSON, table and plot"),
    "generate": ("longtrain.jobs.generate", "stream text from a target, with or without an artifact"),
    "bench": ("longtrain.jobs.bench", "measure speed and peak memory on this machine"),
    "plan": ("longtrain.jobs.plan", "estimate memory, compute and time of a recipe, without loading weights"),
}
"""Job name -> (module with `run(cfg)`, one line of help)."""


def device_of(cfg: DictConfig) -> str:
    """`target.device`, with `auto` settled: CUDA where there is one, else the CPU."""
    import torch

    device = str(cfg.target.device) if cfg.target else "auto"
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_target_from(cfg: DictConfig, *, device: str | None = None, path: str | None = None) -> Target:
    """The frozen target that `cfg.target` names.

    Args:
        cfg: the resolved configuration.
        device: where to put it, over `target.device`.
        path: what to load when `target.path` is not set (the target an artifact was trained for, say).

    Raises:
        ConfigError: neither `target.path` nor `path` names a target.
    """
    from longtrain.target.loading import load_target

    where = (cfg.target and cfg.target.path) or path
    if not where:
        raise ConfigError(
            "no target model is chosen (target.path=null); pass target=NAME or target.path=FOLDER; "
            "longtrain train --help lists the names"
        )
    dtype = str(cfg.target.dtype) if cfg.target else "auto"
    return load_target(str(where), dtype=dtype, device=device or device_of(cfg), **target_overrides(cfg))


def target_overrides(cfg: DictConfig) -> dict[str, Any]:
    """`target.max_positions` and `target.chat_template`: what is said of a target over its own files.

    Raises:
        ConfigError: `target.max_positions` is no count.
    """
    most, template = ((cfg.target or {}).get(key) for key in ("max_positions", "chat_template"))
    if most is not None and (not isinstance(most, int) or most < 1):
        raise ConfigError(f"target.max_positions={most}; allowed: 1 or more tokens, or null (config.json's)")
    return {"max_positions": most, "chat_template": None if template is None else str(template)}


def shape_from(cfg: DictConfig, widths: Sequence[int] | None = None) -> TreeShape:
    """What to draft, as `cfg.decode` says.

    Args:
        cfg: the resolved configuration.
        widths: over `decode.shape`.

    `decode.law=auto` samples the children of a chain where decoding samples (the target accepts more of
    them than of argmax drafts), and chooses them deterministically everywhere else.

    Raises:
        ConfigError: no such law.
    """
    from longtrain.decoding.roles import Law, TreeShape

    widths = tuple(plain(cfg.decode.shape) if widths is None else widths)
    name = str(cfg.decode.law)
    if name == "auto":
        sampled_chain = float(cfg.decode.temperature) > 0 and set(widths) == {1}
        return TreeShape(widths, Law.IID if sampled_chain else Law.POINT)
    if name not in {law.value for law in Law}:
        allowed = ", ".join(["auto", *(law.value for law in Law)])
        raise ConfigError(f"decode.law={name}; allowed: {allowed}")
    return TreeShape(widths, Law(name))


def plain(cfg: DictConfig | ListConfig) -> Any:
    """A configuration, or a part of one, as plain containers with every interpolation resolved."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(cfg, resolve=True)
