"""The HTTP routes: `/v1/models`, `/v1/completions` and `/v1/chat/completions`, as the OpenAI API has them."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
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
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, LongtrainError, refusal
from longtrain.jobs.serving.requests import Chat, CommonFields, Completion, parse
from longtrain.jobs.serving.worker import FullError, GoneError, Queue, Scored, Worker

Json = dict[str, Any]
FINISH = {"stop_id": "stop", "stop_string": "stop", "length": "length"}


class Service:
    """The routes and what they share.

    Args:
        worker: decodes.
        name: the served model's name.
        key: what clients must send as `Authorization: Bearer KEY`; None: everybody may ask.
        waiting: most requests that wait or run at a time.
        body_bytes: most bytes of a request.
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
        return Starlette(routes=[Route("/v1/models", self.models), *routes], exception_handlers=errors)

    async def models(self, request: Request) -> Response:
        """The one model there is."""
        self._authorise(request)
        about = {"object": "model", "owned_by": "longtrain", "created": 0}
        about |= {"id": self.name, "max_model_len": self.worker.target.info.max_positions}
        return JSONResponse({"object": "list", "data": [about]})

    async def completions(self, request: Request) -> Response:
        """Continue texts, or score them."""
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
        head = self._head("text_completion", asked)
        if asked.stream:
            if len(prompts) > 1 or asked.echo or asked.logprobs is not None:
                raise ConfigError("stream=true takes one prompt, without echo and logprobs")
            return await self._streamed(request, asked, prompts[0], most, head, _text_piece)

        def work(left: Event) -> Json:
            made = self._generate(asked, prompts, most, left) if most else None
            choices = [self._choice(asked, n, prompt, made) for n, prompt in enumerate(prompts)]
            return head | {"choices": choices, "usage": _usage(made, sum(map(len, prompts)))}

        return JSONResponse(await self.queue.run(work, request.is_disconnected))

    async def chat(self, request: Request) -> Response:
        """Answer a conversation in the target's chat template."""
        asked: Chat = await self._body(request, Chat)
        if not self.tokenizer.chat_template:
            raise ConfigError(f"target {self.name} has no chat template; ask /v1/completions")
        options = {"add_generation_prompt": True, "tokenize": False}
        text = apply_template(self.tokenizer, asked.turns, name="of the request", **options)
        prompt = list(self.tokenizer(text, add_special_tokens=False).input_ids)
        room = self.worker.target.info.max_positions - len(prompt) - self.worker.engine.limits.nodes
        most = asked.max_completion_tokens or asked.max_tokens or max(1, room)
        head = self._head("chat.completion.chunk" if asked.stream else "chat.completion", asked)
        if asked.stream:
            if asked.logprobs:
                raise ConfigError("stream=true gives no logprobs; leave one of them out")
            return await self._streamed(request, asked, prompt, most, head, _chat_piece)

        def work(left: Event) -> Json:
            made = self._generate(asked, [prompt], most, left)
            message = {"role": "assistant", "content": made.texts[0] if made.texts else ""}
            choice: Json = {"index": 0, "message": message, "finish_reason": FINISH[made.finish[0]]}
            if asked.logprobs:
                count = asked.top_logprobs or 0
                scored = self.worker.score(prompt, made.tokens[0], top=count, whole=False)
                choice["logprobs"] = {"content": [self._chat_logprob(one) for one in scored]}
            return head | {"choices": [choice], "usage": _usage(made, len(prompt))}

        return JSONResponse(await self.queue.run(work, request.is_disconnected))

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

    def _head(self, kind: str, asked: CommonFields) -> Json:
        return {"id": uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": asked.model}

    def _generate(
        self, asked: CommonFields, prompts: Sequence[Sequence[int]], most: int, left: Event, send: Any = None
    ) -> Generation:
        usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0}
        typed = {key: getattr(asked, key) for key in usual if getattr(asked, key) is not None}
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        how = {"sampling": Sampling(**(usual | typed)), "stop": stop, "ignore_eos": bool(asked.ignore_eos)}
        return self.worker.complete(prompts, left, send, max_new_tokens=most, **how)

    async def _streamed(
        self, request: Request, asked: CommonFields, prompt: list[int], most: int, head: Json, piece_of: Any
    ) -> Response:
        """Server-sent events: pieces of the text, why it ended, and the usage where that was asked for."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | None]()

        def send(text: str) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, text)

        def work(left: Event) -> Generation:
            return self._generate(asked, [prompt], most, left, send)

        running = asyncio.ensure_future(self.queue.run(work, request.is_disconnected))
        running.add_done_callback(lambda _: pieces.put_nowait(None))
        text = await pieces.get()
        if text is None:
            running.result()  # what is refused is refused with its status, before the first event

        async def events(text: str | None) -> AsyncIterator[str]:
            try:
                while text is not None:
                    yield _event(head | {"choices": [piece_of(text, None)]})
                    text = await pieces.get()
                made = await running
                yield _event(head | {"choices": [piece_of("", FINISH[made.finish[0]])]})
                if (asked.stream_options or {}).get("include_usage"):
                    yield _event(head | {"choices": [], "usage": _usage(made, len(prompt))})
                yield "data: [DONE]\n\n"
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError, GoneError):
                    await running

        return StreamingResponse(events(text), media_type="text/event-stream")

    def _choice(self, asked: Completion, n: int, prompt: list[int], made: Generation | None) -> Json:
        """The answer to one prompt; None was generated where it is only scored."""
        new, text = (made.tokens[n], (made.texts or [""])[n]) if made else ([], "")
        head = str(self.tokenizer.decode(prompt)) if asked.echo else ""
        choice: Json = {"index": n, "text": head + text, "logprobs": None}
        choice["finish_reason"] = FINISH[made.finish[n]] if made else "length"
        if asked.logprobs is not None:
            score, scored = partial(self.worker.score, top=max(1, asked.logprobs)), list[Scored]()
            if asked.echo:  # a prompt is read on the full cache by every system
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

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def _chat_logprob(self, scored: Scored) -> Json:
        def shown(token: int, value: float | None) -> Json:
            text = self._text(token)
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        return shown(scored.token, scored.logprob) | {"top_logprobs": [shown(*pair) for pair in scored.top]}


def _text_piece(text: str, finish: str | None) -> Json:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


def _chat_piece(text: str, finish: str | None) -> Json:
    return {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": finish}


def _usage(made: Generation | None, prompt_tokens: int) -> Json:
    """The API's counts, the acceptance of drafts, and what the target's cache held."""
    new = sum(made.stats.output_tokens) if made else 0
    usage: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new,
        "total_tokens": prompt_tokens + new,
    }
    if made:
        stats, drafts = made.stats, any(cycle.drafted for cycle in made.stats.cycles())
        usage |= {"acceptance_length": stats.tau, "acceptance_rate": stats.acceptance_rate} if drafts else {}
        usage["kv_entries"] = round(sum(stats.kept_rows)) if stats.evicted else prompt_tokens
        usage["cache_bytes"] = stats.cache_bytes
    return usage


def _event(value: Json) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _error(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)
