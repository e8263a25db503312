"""One chat completion from any OpenAI-compatible server, asked again while the server has a bad moment."""

from __future__ import annotations

import json
import logging
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from longtrain.errors import ConfigError
from longtrain.evaluation.judge.errors import JudgeError, RefusedError, StoppedError
from longtrain.log import get_logger

log = get_logger(__name__)

Message = Mapping[str, str]

AGAIN = frozenset({408, 409, 425, 429})
"""Statuses below 500 that pass; of 500 and above all are tried again."""

LONGEST_PAUSE_S = 60.0
"""Of the growing pauses between tries. A server's own Retry-After may be longer, up to `LONGEST_WAIT_S`."""

LONGEST_WAIT_S = 600.0

_REFUSALS = re.compile(
    r"context.{0,3}length|context (window|size)|(prompt|input) is too long|`inputs` tokens|"
    r"content.{0,10}(filter|policy|management)",
    re.IGNORECASE,
)
"""Words by which servers say that one question is too long or not to be answered."""


@dataclass(frozen=True)
class Endpoint:
    """Where the judge is, which model it is, and how it is asked.

    Args:
        url: the base address, e.g. `https://api.openai.com/v1`; `/chat/completions` is put behind it.
        model: the model's name on that server.
        key: the API key; never written anywhere.
        temperature: of the judge's sampling; None leaves it to the server.
        max_tokens: most tokens of a reply; None leaves it to the server.
        body: further fields of the request, e.g. `{"chat_template_kwargs": {"enable_thinking": False}}`.
        concurrency: requests under way at once.
        timeout_s: seconds without a byte after which a request has failed.
        retries: how often a request that failed is sent again.
        backoff_s: first pause before that, doubled each time.
    """

    url: str
    model: str
    key: str = field(default="none", repr=False)
    temperature: float | None = 0.0
    max_tokens: int | None = 2048
    body: Mapping[str, Any] | None = None
    concurrency: int = 8
    timeout_s: float = 120.0
    retries: int = 6
    backoff_s: float = 1.0

    @property
    def host(self) -> str:
        """Host and port, without a user's name or password that may stand in the address."""
        parts = urlsplit(self.url)
        return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)

    def settings(self) -> dict[str, Any]:
        """JSON values that the judge's replies follow from; not where it is, nor how it is asked again."""
        return {
            "model": self.model,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "body": dict(self.body or {}),
        }


@dataclass(frozen=True)
class Reply:
    """What the judge said.

    Args:
        text: the message, empty where there was none.
        model: what the server calls the model that answered.
        finish: why it ended, e.g. `stop` or `length`.
    """

    text: str
    model: str = ""
    finish: str = ""


class Client:
    """Asks an endpoint; may be used by many threads at once.

    A server that says how long to wait is not asked by any thread before that time.

    Args:
        endpoint: where, which and how.

    Raises:
        ConfigError: the package `openai` is not installed.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        need_openai()
        from openai import OpenAI

        logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request
        self.endpoint = endpoint
        self._openai = OpenAI(
            base_url=endpoint.url, api_key=endpoint.key, timeout=endpoint.timeout_s, max_retries=0
        )
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._open_at = 0.0  # time.monotonic() before which the server asked to be left alone

    def stop(self) -> None:
        """No further request; threads that wait for their next try end with `StoppedError`."""
        self._stop.set()

    def close(self) -> None:
        """End the connections."""
        self.stop()
        self._openai.close()

    def ask(self, messages: Sequence[Message]) -> Reply:
        """The judge's reply.

        Raises:
            JudgeError: no reply after all tries, or an answer that trying again cannot change.
            RefusedError: the server does not take this question.
            StoppedError: `stop` was called.
        """
        for attempt in range(self.endpoint.retries + 1):
            self._wait_for_opening()
            try:
                return self._send(messages)
            except PassingError as problem:
                if attempt == self.endpoint.retries:
                    often = f", {attempt + 1} times in a row" if attempt else ""
                    raise JudgeError(
                        f"judge {self.endpoint.model} at {self.endpoint.host}: {problem}{often}"
                    ) from problem
                self._pause(attempt, problem)
        raise AssertionError("unreachable")

    def _send(self, messages: Sequence[Message]) -> Reply:
        import openai

        end = self.endpoint
        fields: dict[str, Any] = {"model": end.model, "messages": [dict(message) for message in messages]}
        if end.temperature is not None:
            fields["temperature"] = end.temperature
        if end.max_tokens is not None:
            fields["max_tokens"] = end.max_tokens
        try:
            raw = self._openai.chat.completions.with_raw_response.create(
                **fields, extra_body=dict(end.body or {})
            )
            return read_reply(raw.http_response.text)
        except openai.APITimeoutError as error:
            raise PassingError(f"no answer within {end.timeout_s:g} s") from error
        except openai.APIConnectionError as error:
            raise PassingError(f"no connection ({error.__cause__ or error})") from error
        except openai.APIStatusError as error:
            raise self._problem(error.status_code, error.response.text, error.response.headers) from error

    def _problem(self, status: int, text: str, headers: Mapping[str, str]) -> Exception:
        """What a status other than 200 means."""
        end = self.endpoint
        said = _said(text)
        if status in AGAIN or status >= 500:
            if "insufficient_quota" in text:
                return JudgeError(f"judge {end.model} at {end.host}: the account has no quota left ({said})")
            return PassingError(f"status {status} ({said})", wait_s=retry_after(headers))
        if status in (400, 413, 422) and _REFUSALS.search(text):
            return RefusedError(f"status {status}: {said}")
        advice = {
            401: "is the key right? suite.judge.key_env names the variable that holds it",
            403: "is the key right? suite.judge.key_env names the variable that holds it",
            404: "is suite.judge.url whole, with its /v1, and suite.judge.model one that the server has?",
        }.get(status, "see suite.judge.{model,temperature,max_tokens,body}; null leaves a field out")
        return JudgeError(f"judge {end.model} at {end.host} answers status {status} ({said}); {advice}")

    def _pause(self, attempt: int, problem: PassingError) -> None:
        """Wait before the next try; as long as the server asks, for every thread."""
        if self._stop.is_set():
            raise StoppedError
        if problem.wait_s is None:
            pause = min(LONGEST_PAUSE_S, self.endpoint.backoff_s * 2**attempt)
            pause *= random.uniform(0.75, 1.25)  # so that many threads do not come back at once
            log.info("judge: %s; next try in %.1f s", problem, pause)
            if self._stop.wait(pause):
                raise StoppedError
            return
        if problem.wait_s > LONGEST_WAIT_S:
            raise JudgeError(
                f"judge {self.endpoint.model} at {self.endpoint.host}: {problem}; it asks to be left alone "
                f"for {problem.wait_s:.0f} s"
            ) from problem
        log.info("judge: %s; it asks for a pause of %.1f s", problem, problem.wait_s)
        with self._lock:
            self._open_at = max(self._open_at, time.monotonic() + problem.wait_s)

    def _wait_for_opening(self) -> None:
        while (left := self._open_at - time.monotonic()) > 0:
            if self._stop.wait(left):
                break
        if self._stop.is_set():
            raise StoppedError


class PassingError(Exception):
    """A failure that may be over at the next try; `wait_s` is how long the server asks to wait."""

    def __init__(self, text: str, wait_s: float | None = None) -> None:
        super().__init__(text)
        self.wait_s = wait_s


def need_openai() -> None:
    """Refuse early where the client's package is missing.

    Raises:
        ConfigError: the package `openai` is not installed.
    """
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "a judge is asked through the package openai, which is not installed; run "
            "pip install 'longtrain[judge]', or leave out suite.judge.url"
        ) from error


def read_reply(text: str) -> Reply:
    """The message in a response's body.

    Raises:
        PassingError: it is no chat completion: not JSON, cut off, or without choices.
    """
    try:
        body = json.loads(text)
        choice = body["choices"][0]
        message = choice["message"]
        content = message["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise PassingError(f"the response is no chat completion: {_said(text)!r}") from error
    if not isinstance(content, str | type(None)):
        raise PassingError(f"the response's content is a {type(content).__name__}, not text")
    return Reply(content or "", str(body.get("model") or ""), str(choice.get("finish_reason") or ""))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait; None where it does not say, or not in a way that can be read.

    Source: RFC 9110, 10.2.3 (seconds or a date); `retry-after-ms` is OpenAI's.
    """
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) / unit
        except ValueError:
            try:
                date = parsedate_to_datetime(value)
            except ValueError:
                continue
            date = date if date.tzinfo else date.replace(tzinfo=UTC)
            seconds = (date - datetime.now(UTC)).total_seconds()
        if seconds == seconds:  # "nan" reads as a number
            return max(0.0, seconds)
    return None


def _said(text: str) -> str:
    """A server's words, short: the message of an error's JSON, else the body's start."""
    try:
        body = json.loads(text)
        error = body.get("error", body) if isinstance(body, dict) else body
        said = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        said = text
    line = " ".join(str(said).split())
    return line if len(line) <= 200 else f"{line[:197]}..."
