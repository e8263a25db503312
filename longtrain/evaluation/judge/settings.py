"""Reads `suite.judge`: which endpoint marks the answers, or none."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from longtrain.errors import ConfigError
from longtrain.evaluation.judge.client import Endpoint, need_openai
from longtrain.evaluation.suites.settings import Settings

KEYS = (
    "url",
    "model",
    "key_env",
    "prompts",
    "temperature",
    "max_tokens",
    "body",
    "tries",
    "retries",
    "concurrency",
    "timeout_s",
)
"""Of `suite.judge`."""

UNJUDGED = (
    "not judged: pass suite.judge.url=http://HOST/v1 suite.judge.model=NAME; what was generated is kept"
)
"""Note of a result without a judge."""


def judge_settings(settings: Settings) -> Settings:
    """The keys of `suite.judge`, so that errors name them in full.

    Raises:
        ConfigError: it is no mapping, or has a key that nothing reads.
    """
    judge = settings.get("judge")
    if not isinstance(judge, Mapping):
        raise settings.wrong("judge", judge, f"a mapping with the keys {', '.join(KEYS)}")
    if unknown := [key for key in judge if key not in KEYS]:
        raise ConfigError(f"suite.judge.{unknown[0]} is no setting; allowed: {', '.join(KEYS)}")
    return Settings({"name": settings.suite, **{f"judge.{key}": value for key, value in judge.items()}})


def endpoint_from(judge: Settings) -> Endpoint | None:
    """The endpoint; None where no address is given. What is wrong is told before anything is generated.

    Args:
        judge: what `judge_settings` gives.

    Raises:
        ConfigError: a wrong value, a missing model, key or package.
    """
    url = judge.optional_text("judge.url")
    if url is None:
        return None
    _check_url(url)
    if judge.get("judge.model") is None:
        raise ConfigError(
            "suite.judge.url is set and suite.judge.model is not; pass the name the server gives it"
        )
    most = judge.get("judge.temperature")
    endpoint = Endpoint(
        url.rstrip("/").removesuffix("/chat/completions"),
        judge.text("judge.model"),
        _key(judge.optional_text("judge.key_env")),
        temperature=None if most is None else judge.number("judge.temperature", least=0, most=2),
        max_tokens=judge.optional_integer("judge.max_tokens"),
        body=_body(judge),
        concurrency=judge.integer("judge.concurrency", most=256),
        timeout_s=judge.number("judge.timeout_s", least=0.1, most=3600),
        retries=judge.integer("judge.retries", least=0, most=100),
    )
    need_openai()
    return endpoint


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        secret = "@" in parts.netloc
    except ValueError:
        good = secret = False
    if secret:
        raise ConfigError(
            "suite.judge.url holds a user name or password, which would be saved with the settings; put the "
            "key into an environment variable and pass suite.judge.key_env=NAME"
        )
    if not good:
        raise ConfigError(
            f"suite.judge.url={url}; allowed: an address such as http://localhost:8000/v1, or null"
        )


def _key(variable: str | None) -> str:
    """The API key; servers that need none get a word that is none."""
    if variable is None:
        return "none"
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"suite.judge.key_env={variable} and no such variable is set; set it to the key, or pass "
            "suite.judge.key_env=null for a server that needs none"
        )
    return key


def _body(judge: Settings) -> dict[str, Any]:
    body = judge.get("judge.body")
    body = {} if body is None else body
    if not isinstance(body, Mapping):
        raise judge.wrong("judge.body", body, "a mapping of request fields, e.g. {seed: 1}, or null")
    taken = {"model", "messages", "stream", "n"} & set(body)
    if taken:
        raise ConfigError(f"suite.judge.body.{min(taken)} cannot be set there; allowed: other request fields")
    try:
        return dict(json.loads(json.dumps(dict(body), allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"suite.judge.body cannot be sent as JSON: {error}") from None
