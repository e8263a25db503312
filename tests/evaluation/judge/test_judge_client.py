"""The judge's client against a server with bad moments: what is tried again, what not, for how long."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from judge_server import Answer, in_turn, serve

from longtrain.evaluation.judge.client import (
    Client,
    JudgeError,
    JudgeSettings,
    NoCompletionError,
    NotAskedError,
    RefusedError,
    read_reply,
)

ASK = [{"role": "user", "content": "How good is this?"}]


def client(url: str, **values: Any) -> Client:
    return Client(JudgeSettings(url, "judge", **{"timeout_s": 5.0, "retries": 3, **values}))


def test_a_request_holds_what_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with serve(in_turn(Answer("fine"))) as judge:
        end = client(
            judge.url, key_env="JUDGE_KEY", temperature=0.5, max_tokens=77, body={"seed": 3, "x": {"y": 1}}
        )
        reply = end.ask([{"role": "system", "content": "s"}, *ASK])
    assert (reply.text, reply.model, reply.finish) == ("fine", "judge-1", "stop")
    assert judge.requests == [
        {
            "path": "/v1/chat/completions",
            "model": "judge",
            "messages": [{"role": "system", "content": "s"}, *ASK],
            "temperature": 0.5,
            "max_tokens": 77,
            "seed": 3,
            "x": {"y": 1},
        }
    ]
    assert judge.keys == ["Bearer secret"]


def test_the_whole_path_may_be_given() -> None:
    with serve(in_turn(Answer())) as judge:
        client(f"{judge.url}/chat/completions/").ask(ASK)
    assert judge.requests[0]["path"] == "/v1/chat/completions"


def test_null_fields_are_not_sent() -> None:
    with serve(in_turn(Answer())) as judge:
        client(judge.url, temperature=None, max_tokens=None).ask(ASK)
    assert set(judge.requests[0]) == {"path", "model", "messages"}


@pytest.mark.parametrize(
    "bad",
    [
        Answer(status=500, body=b"oops"),
        Answer(status=503, body=b'{"error": {"message": "loading"}}'),
        Answer(status=429, body=b"{}"),
        Answer(status=408),
        Answer(status=409),
        Answer(status=425),
        Answer(stop=True),  # the connection breaks in the body
        Answer(body=b'{"choices": [{"message": {"content": "Rating: [[9'),  # JSON that ends too early
        Answer(body=b"<html>gateway</html>", headers={"Content-Type": "text/html"}),
        Answer(body=b'{"choices": []}'),
        Answer(body=b"[1]"),
        Answer(body=b'{"choices": [{"message": {"content": [1]}}]}'),
    ],
    ids=lambda answer: f"{answer.status} {(answer.body or b'broken')[:14].decode()}",
)
def test_what_may_pass_is_tried_again(bad: Answer) -> None:
    with serve(in_turn(bad, bad, Answer("good"))) as judge:
        assert client(judge.url).ask(ASK).text == "good"
    assert len(judge.requests) == 3


def test_after_all_tries_the_error_names_judge_host_and_reason() -> None:
    with serve(in_turn(Answer(status=500, body=b'{"error": {"message": "no memory"}}'))) as judge:
        with pytest.raises(
            JudgeError, match=r"judge judge at 127\.0\.0\.1:\d+: status 500 \(no memory\) after 3 retries"
        ):
            client(judge.url).ask(ASK)
    assert len(judge.requests) == 4


def test_a_slow_judge_is_a_timeout() -> None:
    with serve(in_turn(Answer(delay_s=1.0))) as judge:
        with pytest.raises(JudgeError, match=r"no answer within 0\.1 s, 2 times"):
            client(judge.url, timeout_s=0.1, retries=1).ask(ASK)


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(JudgeError, match="no connection"):
        client(f"http://127.0.0.1:{port}/v1", retries=1).ask(ASK)


@pytest.mark.parametrize(
    ("status", "body", "advice"),
    [
        (401, b'{"error": {"message": "bad key"}}', "bad key.*key_env"),
        (403, b"", "key_env"),
        (404, b'{"error": {"message": "no such model"}}', "no such model.*suite.judge.url"),
        (400, b'{"error": {"message": "max_tokens is not supported"}}', "max_tokens is not supported.*null"),
        (429, b'{"error": {"code": "insufficient_quota", "message": "pay"}}', "no quota.*pay"),
    ],
)
def test_what_cannot_pass_is_told_at_once(status: int, body: bytes, advice: str) -> None:
    with serve(in_turn(Answer(status=status, body=body))) as judge:
        with pytest.raises(JudgeError, match=advice):
            client(judge.url).ask(ASK)
    assert len(judge.requests) == 1


@pytest.mark.parametrize(
    "said",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 9000",
        "The input (9000 tokens) is longer than the model's context length (4096 tokens).",
        "The response was filtered due to the prompt triggering Azure OpenAI's content management policy",
        "the request exceeds the available context size",
    ],
)
def test_one_question_that_the_judge_does_not_take(said: str) -> None:
    with serve(in_turn(Answer(status=400, body=said.encode()))) as judge:
        with pytest.raises(RefusedError, match="status 400"):
            client(judge.url).ask(ASK)
    assert len(judge.requests) == 1


def test_a_server_is_left_alone_for_as_long_as_it_asks() -> None:
    with serve(in_turn(Answer(status=429, headers={"Retry-After": "0.4"}, body=b"{}"), Answer())) as judge:
        client(judge.url).ask(ASK)
    assert len(judge.times) == 2
    assert judge.times[1] - judge.times[0] >= 0.39


def test_a_wait_of_hours_ends_the_run() -> None:
    with serve(in_turn(Answer(status=429, headers={"Retry-After": "7200"}, body=b"{}"))) as judge:
        with pytest.raises(JudgeError, match="left alone for 7200 "):
            client(judge.url).ask(ASK)


def test_no_question_is_asked_after_stop() -> None:
    with serve(in_turn(Answer())) as judge:
        end = client(judge.url)
        end.ask(ASK)
        end.stop()
        with pytest.raises(NotAskedError):
            end.ask(ASK)
    assert len(judge.requests) == 1


def test_an_empty_message_is_a_reply() -> None:
    assert read_reply('{"choices": [{"message": {"content": null}, "finish_reason": "length"}]}').text == ""
    with pytest.raises(NoCompletionError, match="no chat completion"):
        read_reply('{"choices": [{}]}')


def test_the_host() -> None:
    assert JudgeSettings("http://host:81/v1", "m").host == "host:81"
    assert JudgeSettings("https://api.example.org/v1", "m").host == "api.example.org"
