"""What stands around a user's message, whatever the template says itself, and templates that lose it."""

from __future__ import annotations

import pytest

from longtrain.assets import asset_dir
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.prompts import around_message, chat_ids
from longtrain.evaluation.ruler.sizing import Framing
from longtrain.targets.loading import load_target

ASKS = (
    "<system>A QUESTION follows.</system>{% for m in messages %}<user>{{ m.content }}{% endfor %}<assistant>"
)


@pytest.fixture
def tokenizer():
    found = load_target(asset_dir("bundled") / "tiny", dtype="float32", device="cpu").tokenizer
    found.chat_template = ASKS
    return found


def test_a_template_may_ask_for_questions_itself(tokenizer) -> None:
    before, after = "<system>A QUESTION follows.</system><user>", "<assistant>"
    assert around_message(tokenizer) == (before, after)
    framing = Framing(tokenizer, chat=True)
    assert framing.text("Who?", "It") == f"{before}Who?{after}It"
    ids = chat_ids(tokenizer)
    assert tokenizer.decode([*ids.user, *ids.assistant]) == before + after


def test_options_reach_the_template(tokenizer) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}"
    assert around_message(tokenizer, enable_thinking=True)[1] == "<think>"
    assert around_message(tokenizer, enable_thinking=False)[1] == ""


@pytest.mark.parametrize(("template", "times"), [("none", 0), ("{{ messages[0].content * 2 }}", 2)])
def test_a_message_must_be_there_once(tokenizer, template: str, times: int) -> None:
    tokenizer.chat_template = template
    for call in (lambda: around_message(tokenizer), lambda: Framing(tokenizer), lambda: chat_ids(tokenizer)):
        with pytest.raises(DataError, match=f"renders the user's message {times} times"):
            call()


def test_no_template(tokenizer) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        around_message(tokenizer)
