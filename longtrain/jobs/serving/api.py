"""The HTTP routes of the OpenAI API: `/v1/models`, `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from threading import Event
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from longtrain.data.chat.mask import apply_template
from longtrain.decoding.engine import Generation
from longtrain.errors import ConfigError, LongtrainError, refusal
from longtrain.jobs.serving.requests import Chat, CommonFields, Completion, parse
from longtrain.jobs.serving.worker import FullError, GoneError, Queue, Scored, Worker

Json = dict[str, Any]
FINISH = {"stop_id": "stop", "stop_string": "stop", "length": "length"}


class Service:
    """The routes and their shared state.

    Args:
        worker: runs the requests.
        name: name of the served model.
        key: the key that clients must send as `Authorization: Bearer KEY`; None: no key is needed.
        waiting: maximum number of requests that wait or run at a time.
        body_bytes: maximum bytes of a request body.
    """

    def __init__(self, worker: Worker, name: str, key: str | None, waiting: int, body_bytes: int) -> None:
        self.worker, self.name, self.key, self.body_bytes = worker, name, key, body_bytes
        self.tokenizer: Any = worker.target.require_tokenizer()
        self.queue = Queue(waiting)

    def app(self) -> Starlette:
        """The ASGI application."""
        paths = {"completions": self.completions, "chat/completions": self.chat}
        routes = [Route(f"/v1/{path}", route, methods=["POST"]) for path, route in paths.items()]
        errors: Any = {
            HTTPException: lambda _, error: _error(error.status_code, error.detail),
            LongtrainError: lambda _, error: _error(400, str(error)),
            FullError: lambda _, error: _error(503, f"{self.queue.most} requests wait; try again later"),
            GoneError: lambda _, error: Response(status_code=499),
            Exception: lambda _, error: _error(500, f"the engine failed: {type(error).__name__}"),
        }
        app = Starlette(routes=[Route("/v1/models", self.models), *routes], exception_handlers=errors)
        app.state.model = self.name
        return app

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`: list the one served model."""
        self._authorise(request)
        about = {"object": "model", "owned_by": "longtrain", "created": 0}
        about |= {"id": self.name, "max_model_len": self.worker.target.info.max_positions}
        return JSONResponse({"object": "list", "data": [about]})

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`: continue texts, or score them."""
        asked: Completion = await self._body(request, Completion)
        encode = self.worker.target.encode
        prompts = [encode(one) if isinstance(one, str) else list(one) for one in asked.prompts]
        most = 16 if asked.max_tokens is None else asked.max_tokens
        if not prompts or not all(prompts):
            raise refusal(ConfigError, "request.prompt is empty", "a text of one token or more")
        if not most and not asked.echo:
            raise refusal(
                ConfigError, "request.max_tokens=0 writes nothing", "1 or more, or 0 with echo=true"
            )
        if asked.stream and (len(prompts) > 1 or asked.echo or asked.logprobs is not None):
            raise ConfigError("stream=true takes one prompt, without echo and logprobs")
        return await self._answer(request, asked, prompts, most, self._text_choice)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`: answer a conversation in the target's chat template."""
        asked: Chat = await self._body(request, Chat)
        if not self.tokenizer.chat_template:
            raise ConfigError(f"target {self.name} has no chat template; ask /v1/completions")
        if asked.stream and asked.logprobs:
            raise ConfigError("stream=true gives no logprobs; leave one of them out")
        options = {"add_generation_prompt": True, "tokenize": False}
        text = apply_template(self.tokenizer, asked.turns, name="of the request", **options)
        prompt = list(self.tokenizer(text, add_special_tokens=False).input_ids)
        room = self.worker.target.info.max_positions - len(prompt) - self.worker.engine.limits.nodes
        most = asked.max_completion_tokens or asked.max_tokens or max(1, room)
        return await self._answer(request, asked, [prompt], most, self._chat_choice)

    def _authorise(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.key is not None and not hmac.compare_digest(given.encode(), self.key.encode()):
            raise HTTPException(401, "the key is missing or wrong; send Authorization: Bearer KEY")

    async def _body(self, request: Request, kind: type[Any]) -> Any:
        self._authorise(request)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.body_bytes:
                raise HTTPException(413, f"the body is larger than max_body={self.body_bytes} bytes")
        try:
            value = json.loads(bytes(body))
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body is no JSON to read ({type(error).__name__})") from None
        asked = parse(kind, value)
        if asked.model != self.name:
            raise HTTPException(404, f"model={asked.model} is not served; served: {self.name}")
        return asked

    async def _answer(
        self, request: Request, asked: Any, prompts: list[list[int]], most: int, choice_of: Any
    ) -> Response:
        """Decode when the queue admits this request; `choice_of` builds the response for one prompt."""
        kind = "chat.completion" if isinstance(asked, Chat) else "text_completion"
        head: Json = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": self.name, "object": kind}
        if asked.stream:
            return await self._streamed(request, asked, prompts[0], most, head)

        def work(left: Event) -> Json:
            made = self.worker.complete(prompts, left, max_new_tokens=most, **asked.options) if most else None
            choices = [choice_of(asked, n, prompt, made) for n, prompt in enumerate(prompts)]
            return head | {"choices": choices, "usage": _usage(made, sum(map(len, prompts)))}

        return JSONResponse(await self.queue.run(work, request.is_disconnected))

    async def _streamed(
        self, request: Request, asked: CommonFields, prompt: list[int], most: int, head: Json
    ) -> Response:
        """Server-sent events: pieces of the text, the finish reason, and the usage if requested."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | None]()
        chats = isinstance(asked, Chat)
        head |= {"object": "chat.completion.chunk"} if chats else {}

        def send(text: str) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, text)

        def work(left: Event) -> Generation:
            return self.worker.complete([prompt], left, send, max_new_tokens=most, **asked.options)

        def event(text: str, finish: str | None = None) -> str:
            part = {"delta": {"role": "assistant", "content": text}} if chats else {"text": text}
            return _event(head | {"choices": [{"index": 0, "finish_reason": finish, **part}]})

        running = asyncio.ensure_future(self.queue.run(work, request.is_disconnected))
        running.add_done_callback(lambda _: pieces.put_nowait(None))
        text = await pieces.get()
        if text is None:
            running.result()  # an error before the first piece sets the HTTP status

        async def events(text: str | None) -> AsyncIterator[str]:
            try:
                while text is not None:
                    yield event(text)
                    text = await pieces.get()
                made = await running
                yield event("", FINISH[made.finish[0]])
                if (asked.stream_options or {}).get("include_usage"):
                    yield _event(head | {"choices": [], "usage": _usage(made, len(prompt))})
                yield "data: [DONE]\n\n"
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError, GoneError):
                    await running

        return StreamingResponse(events(text), media_type="text/event-stream")

    def _text_choice(self, asked: Completion, n: int, prompt: list[int], made: Generation | None) -> Json:
        """The completion choice for one prompt; `made` is None if the prompt is only scored."""
        new, text = (made.tokens[n], (made.texts or [""])[n]) if made else ([], "")
        head = str(self.tokenizer.decode(prompt)) if asked.echo else ""
        choice: Json = {"index": n, "text": head + text, "logprobs": None}
        choice["finish_reason"] = FINISH[made.finish[n]] if made else "length"
        if asked.logprobs is not None:
            score, scored = partial(self.worker.score, top=max(1, asked.logprobs)), list[Scored]()
            if asked.echo:  # every system reads prompts on the full cache
                scored = [Scored(prompt[0], None, []), *score(prompt[:1], prompt[1:], whole=True)]
            scored += score(prompt, new, whole=False)
            texts = [self._text(one.token) for one in scored]
            tops = [{self._text(token): value for token, value in one.top} or None for one in scored]
            choice["logprobs"] = {
                "tokens": texts,
                "token_logprobs": [one.logprob for one in scored],
                "top_logprobs": tops,
                "text_offset": [len("".join(texts[:at])) for at in range(len(texts))],
            }
        return choice

    def _chat_choice(self, asked: Chat, n: int, prompt: list[int], made: Generation) -> Json:
        """The chat choice with the assistant's message."""
        message = {"role": "assistant", "content": (made.texts or [""])[n]}
        choice: Json = {"index": n, "message": message, "finish_reason": FINISH[made.finish[n]]}
        if asked.logprobs:
            scored = self.worker.score(prompt, made.tokens[n], top=asked.top_logprobs or 0, whole=False)
            shown = [
                self._logprob(one.token, one.logprob)
                | {"top_logprobs": [self._logprob(token, value) for token, value in one.top]}
                for one in scored
            ]
            choice["logprobs"] = {"content": shown}
        return choice

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def _logprob(self, token: int, value: float | None) -> Json:
        text = self._text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


def _usage(made: Generation | None, prompt_tokens: int) -> Json:
    """Token counts, acceptance of drafts, KV entries of the prompts and bytes of the cache."""
    new = sum(made.stats.output_tokens) if made else 0
    usage: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new,
        "total_tokens": prompt_tokens + new,
    }
    if made:
        stats, drafts = made.stats, any(cycle.drafted for cycle in made.stats.cycles())
        usage |= {"acceptance_length": stats.tau, "acceptance_rate": stats.acceptance_rate} if drafts else {}
        usage["kv_entries"] = round(sum(stats.kept_entries)) if stats.evicted else prompt_tokens
        usage["cache_bytes"] = stats.cache_bytes
    return usage


def _event(value: Json) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _error(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)
