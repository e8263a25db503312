"""One chat completion from any OpenAI-compatible server; the package `openai` sends failed requests again."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

from longtrain.errors import ConfigError, LongtrainError
from longtrain.settings import Count, Text, read, within, wrong

Message = Mapping[str, str]

REFUSALS = re.compile(
    r"context.{0,3}length|context (window|size)|(prompt|input) is too long|`inputs` tokens|"
    r"content.{0,10}(filter|policy|management)",
    re.IGNORECASE,
)
"""Words by which servers say that one question is too long or not to be answered."""

NO_QUOTA = "insufficient_quota"
"""What OpenAI's status 429 says where no waiting helps."""


class JudgeError(LongtrainError):
    """The judge cannot be used as it is: it is unreachable, or the key, the model or the address is wrong."""


class RefusedError(Exception):
    """The judge works, but does not take this one question, too long or filtered; the text says why."""


class NotAskedError(Exception):
    """The run is ending, so this question was not asked."""


class NoCompletionError(Exception):
    """A response of status 200 is no chat completion: not JSON, cut off, or without a message."""


@dataclass(frozen=True)
class JudgeSettings:
    """Where the judge is, which model it is, and how it is asked: the keys of `suite.judge`.

    Args:
        url: the base address, e.g. `https://api.openai.com/v1`; None: nothing is judged.
        model: the model's name on that server.
        key_env: the environment variable that holds the API key; None: the server needs none.
        prompts: a file of prompts; None: the published ones.
        temperature: the temperature of the judge's sampling; None leaves it to the server.
        max_tokens: most tokens of a reply; None leaves it to the server.
        body: further fields of the request, e.g. `{"chat_template_kwargs": {"enable_thinking": False}}`.
        tries: how often a question is asked until the reply holds a mark.
        retries: how often a request that failed is sent again.
        concurrency: requests under way at once.
        timeout_s: seconds without a byte after which a request has failed.

    Raises:
        ConfigError: a wrong address or request field; a missing model, key or package.
    """

    url: Text | None
    model: Text | None
    key_env: Text | None = None
    prompts: Text | None = None
    temperature: Annotated[float, within(0, 2)] | None = 0.0
    max_tokens: Count | None = 2048
    body: Mapping[str, Any] | None = None
    tries: Annotated[int, within(1, 100)] = 1
    retries: Annotated[int, within(0, 100)] = 10
    concurrency: Annotated[int, within(1, 256)] = 8
    timeout_s: Annotated[float, within(0.1, 3600)] = 120.0

    def __post_init__(self) -> None:
        if self.url is None:
            return
        _check_address(self.url)
        if self.model is None:
            raise ConfigError(
                "suite.judge.url is set and suite.judge.model is not; pass the name the server gives it"
            )
        _check_request_fields(self.body or {})
        _ = self.key
        _need_openai()

    @property
    def key(self) -> str:
        """The API key, which is never written anywhere; a server that needs none is sent the word `none`."""
        if self.key_env is None:
            return "none"
        key = os.environ.get(self.key_env, "").strip()
        if not key:
            raise ConfigError(
                f"suite.judge.key_env={self.key_env} and no such variable is set; set it to the key, or pass "
                "suite.judge.key_env=null for a server that needs none"
            )
        return key

    @property
    def host(self) -> str:
        """Host and port of the address."""
        return urlsplit(self.url or "").netloc

    def settings(self) -> dict[str, Any]:
        """JSON values that a reply follows from; not where the judge is, nor how it is asked again."""
        return {
            "model": self.model,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "body": dict(self.body or {}),
        }


def judge_settings(values: Mapping[str, Any]) -> JudgeSettings:
    """The settings of the judge from the value of `suite.judge`."""
    return read(JudgeSettings, values, "suite.judge")


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
    """Asks an endpoint; many threads may use it at once.

    The package `openai` sends a request again after a timeout, a broken connection and the statuses 408, 409,
    429 and 500 and above, with growing pauses or as long as the server's Retry-After says (up to its own
    maximum, one or two minutes; a longer wait ends the run). `_inspect` adds what it does not know: a
    response that is no chat completion and status 425 are tried again, an account without quota is not.

    Args:
        judge: where the judge is and how it is asked.
    """

    def __init__(self, judge: JudgeSettings) -> None:
        from openai import DefaultHttpxClient, OpenAI

        logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request
        self.judge = judge
        self._openai = OpenAI(
            base_url=str(judge.url).rstrip("/").removesuffix("/chat/completions"),
            api_key=judge.key,
            timeout=judge.timeout_s,
            max_retries=judge.retries,
            http_client=DefaultHttpxClient(event_hooks={"response": [_inspect]}),
        )
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ask no further question; what is under way goes on."""
        self._stopped.set()

    def close(self) -> None:
        """End the connections."""
        self.stop()
        self._openai.close()

    def ask(self, messages: Sequence[Message]) -> Reply:
        """The judge's reply.

        Raises:
            JudgeError: no reply after all tries, or an answer that trying again cannot change.
            RefusedError: the server does not take this question.
            NotAskedError: `stop` was called.
        """
        import openai

        if self._stopped.is_set():
            raise NotAskedError
        end = self.judge
        fields: dict[str, Any] = {"model": end.model, "messages": [dict(message) for message in messages]}
        chosen = {"temperature": end.temperature, "max_tokens": end.max_tokens}
        fields |= {name: value for name, value in chosen.items() if value is not None}
        often = f", {end.retries + 1} times in a row" if end.retries else ""
        try:
            raw = self._openai.chat.completions.with_raw_response.create(
                **fields, extra_body=dict(end.body or {})
            )
            return read_reply(raw.http_response.text)
        except openai.APITimeoutError as error:
            raise self._error(f"no answer within {end.timeout_s:g} s{often}") from error
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            said = str(cause) if isinstance(cause, NoCompletionError) else f"no connection ({cause})"
            raise self._error(f"{said}{often}") from error
        except openai.APIStatusError as error:
            raise self._problem(error.status_code, error.response.text, error.response.headers) from error

    def _problem(self, status: int, text: str, headers: Mapping[str, str]) -> Exception:
        """What a status other than 200 means."""
        said = f"status {status} ({_said(text)})"
        if status in (400, 413, 422) and REFUSALS.search(text):
            return RefusedError(f"status {status}: {_said(text)}")
        if NO_QUOTA in text:
            return self._error(f"the account has no quota left; {said}")
        if status in (408, 409, 425, 429) or status >= 500:
            wait = headers.get("retry-after")
            asks = f"; it asks to be left alone for {wait} (seconds, or until then)" if wait else ""
            return self._error(f"{said} after {self.judge.retries} retries or fewer{asks}")
        advice = {
            401: "is the key right? suite.judge.key_env names the variable that holds it",
            403: "is the key right? suite.judge.key_env names the variable that holds it",
            404: "is suite.judge.url whole, with its /v1, and suite.judge.model one that the server has?",
        }.get(status, "see suite.judge.{model,temperature,max_tokens,body}; null leaves a field out")
        return self._error(f"{said}; {advice}")

    def _error(self, text: str) -> JudgeError:
        return JudgeError(f"judge {self.judge.model} at {self.judge.host}: {text}")


def read_reply(text: str) -> Reply:
    """The message in a response's body.

    Raises:
        NoCompletionError: it is no chat completion.
    """
    try:
        body = json.loads(text)
        choice = body["choices"][0]
        content = choice["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise NoCompletionError(f"the response is no chat completion: {_said(text)!r}") from error
    if not isinstance(content, str | type(None)):
        raise NoCompletionError(f"the response's content is a {type(content).__name__}, not text")
    return Reply(content or "", str(body.get("model") or ""), str(choice.get("finish_reason") or ""))


def _inspect(response: Any) -> None:
    """Tell `openai` what to send again beside what it does on its own: by an error, or by its own header."""
    response.read()
    if response.status_code == 200:
        read_reply(response.text)
    elif response.status_code == 425:
        response.headers["x-should-retry"] = "true"
    elif response.status_code == 429 and NO_QUOTA in response.text:
        response.headers["x-should-retry"] = "false"


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


def _need_openai() -> None:
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "a judge is asked through the package openai, which is not installed; run "
            "pip install 'longtrain[judge]', or leave out suite.judge.url"
        ) from error


def _check_address(url: str) -> None:
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
        raise wrong("suite.judge.url", url, "an address such as http://localhost:8000/v1, or null")


def _check_request_fields(body: Mapping[str, Any]) -> None:
    if taken := {"model", "messages", "stream", "n"} & set(body):
        raise ConfigError(f"suite.judge.body.{min(taken)} cannot be set there; pass other request fields")
    try:
        json.dumps(dict(body), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"suite.judge.body cannot be sent as JSON: {error}") from None
