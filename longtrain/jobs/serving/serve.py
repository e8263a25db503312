"""Serve one system behind the OpenAI API, so that other people's harnesses score what it decodes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from longtrain.errors import ConfigError
from longtrain.jobs.generate import entry_of, parts_of
from longtrain.jobs.setup import NO_TARGET, artifact_names, drafting_from, load_artifact, load_target_from
from longtrain.log import get_logger
from longtrain.settings import Count, Text, between, convert

if TYPE_CHECKING:
    from starlette.applications import Starlette

logger = get_logger(__name__)

KEY = "LONGTRAIN_API_KEY"
"""The environment variable with the key that clients must send."""
LOCAL = ("127.0.0.1", "::1", "localhost")


def run(cfg: DictConfig) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Raises:
        ConfigError: settings that do not fit each other, or a host that others reach and no key.
    """
    import uvicorn

    check(cfg)
    host, port = str(cfg.host), int(cfg.port)
    app = app_of(cfg)
    logger.info("serving url=http://%s:%d/v1 model=%s", host, port, model_name(cfg))
    uvicorn.run(app, host=host, port=port, log_level="warning")


def app_of(cfg: DictConfig) -> Starlette:
    """The ASGI application of a configuration: target and artifacts are loaded here."""
    from longtrain.jobs.serving.api import Service
    from longtrain.jobs.serving.worker import Worker

    entry = entry_of(cfg)
    artifacts = [load_artifact(name, cfg) for name in entry.artifacts]
    target = load_target_from(cfg, path=artifacts[0].target.name if artifacts else None)
    target.require_tokenizer()
    parts = parts_of(cfg, target, entry, artifacts)
    worker = Worker(target, parts, drafting_from(cfg) if parts.draft else None)
    name = str(cfg.served_name or target.info.name)
    return Service(worker, name, os.environ.get(KEY) or None, int(cfg.queue), int(cfg.max_body)).app()


def check(cfg: DictConfig) -> None:
    """Refuse what cannot be served; loads nothing.

    Raises:
        ConfigError: no target, a value that is not allowed, a package that is missing, or a host that others
            reach without a key.
    """
    convert(cfg.host, Text, "host")
    convert(cfg.port, between(0, 65535, int), "port")
    for key in ("queue", "max_body"):
        convert(cfg[key], Count, key)
    convert(cfg.served_name, Text | None, "served_name")
    if not artifact_names(cfg) and not (cfg.target and cfg.target.path):
        raise ConfigError(NO_TARGET)
    if cfg.host not in LOCAL and not os.environ.get(KEY):
        raise ConfigError(
            f"host={cfg.host} lets other machines ask, and {KEY} is not set; set it to a key that clients "
            "send, or pass host=127.0.0.1"
        )
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serve needs the package {error.name}; run: pip install 'longtrain[serve]'"
        ) from None


def model_name(cfg: DictConfig) -> str:
    """What clients call the model where `served_name` says it; else the target's path."""
    return str(cfg.served_name or (cfg.target and cfg.target.path) or artifact_names(cfg)[0])
