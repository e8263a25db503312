"""The protocol's hash changes with whatever changes prompts, decoding or scores, and with nothing else."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest

from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError
from longtrain.evaluation.harness.protocol import prompt_room, protocol_of
from longtrain.evaluation.prompts import encode_chat, render_chat
from longtrain.evaluation.task import Example
from tests.jobs.byte_tokens import CHAT

from .toys import suite, task


def test_the_same_settings_have_the_same_hash(target):
    one, other = (protocol_of(suite(), target, Sampling()) for _ in range(2))
    assert one.hash == other.hash and len(one.hash) == 16
    assert one.settings == other.settings


@pytest.mark.parametrize(
    "change",
    [
        {"template": "Say {text}"},
        {"new": 7},
        {"min_new_tokens": 1},
        {"stops": ("\n",)},
        {"chat": False},
        {"ignore_eos": True},
        {"max_prompt_tokens": 99},
        {"protocol": {"sort": "b"}},
        {"metric": "digits"},
        {"examples": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_a_task_changes_the_hash(target, change):
    plain = protocol_of(suite(task()), target, Sampling())
    made = {key: value for key, value in change.items() if key in ("new", "examples")}
    later = {key: value for key, value in change.items() if key not in made}
    other = protocol_of(suite(replace(task(**made), **later)), target, Sampling())
    assert other.hash != plain.hash


def test_what_changes_the_rest_changes_the_hash(target):
    plain = protocol_of(suite(task()), target, Sampling())
    warm = suite(task(temperature=0.7))
    others = [
        protocol_of(warm, target, Sampling()),
        protocol_of(replace(suite(task()), name="other"), target, Sampling()),
        *(
            protocol_of(suite(task()), target, Sampling(**change))
            for change in ({"seed": 1}, {"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 5})
        ),
    ]
    assert len({plain.hash, *(other.hash for other in others)}) == 7


def test_a_lost_chat_template_changes_the_hash(target, monkeypatch):
    plain = protocol_of(suite(task(chat=False)), target, Sampling())
    monkeypatch.setattr(target.tokenizer, "chat_template", None)
    lost = protocol_of(suite(task(chat=False)), target, Sampling())
    assert plain.settings["chat_template"] and lost.settings["chat_template"] is None
    assert lost.hash != plain.hash


DATED = "Today is {{ strftime_now('%-d %b %Y') }}.{{ bos_token }}" + CHAT


def test_a_template_that_asks_for_the_date_gives_the_same_prompt_every_day(target, monkeypatch):
    tokenizer = target.tokenizer
    plain = protocol_of(suite(task()), target, Sampling())
    monkeypatch.setattr(tokenizer, "chat_template", DATED)
    message = [{"role": "user", "content": "Hello"}]
    text = tokenizer.decode(encode_chat(tokenizer, message))
    assert text == "Today is 26 Jul 2024.<user>Hello<bot>"
    live = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert live == text.replace("26 Jul 2024", f"{datetime.now():%-d %b %Y}")
    dated = protocol_of(suite(task()), target, Sampling())
    assert dated.settings["rendered_chat"] != plain.settings["rendered_chat"]


@pytest.mark.parametrize(
    "template",
    [
        "\n\n  {% if strftime_now is defined %}\n[{{ strftime_now('%Y-%m-%d') }}]{% endif %}\n",
        "  {%- macro day() %}[{{ strftime_now('%Y-%m-%d') }}]{% endmacro %}\n {{ day() }} \n",
    ],
)
def test_nothing_but_the_date_differs_from_what_the_template_gives(target, monkeypatch, template):
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    message = [{"role": "user", "content": "Hello"}]
    live = target.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    found = render_chat(target.tokenizer, message)
    assert "[2024-07-26]" in found and found == live.replace(f"{datetime.now():%Y-%m-%d}", "2024-07-26")


def test_what_a_template_is_rendered_to_changes_the_hash(target, monkeypatch):
    """The same template with another beginning-of-text token, as another library or file may have it."""
    monkeypatch.setattr(target.tokenizer, "chat_template", "{{ bos_token }}" + CHAT)
    plain = protocol_of(suite(task()), target, Sampling())
    monkeypatch.setattr(type(target.tokenizer), "special_tokens_map", {"bos_token": "!"}, raising=False)
    other = protocol_of(suite(task()), target, Sampling())
    assert plain.settings["chat_template"] == other.settings["chat_template"]
    assert plain.settings["rendered_chat"] != other.settings["rendered_chat"] and plain.hash != other.hash


def test_the_window_leaves_room_for_answers_and_template(target):
    window = target.info.max_positions
    room = prompt_room(task(new=6), target)
    around = len("<user><bot>")
    assert room == window - 6 - around - 16
    assert prompt_room(task(new=6, chat=False), target) == window - 6 - 16
    assert prompt_room(task(max_prompt_tokens=50), target) == 50
    with pytest.raises(ConfigError, match=rf"answers with up to {window} tokens, which leaves no prompt"):
        prompt_room(task(new=window), target)


def test_the_longest_prompt_fits(target):
    long = task(new=6)
    example = Example("long", {"text": "x" * (3 * target.info.max_positions)})
    found = long.encode(example, target.tokenizer, max_tokens=prompt_room(long, target))
    assert found.cut and len(found.ids) + 6 <= target.info.max_positions
