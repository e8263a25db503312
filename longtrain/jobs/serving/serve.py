"""`longtrain serve`: serve one system through the OpenAI API, for example to external evaluation
harnesses.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from longtrain.errors import ConfigError
from longtrain.jobs.generate import loaded
from longtrain.log import get_logger

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from longtrain.config import RunConfig

logger = get_logger(__name__)

KEY = "LONGTRAIN_API_KEY"
"""The environment variable with the key that clients must send."""
LOCAL = ("127.0.0.1", "::1", "localhost")


def run(cfg: RunConfig) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Raises:
        ConfigError: settings contradict each other, or a public host is used without a key.
    """
    import uvicorn

    check(cfg)
    host, port = cfg.serve.host, cfg.serve.port
    app = app_of(cfg)
    logger.info("serving url=http://%s:%d/v1 model=%s", host, port, app.state.model)
    uvicorn.run(app, host=host, port=port, log_level="warning")


def app_of(cfg: RunConfig) -> Starlette:
    """Build the ASGI application; loads target and artifacts."""
    from longtrain.jobs.serving.api import Service
    from longtrain.jobs.serving.worker import Worker

    target, parts, _ = loaded(cfg)
    worker = Worker(target, parts, cfg.decode.drafting() if parts.draft else None)
    asked, name = cfg.serve, str(cfg.serve.served_name or target.info.name)
    return Service(worker, name, os.environ.get(KEY) or None, asked.queue, asked.max_body).app()


def check(cfg: RunConfig) -> None:
    """Refuse settings that cannot be served; loads nothing.

    Raises:
        ConfigError: there is no target, a value is not allowed, a package is missing, or a public host
            is used without a key.
    """
    host = cfg.serve.host
    if not cfg.artifacts:
        cfg.target.required_path()
    if host not in LOCAL and not os.environ.get(KEY):
        raise ConfigError(
            f"host={host} lets other machines ask, and {KEY} is not set; set it to a key that clients "
            "send, or pass host=127.0.0.1"
        )
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serve needs the package {error.name}; run: pip install 'longtrain[serve]'"
        ) from None
