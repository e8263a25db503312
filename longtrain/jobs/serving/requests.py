"""Request bodies: their fields and the allowed values. Source: the OpenAI API reference.

A field that would change the answer in a way that the engine does not support (penalties, tools, several
choices) is refused unless it has no effect; fields that only label a request (`LABELS`) are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, refusal
from longtrain.settings import Count, CountOrZero, NotNegative, OneOf, between, check, read

LABELS = ("user", "metadata", "store", "service_tier", "parallel_tool_calls", "best_of")
Listed = between(0, 20, int)
"""Number of most likely tokens to list at each position."""
Zero = Annotated[float | None, OneOf(None, 0.0)]


@dataclass(frozen=True, kw_only=True)
class CommonFields:
    """Fields shared by both kinds of request; `top_k` and `ignore_eos` are extensions that vLLM also has."""

    model: str
    temperature: NotNegative | None = None  # 0: greedy; null: 1
    top_p: between(0, 1) | None = None  # type: ignore[valid-type]
    top_k: CountOrZero | None = None
    seed: int | None = None  # equal requests with equal seeds get equal text; null: 0
    stop: list[str] | str | None = None
    n: Annotated[int | None, OneOf(None, 1)] = 1
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None  # include_usage: a last event with the usage
    ignore_eos: bool | None = False  # continue past the model's end token, for timing
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    logit_bias: Annotated[dict[str, float] | None, OneOf(None, {})] = None

    def __post_init__(self) -> None:
        check(self, "request")

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `Engine.generate` for this request."""
        usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0}
        typed = {key: getattr(self, key) for key in usual if getattr(self, key) is not None}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return {"sampling": Sampling(**(usual | typed)), "stop": stop, "ignore_eos": bool(self.ignore_eos)}


@dataclass(frozen=True, kw_only=True)
class Completion(CommonFields):
    """The body of `POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: CountOrZero | None = None  # 0 with echo scores the prompt alone; null: 16
    logprobs: Listed | None = None  # type: ignore[valid-type]
    echo: bool | None = False  # include the prompt before the new text, also in logprobs
    suffix: Annotated[str | None, OneOf(None, "")] = None

    @property
    def prompts(self) -> list[Any]:
        """The prompts as a list; each is a text or token ids."""
        one = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        return [self.prompt] if one else list(self.prompt)


@dataclass(frozen=True, kw_only=True)
class Chat(CommonFields):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_tokens: Count | None = None  # null: the room left in the context window
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Listed | None = None  # type: ignore[valid-type]
    tools: Annotated[list[Any] | None, OneOf(None, [])] = None
    response_format: Annotated[dict[str, Any] | None, OneOf(None, {"type": "text"})] = None

    @property
    def turns(self) -> list[dict[str, str]]:
        """The messages, each with its text parts joined.

        Raises:
            ConfigError: a message without a role or a text.
        """
        return [_turn(message, at) for at, message in enumerate(self.messages)]


def parse(kind: type[Any], body: Any) -> Any:
    """Parse and check a request body.

    Raises:
        ConfigError: the body is no object, or a field is unknown, missing or has a value that is not allowed.
    """
    if not isinstance(body, Mapping):
        raise ConfigError("the body is no JSON object; send one with model and prompt or messages")
    return read(kind, body, "request", ignore=LABELS)


def _turn(message: Mapping[str, Any], at: int) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]
    if not isinstance(role, str) or not isinstance(content, str):
        allowed = '{"role": "user", "content": TEXT}, or content as a list of {"type": "text", "text": TEXT}'
        raise refusal(ConfigError, f"request.messages[{at}] has no role or no text", allowed)
    return {"role": role, "content": content}
