import json
import shutil

import numpy as np
import pytest
from transformers import AutoTokenizer

from longtrain.data.chat.mask import (
    Rendered,
    audit,
    check_share,
    check_template,
    render,
    render_prompt,
    spans,
)
from longtrain.errors import DataError

from .conftest import TEMPLATE, UNMARKED

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who wrote it?"},
    {"role": "assistant", "content": "She did."},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": " In May,\nI think. "},
]


def words(tokenizer, rendered):
    return [tokenizer.decode(rendered.ids_T[a:b].tolist()) for a, b in spans(rendered.mask_T)]


def shifted(mask_T, by):
    moved = np.zeros_like(mask_T)
    moved[max(0, by) : len(mask_T) + min(0, by)] = mask_T[max(0, -by) : len(mask_T) - max(0, by)]
    return moved


@pytest.mark.parametrize("how", ["template", "prefix"])
def test_labels_are_the_assistants_words_and_end_marker(tokenizer, how):
    rendered = render(tokenizer, CHAT, how=how, name="x")
    assert words(tokenizer, rendered) == ["She did.<|end|>", " In May,\nI think. <|end|>"]
    assert audit(tokenizer, rendered, CHAT, name="x") == "<|end|>"
    assert not rendered.mask_T[0]


@pytest.mark.corners
@pytest.mark.parametrize("blank", ["", " \n"])
@pytest.mark.parametrize("how", ["template", "prefix"])
@pytest.mark.parametrize("place", [2, 4])
def test_a_blank_answer_has_its_end_marker_for_a_label(tokenizer, how, blank, place):
    chat = [{**turn, "content": blank} if at == place else turn for at, turn in enumerate(CHAT)]
    rendered = render(tokenizer, chat, how=how, name="x")
    said = [f"{blank if place == at else CHAT[at]['content']}<|end|>" for at in (2, 4)]
    assert words(tokenizer, rendered) == said
    assert audit(tokenizer, rendered, chat, name="x") == "<|end|>"
    with pytest.raises(DataError, match="line up"):
        audit(tokenizer, Rendered(rendered.ids_T, shifted(rendered.mask_T, 2)), chat, name="x")


def test_a_blank_answer_without_any_label_is_passed_over(tokenizer):
    tokenizer.chat_template = TEMPLATE.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    chat = [{**turn, "content": ""} if at == 2 else turn for at, turn in enumerate(CHAT)]
    rendered = render(tokenizer, chat, how="template", name="x")
    assert words(tokenizer, rendered) == [CHAT[4]["content"]]
    assert audit(tokenizer, rendered, chat, name="x") == ""
    none_T = np.zeros_like(rendered.mask_T)
    with pytest.raises(DataError, match="0 stretches of labels for 2 answers, of which 1 are blank"):
        audit(tokenizer, Rendered(rendered.ids_T, none_T), chat, name="x")
    with pytest.raises(DataError, match="1 stretches of labels for 2 answers"):
        audit(tokenizer, rendered, CHAT, name="x")


def test_an_end_marker_outside_the_marks_is_seen(tokenizer):
    tokenizer.chat_template = TEMPLATE.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    assert audit(tokenizer, render(tokenizer, CHAT, how="template", name="x"), CHAT, name="x") == ""


def test_prefix_and_template_masks_agree_token_for_token(tokenizer):
    by_marks = render(tokenizer, CHAT, how="template", name="x")
    tokenizer.chat_template = UNMARKED
    by_prefix = render(tokenizer, CHAT, how="prefix", name="x")
    assert np.array_equal(by_marks.ids_T, by_prefix.ids_T) and np.array_equal(
        by_marks.mask_T, by_prefix.mask_T
    )


def test_all_labels_every_token(tokenizer):
    assert render(tokenizer, CHAT, how="all", name="x").mask_T.all()


def test_a_template_without_marks_stops_and_says_how_to_go_on(tokenizer):
    tokenizer.chat_template = UNMARKED
    with pytest.raises(DataError, match=r"{% generation %} marks.*data\.mask=prefix"):
        check_template(tokenizer, "template")
    check_template(tokenizer, "prefix")
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        check_template(tokenizer, "prefix")


@pytest.mark.parametrize("mark", ["{%- generation -%}", "{%generation%}"])
def test_marks_are_found_however_they_are_spaced(tokenizer, mark):
    tokenizer.chat_template = TEMPLATE.replace("{% generation %}", mark)
    check_template(tokenizer, "template")


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_a_mask_shifted_against_the_tokens_is_caught(tokenizer, shift):
    rendered = render(tokenizer, CHAT, how="template", name="x")
    with pytest.raises(DataError, match="line up"):
        audit(tokenizer, Rendered(rendered.ids_T, shifted(rendered.mask_T, shift)), CHAT, name="row 7")


def test_a_shift_over_a_line_break_is_caught(tokenizer):
    """A header that ends in a newline must not hide the shift behind stripped whitespace."""
    tokenizer.chat_template = TEMPLATE.replace("<|assistant|>{% generation", "<|assistant|>\n{% generation")
    rendered = render(tokenizer, CHAT, how="template", name="x")
    audit(tokenizer, rendered, CHAT, name="x")
    with pytest.raises(DataError, match="line up"):
        audit(tokenizer, Rendered(rendered.ids_T, shifted(rendered.mask_T, -1)), CHAT, name="x")


def test_labels_cut_short_or_too_many_are_caught(tokenizer):
    rendered = render(tokenizer, CHAT, how="template", name="x")
    begin, end = spans(rendered.mask_T)[0]
    for change, value in (
        (slice(begin, end), False),
        (slice(0, begin), True),
        (slice(begin + 2, end), False),
    ):
        mask_T = rendered.mask_T.copy()
        mask_T[change] = value
        with pytest.raises(DataError):
            audit(tokenizer, Rendered(rendered.ids_T, mask_T), CHAT, name="x")


def test_marks_around_the_header_are_caught(tokenizer):
    tokenizer.chat_template = TEMPLATE.replace("<|assistant|>{% generation %}", "{% generation %}Assistant: ")
    with pytest.raises(DataError, match="Assistant: She did"):
        audit(tokenizer, render(tokenizer, CHAT, how="template", name="x"), CHAT, name="x")


def test_prefix_refuses_a_template_that_rewrites_earlier_turns(tokenizer):
    tokenizer.chat_template = UNMARKED.replace(
        "<|assistant|>{{ m['content'] }}",
        "<|assistant|>{% if loop.last %}thought {% endif %}{{ m['content'] }}",
    )
    with pytest.raises(DataError, match="turn 3"):
        render(tokenizer, CHAT, how="prefix", name="x")


def test_white_space_before_an_answer_is_no_token_with_the_header(tokenizer, tokenizer_folder, tmp_path):
    """As many published tokenizers, this one has a token for a newline and a space together."""
    shutil.copytree(tokenizer_folder, tmp_path / "merging")
    file = tmp_path / "merging" / "tokenizer.json"
    inner = json.loads(file.read_text())
    inner["model"]["vocab"]["ĊĠ"] = len(inner["model"]["vocab"])
    inner["model"]["merges"] = [["Ċ", "Ġ"]]
    file.write_text(json.dumps(inner))
    merging = AutoTokenizer.from_pretrained(tmp_path / "merging")
    merging.chat_template = UNMARKED.replace("<|assistant|>", "<|assistant|>\n")
    late = [{**CHAT[2], "content": f"   {CHAT[2]['content']}"}, CHAT[3], {**CHAT[4], "content": "  In May."}]
    both = [*CHAT[:2], *late]
    assert words(merging, render(merging, both, how="prefix", name="x")) == [
        "   She did.<|end|>",
        "  In May.<|end|>",
    ]
    for chat in ([*CHAT[:4], late[2]], [*CHAT[:2], late[0]], CHAT):
        rendered = render(merging, chat, how="prefix", name="x")
        asked = render_prompt(merging, chat[:-1], name="x")
        said = merging(chat[-1]["content"] + "<|end|>", add_special_tokens=False).input_ids
        assert rendered.ids_T.tolist() == [*asked.tolist(), *said]
        assert words(merging, rendered)[-1] == chat[-1]["content"] + "<|end|>"
        assert audit(merging, rendered, chat, name="x") == "<|end|>"
    whole = merging.apply_chat_template(both, return_dict=True)["input_ids"]
    assert whole != render(merging, both, how="prefix", name="x").ids_T.tolist()
    tokenizer.chat_template = merging.chat_template  # the same text, without such a token
    assert merging.decode(rendered.ids_T) == tokenizer.decode(
        render(tokenizer, chat, how="prefix", name="x").ids_T
    )
    merging.chat_template = TEMPLATE.replace("<|assistant|>", "<|assistant|>\n")
    with pytest.raises(DataError, match=r"generation marks, or pass data\.mask=prefix"):
        audit(merging, render(merging, both, how="template", name="x"), both, name="x")


@pytest.mark.parametrize("labels,word", [(0, "0%"), (50, "100%")])
def test_a_share_of_nothing_or_everything_stops(labels, word):
    with pytest.raises(DataError, match=word):
        check_share(labels, 50, 4, "conversations")
    check_share(1, 50, 4, "conversations")
    check_share(0, 0, 0, "conversations")


def test_a_prompt_ends_where_the_assistant_begins(tokenizer):
    prompt = render_prompt(tokenizer, CHAT[:2], name="x")
    whole = render(tokenizer, CHAT, how="template", name="x")
    assert np.array_equal(prompt, whole.ids_T[: spans(whole.mask_T)[0][0]])


def test_a_conversation_the_template_refuses_is_named(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"row 3.*roles must alternate"):
        render(tokenizer, CHAT, how="template", name="row 3")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0]['content'].format(x) }}{% endfor %}",
        "{{ raise_exception('') }}",
    ],
)
def test_unsafe_and_broken_templates_are_one_sentence(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=r"conversation c: the chat template refuses it \(.+\)") as caught:
        render_prompt(tokenizer, CHAT, name="c")
    assert "\n" not in str(caught.value)
