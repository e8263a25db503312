"""`longtrain serve` over a real socket: what clients and harnesses get is what the engine decodes."""

from __future__ import annotations

import asyncio
import copy
import http.client
import json
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from longtrain.decoding.engine import Engine
from longtrain.errors import ConfigError
from longtrain.jobs.serving import serve
from longtrain.jobs.serving.worker import FullError, GoneError, Queue
from longtrain.targets.loading import load_target

if TYPE_CHECKING:
    from openai import OpenAI

uvicorn = pytest.importorskip("uvicorn")

TEXT = "It was a dark night, and the captain"


class Running:
    """A server of an application in a thread of its own."""

    def __init__(self, app) -> None:
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    @property
    def client(self) -> OpenAI:
        from openai import OpenAI

        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def post(self, body: bytes, path="/v1/completions") -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)


@pytest.fixture(scope="module")
def target():
    return load_target("tiny", device="cpu")


@pytest.fixture(scope="module")
def stock(target):
    """The same weights as transformers runs them: log-probabilities of a text's tokens [T, V]."""
    config = copy.deepcopy(target.model.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.load_state_dict(target.model.state_dict())
    return torch.no_grad()(lambda ids: model(torch.tensor([ids])).logits[0].log_softmax(-1))


@pytest.fixture
def serving(composed, monkeypatch):
    """`serving(*overrides)`: a running server of the bundled target."""
    monkeypatch.delenv(serve.KEY, raising=False)
    began = []

    def make(*words):
        cfg = composed("serve", "target.path=tiny", "served_name=tiny", "decode=chain", *words)
        serve.check(cfg)
        began.append(Running(serve.app_of(cfg)))
        return began[-1]

    yield make
    for one in began:
        one.stop()


def test_texts_are_those_of_the_engine(serving, target):
    prompt = target.tokenizer(TEXT).input_ids
    wanted = Engine(target).generate([prompt], max_new_tokens=12)
    for words, drafts in (((), False), (("artifact=tiny_longspec",), True)):
        client = serving(*words).client
        assert [one.id for one in client.models.list()] == ["tiny"]
        made = client.completions.create(model="tiny", prompt=TEXT, max_tokens=12, temperature=0)
        choice = made.choices[0]
        assert choice.text == wanted.texts[0] and choice.finish_reason == "length"
        usage = made.usage.model_dump()
        assert usage["prompt_tokens"] == usage["kv_entries"] == len(prompt)
        assert usage["completion_tokens"] == 12 and usage["cache_bytes"] > 0
        assert ("acceptance_length" in usage) is drafts
        assert not drafts or 1 <= usage["acceptance_length"] <= 5
        asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 12, "temperature": 0, "stream": True}
        events = list(client.completions.create(**asked, stream_options={"include_usage": True}))
        assert "".join(event.choices[0].text for event in events[:-1]) == wanted.texts[0]
        assert events[-2].choices[0].finish_reason == "length"
        assert events[-1].usage.completion_tokens == 12


def test_by_default_each_step_of_a_request_drafts_what_pays(composed, target, monkeypatch):
    """Texts stay those of plain decoding, request after request of the same engine."""
    monkeypatch.delenv(serve.KEY, raising=False)
    cfg = composed("serve", "target.path=tiny", "served_name=tiny", "artifact=tiny_longspec")
    assert cfg.decode.shape == "auto"
    running = Running(serve.app_of(cfg))
    wanted = Engine(target).generate([target.tokenizer(TEXT).input_ids], max_new_tokens=24).texts[0]
    try:
        for temperature in (0, 0, 1, 0):
            asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 24, "temperature": temperature, "seed": 3}
            text = running.client.completions.create(**asked).choices[0].text
            assert temperature or text == wanted
    finally:
        running.stop()


def test_several_prompts_stop_strings_and_seeds(serving, target):
    client = serving().client
    two = client.completions.create(model="tiny", prompt=[TEXT, "Once upon"], max_tokens=8, temperature=0)
    alone = [
        client.completions.create(model="tiny", prompt=one, max_tokens=8, temperature=0).choices[0].text
        for one in (TEXT, target.tokenizer("Once upon").input_ids)
    ]
    assert [one.text for one in two.choices] == alone
    whole = alone[0]
    stop = whole[4:7]
    cut = client.completions.create(model="tiny", prompt=TEXT, max_tokens=8, temperature=0, stop=[stop])
    assert cut.choices[0].text == whole[: whole.index(stop)] and cut.choices[0].finish_reason == "stop"
    drawn = [
        client.completions.create(model="tiny", prompt=TEXT, max_tokens=16, seed=seed).choices[0].text
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_chat_uses_the_template(serving, target):
    client = serving("artifact=tiny_longspec").client
    asked = {"model": "tiny", "max_tokens": 10, "temperature": 0}
    asked["messages"] = [
        {"role": "user", "content": [{"type": "text", "text": "Who is "}, {"type": "text", "text": "he?"}]}
    ]
    wanted = Engine(target).generate([target.encode("Who is he?", chat=True)], max_new_tokens=10)
    made = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert made.choices[0].message.content == wanted.texts[0]
    told = made.choices[0].logprobs.content
    assert len(told) == len(wanted.tokens[0])
    assert all(one.logprob == one.top_logprobs[0].logprob <= 0 and len(one.top_logprobs) == 2 for one in told)
    events = client.chat.completions.create(**asked, stream=True)
    assert "".join(event.choices[0].delta.content for event in events) == wanted.texts[0]


@pytest.mark.parametrize("words", [(), ("cache=int8",)], ids=["full", "int8"])
def test_log_probabilities_are_the_target_s(serving, target, stock, words):
    client = serving(*words).client
    prompt = target.tokenizer(TEXT).input_ids
    asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 3}
    found = client.completions.create(**asked).choices[0]
    assert found.text == TEXT and found.logprobs.token_logprobs[0] is None
    assert "".join(found.logprobs.tokens) == TEXT and found.logprobs.text_offset[0] == 0
    logits_TV = stock(prompt)
    wanted = logits_TV[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.logprobs.token_logprobs[1:]), wanted, atol=2e-3, rtol=0)
    best = [max(one.values()) for one in found.logprobs.top_logprobs[1:]]
    torch.testing.assert_close(torch.tensor(best), logits_TV[:-1].amax(-1), atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (("evict=snapkv", "evict.budget_tokens=48"), 48),
        (("artifact=tiny_lookaheadkv",), 128),  # none is given
    ],
)
def test_an_evicting_system_says_what_it_kept(serving, target, words, kept):
    client = serving(*words).client
    prompt = " ".join([TEXT] * 20)
    made = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0, logprobs=1)
    usage = made.usage.model_dump()
    assert usage["kv_entries"] == kept < usage["prompt_tokens"]
    tops = made.choices[0].logprobs.top_logprobs
    values = made.choices[0].logprobs.token_logprobs
    assert [max(one.values()) for one in tops] == values, (
        "greedy tokens are the likeliest of the evicted cache"
    )


REFUSED = [
    (b"{", 400, "no JSON"),
    (b"[1]", 400, "no JSON object"),
    (b"[" * 100_000, 400, "no JSON"),
    (b'{"model": "tiny"}', 400, "request.prompt is missing"),
    (b'{"model": "other", "prompt": "a"}', 404, "served: tiny"),
    (b'{"model": "tiny", "prompt": ""}', 400, "request.prompt is empty"),
    (b'{"model": "tiny", "prompt": [], "max_tokens": 3}', 400, "request.prompt is empty"),
    (b'{"model": "tiny", "prompt": [99999999], "max_tokens": 3}', 400, "99999999"),
    (b'{"model": "tiny", "prompt": "a", "n": 2}', 400, "request.n=2"),
    (b'{"model": "tiny", "prompt": "a", "presence_penalty": 0.5}', 400, "presence_penalty"),
    (b'{"model": "tiny", "prompt": "a", "temperature": -1}', 400, "request.temperature=-1"),
    (b'{"model": "tiny", "prompt": "a", "max_tokens": 0}', 400, "max_tokens=0"),
    (b'{"model": "tiny", "prompt": "a", "max_tokens": 10000000}', 400, "10000000"),
    (b'{"model": "tiny", "prompt": "a", "stream": true, "max_tokens": 10000000}', 400, "10000000"),
    (b'{"model": "tiny", "prompt": "a", "nonsense": 1}', 400, "unknown key 'request.nonsense'"),
    (b'{"model": "tiny", "prompt": "' + b"a" * 3000 + b'"}', 413, "max_body=2000"),
]


def test_wrong_requests_get_one_sentence(serving):
    server = serving("max_body=200000")
    small = serving("max_body=2000")
    for body, status, words in REFUSED:
        found, answer = (small if status == 413 else server).post(body)
        assert (found, answer["error"]["code"]) == (status, status), body[:60]
        assert words in answer["error"]["message"], answer
    message = b'{"model": "tiny", "messages": [{"role": "user"}]}'
    assert server.post(message, "/v1/chat/completions")[1]["error"]["message"].startswith(
        "request.messages[0]"
    )
    assert server.client.completions.create(model="tiny", prompt=TEXT, max_tokens=2).choices


def test_the_key_is_asked_for(serving, monkeypatch, composed):
    from openai import APIStatusError

    with pytest.raises(ConfigError, match=serve.KEY):
        serve.check(composed("serve", "host=0.0.0.0"))
    server = serving()
    monkeypatch.setenv(serve.KEY, "secret")
    serve.check(composed("serve", "host=0.0.0.0"))
    guarded = Running(serve.app_of(composed("serve", "target.path=tiny", "served_name=tiny")))
    try:
        with pytest.raises(APIStatusError) as refused:
            guarded.client.models.list()
        assert refused.value.status_code == 401
        assert list(guarded.client.with_options(api_key="secret").models.list())
    finally:
        guarded.stop()
    assert list(server.client.models.list())


def test_a_client_that_goes_away_ends_its_request(serving):
    server = serving()
    body = json.dumps({"model": "tiny", "prompt": TEXT, "max_tokens": 4000, "ignore_eos": True}).encode()
    for streamed in (False, True):
        left = socket.create_connection(("127.0.0.1", server.port))
        sent = body if not streamed else body[:-1] + b', "stream": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(sent)}\r\n\r\n"
        left.sendall(head.encode() + sent)
        if streamed:
            assert left.recv(100)
        else:
            time.sleep(0.5)
        left.close()
        started = time.monotonic()
        assert server.client.completions.create(
            model="tiny", prompt=TEXT, max_tokens=2, temperature=0
        ).choices
        assert time.monotonic() - started < 8, "4000 tokens take far longer"


def test_the_queue_is_one_at_a_time_in_order_and_has_an_end():
    async def story():
        queue, seen, release = Queue(3), [], threading.Event()

        async def here() -> bool:
            return False

        def work(n):
            def now(left):
                release.wait(10)
                seen.append((n, threading.current_thread().name))
                return n

            return now

        waiting = [asyncio.ensure_future(queue.run(work(n), here)) for n in range(3)]
        await asyncio.sleep(0.05)
        with pytest.raises(FullError):
            await queue.run(work(9), here)
        release.set()
        assert await asyncio.gather(*waiting) == [0, 1, 2]
        assert [n for n, _ in seen] == [0, 1, 2] and len({name for _, name in seen}) == 1

        async def away() -> bool:
            return True

        def until_left(left):
            if left.wait(10):
                raise GoneError
            return "never"

        with pytest.raises(GoneError):
            await queue.run(until_left, away)
        assert await queue.run(work(4), here) == 4 and queue.here == 0

    asyncio.run(story())


def test_lm_evaluation_harness_scores_a_served_system(serving, target, stock, tmp_path):
    """Likelihoods and generated answers by lm-eval's own client are those of the target."""
    pytest.importorskip("tenacity", reason="lm-eval[api]")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    server = serving("artifact=tiny_longspec")
    target.tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = LocalCompletionsAPI(
        model="tiny",
        base_url=f"http://127.0.0.1:{server.port}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=str(tmp_path / "tokenizer"),
        max_length=2048,
    )
    pairs = [(TEXT, " stood"), (TEXT, " zebra")]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    found = model.loglikelihood(requests)
    for (context, ending), (logprob, _) in zip(pairs, found, strict=True):
        ids = target.tokenizer(context + ending).input_ids
        count = len(ids) - len(target.tokenizer(context).input_ids)
        wanted = sum(float(stock(ids)[at - 1, ids[at]]) for at in range(len(ids) - count, len(ids)))
        assert logprob == pytest.approx(wanted, abs=5e-3)
    answer = model.generate_until(
        [Instance("generate_until", {}, (TEXT, {"until": ["."], "max_gen_toks": 8}), 0)]
    )
    prompt = target.tokenizer(TEXT).input_ids
    assert answer == Engine(target).generate([prompt], max_new_tokens=8, stop=["."]).texts
