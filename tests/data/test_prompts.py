"""Prompt and response: text cut in two, last answers, questions in or out of view, and who writes."""

import json
import re

import numpy as np
import pytest

from longtrain.data.chat.mask import spans
from longtrain.data.chat.prompts import cut_text
from longtrain.data.config import DataConfig
from longtrain.data.packing.prepare import prepare
from longtrain.data.packing.prepared import Prepared
from longtrain.data.read.adapters import Document
from longtrain.errors import ConfigError, DataError

STAGES = [{"steps": 1, "sequence_tokens": 64, "doc_tokens": 64}]


def config(*sources, **values):
    given = {"labels": "last_answer", "long_documents": "truncate", "answer_tokens": 20, **values}
    return DataConfig.parse({"name": "mine", "sources": list(sources), "stages": STAGES, **given})


def run(made, tokenizer, tmp_path, **options):
    folder = prepare(made, tokenizer, home=tmp_path / "home", **options)
    return Prepared.open(folder, verify=True)


def parts(data, tokenizer):
    """(prompt, response) of each document as text."""
    found = []
    for start, length in zip(data.start.tolist(), data.length.tolist(), strict=True):
        ids, mask = data.ids[start : start + length], np.asarray(data.mask[start : start + length])
        ((begin, end),) = spans(mask)
        assert end == length and begin > 0
        found.append((tokenizer.decode(ids[:begin].tolist()), tokenizer.decode(ids[begin:].tolist())))
    return found


def chat(tmp_path, *rows):
    path = tmp_path / "chats.jsonl"
    turns = [
        [{"role": role, "content": content} for role, content in zip("uaua", row, strict=False)]
        for row in rows
    ]
    names = {"u": "user", "a": "assistant"}
    turns = [[{**t, "role": names[t["role"]]} for t in row] for row in turns]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns))
    return {"conversations": str(path)}


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"Line {i} of the book is here. " for i in range(400)))
    return path


class Author:
    """Stands in for the target: answers with a fixed text, and keeps what it was asked."""

    def __init__(self, tokenizer, answer="new"):
        self.calls = []
        self.answer = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]

    def __call__(self, prompts):
        self.calls.append(prompts)
        return [self.answer for _ in prompts]


def cuts(n_tokens, *, count=1, limit=None, bos=None, name="d", first=None, **values):
    ids_T = np.arange(n_tokens)
    made = config({"text": "x"}, prompt_tokens=[10, 50], **values)
    return list(cut_text(Document(name, "text"), ids_T, made, count=count, limit=limit, bos=bos))


def test_a_text_that_fits_is_cut_at_a_random_point():
    ends = set()
    for i in range(200):
        (prompt,) = cuts(60, name=f"d{i}")
        assert prompt.ids_T[0] == 0 and prompt.begin == len(prompt.ids_T)
        end = int(prompt.ids_T[-1]) + 1
        assert prompt.answer_T.tolist() == list(range(end, min(60, end + 20)))
        ends.add(end)
    assert min(ends) == 10 and max(ends) == 45  # a quarter of the text is left to respond with
    (again,) = cuts(60, name="d7")
    assert again.ids_T.tolist() == cuts(60, name="d7")[0].ids_T.tolist()
    assert len({cuts(60, seed=seed)[0].begin for seed in range(9)}) > 1


def test_long_texts_give_stretches_of_log_uniform_length():
    found = cuts(100_000, count=2000)
    lengths = np.array([len(prompt.ids_T) for prompt in found])
    assert len(found) == 2000 and lengths.min() == 10 and lengths.max() == 50
    assert abs(np.log(lengths).mean() - np.log([10, 50]).mean()) < 0.05
    assert all((np.diff(np.concatenate([p.ids_T, p.answer_T])) == 1).all() for p in found)
    assert all(len(prompt.answer_T) == 20 for prompt in found)
    starts = np.array([prompt.ids_T[0] for prompt in found])
    assert starts.min() < 5_000 and starts.max() > 95_000
    assert len({prompt.document.name for prompt in found}) == 2000
    assert {prompt.document.group for prompt in found} == {"d"}


def test_cuts_keep_the_token_texts_begin_with_and_the_limit():
    found = cuts(5000, count=50, bos=0, limit=50)
    assert all(prompt.ids_T[0] == 0 and len(prompt.ids_T) <= 30 for prompt in found)
    assert any(prompt.ids_T[1] > 1 for prompt in found)


def test_short_texts_give_fewer_prompts_or_none():
    assert not cuts(12)
    assert len(cuts(70, count=40)) == 70 // 27


def test_text_is_cut_the_same_whoever_responds(tokenizer, book, tmp_path):
    source = {"text": str(book), "prompts": 5}
    said = run(config(source, prompt_tokens=[30, 200]), tokenizer, tmp_path)
    author = Author(tokenizer)
    own = run(
        config(source, prompt_tokens=[30, 200], answers="target"),
        tokenizer,
        tmp_path,
        generate=author,
        author={"target": "t"},
    )
    text = book.read_text()
    prompts = [prompt for prompt, _ in parts(said, tokenizer)]
    assert len(prompts) == 5 and all(prompt + answer in text for prompt, answer in parts(said, tokenizer))
    assert parts(own, tokenizer) == [(prompt, "new<|end|>") for prompt in prompts]
    assert own.names == [f"book@{i}" for i in range(5)]


def test_prompts_of_one_text_are_held_out_together(tokenizer, book, tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(12):
        (tmp_path / "texts" / f"t{i}.txt").write_text(book.read_text() + str(i))
    made = config({"text": str(tmp_path / "texts"), "prompts": 4}, prompt_tokens=[30, 90], val_fraction=0.4)
    data = run(made, tokenizer, tmp_path)
    held = {name.split("@")[0] for name, val in zip(data.names, data.val, strict=True) if val}
    trained = {name.split("@")[0] for name, val in zip(data.names, data.val, strict=True) if not val}
    assert held and trained and not held & trained


def test_only_the_last_recorded_answer_is_a_label(tokenizer, tmp_path):
    source = chat(tmp_path, ["one?", "First.", "two?", "Second."], ["why?", "w" * 50])
    data = run(config(source), tokenizer, tmp_path)
    assert parts(data, tokenizer) == [
        ("<|user|>one?<|assistant|>First.<|end|><|user|>two?<|assistant|>", "Second.<|end|>"),
        ("<|user|>why?<|assistant|>", "w" * 20),  # up to answer_tokens
    ]


def test_a_question_can_be_moved_out_of_the_prompt(tokenizer, tmp_path):
    source = chat(tmp_path, ["one?", "First.", "two?", "Second."], ["why?", "So."])
    data = run(config(source, question="response"), tokenizer, tmp_path)
    assert parts(data, tokenizer) == [
        ("<|user|>one?<|assistant|>First.<|end|>", "<|user|>two?<|assistant|>Second.<|end|>"),
        ("<|user|>why?<|assistant|>", "So.<|end|>"),  # no context before the question
    ]
    assert data.manifest["read"]["inseparable"] == 1


def test_an_adapters_question_is_told_from_its_context(tokenizer, tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps({"transcript": "We met.", "summary": "They met."}) + "\n")
    source = {"jsonl": str(path), "adapter": "meetingbank"}
    ((before, after),) = parts(run(config(source, question="response"), tokenizer, tmp_path), tokenizer)
    assert before.endswith("Transcript:\nWe met.")
    assert after.endswith("Write a summary of the following meeting transcript.<|assistant|>They met.<|end|>")


def test_the_middle_of_a_long_prompt_goes_and_the_response_stays(tokenizer, tmp_path):
    ask = "Begin. " + "x" * 400 + " The end?"
    source = chat(tmp_path, [ask, "It is."])
    for answers, wanted in (("source", "It is.<|end|>"), ("target", "new<|end|>")):
        author = Author(tokenizer)
        made = config(source, max_doc_tokens=100, answers=answers)
        data = run(made, tokenizer, tmp_path, generate=author, author={"target": "t"})
        ((prompt, response),) = parts(data, tokenizer)
        assert prompt.startswith("<|user|>Begin. x") and prompt.endswith("x The end?<|assistant|>")
        assert 60 < data.length[0] - len(tokenizer(wanted)["input_ids"]) <= 80 and response == wanted


def test_empty_answers_are_dropped_and_counted(tokenizer, tmp_path):
    source = chat(tmp_path, ["one?", "First."], ["two?", "Second."])
    with pytest.raises(DataError, match=r"gave no document.*2 with an empty answer"):
        run(
            config(source, answers="target"),
            tokenizer,
            tmp_path,
            generate=Author(tokenizer, ""),
            author={"target": "t"},
        )


def test_synthetic_questions(tokenizer, book, tmp_path):
    sources = (
        {"text": str(book), "prompts": 0},
        {"synthetic": "questions", "rows": 8, "options": {"tasks": ["needles"], "doc_tokens": [900, 1500]}},
    )
    plain = run(config(*sources, answer_tokens=200), tokenizer, tmp_path)
    asked = run(config(*sources, answer_tokens=200, question="response"), tokenizer, tmp_path)
    author = Author(tokenizer)
    own = run(
        config(*sources, answer_tokens=200, answers="target"),
        tokenizer,
        tmp_path,
        generate=author,
        author={"target": "t"},
    )
    assert plain.names == [f"questions#{i}" for i in range(8)] and plain.kinds == ["needles"]
    for (prompt, answer), (context, rest), (again, new) in zip(
        *(parts(data, tokenizer) for data in (plain, asked, own)), strict=True
    ):
        assert 900 <= len(tokenizer(prompt)["input_ids"]) <= 1500
        assert prompt + answer == context + rest and again == prompt and new == "new<|end|>"
        assert rest.startswith("\nWhat ") and re.search(r" mentioned in the provided text (are|is)$", prompt)
        assert re.fullmatch(r"( \d{7}[,.])+<\|end\|>", answer)
        assert "Line" in context and "What" not in context


def test_who_answers_can_differ_by_source(tokenizer, book, tmp_path):
    questions = {
        "synthetic": "questions",
        "rows": 3,
        "answers": "source",
        "options": {"doc_tokens": [900, 950]},
    }
    made = config(
        {"text": str(book), "prompts": 2},
        questions,
        answers="target",
        prompt_tokens=[30, 60],
        answer_tokens=200,
    )
    data = run(made, tokenizer, tmp_path, generate=Author(tokenizer), author={"target": "t"})
    responses = [response for _, response in parts(data, tokenizer)]
    assert responses[:2] == ["new<|end|>"] * 2 and "new<|end|>" not in responses[2:]


def test_answers_are_asked_for_in_batches_that_fit(tokenizer, tmp_path):
    source = chat(tmp_path, *[["q" * n + "?", "a"] for n in (10, 20, 30, 40, 100)])
    author = Author(tokenizer)
    made = config(source, answers="target", answer_batch=3, answer_batch_tokens=140)
    run(made, tokenizer, tmp_path, generate=author, author={"target": "t"})
    sizes = [[len(prompt) for prompt in call] for call in author.calls]
    assert sizes == [[103], [43, 33], [23, 13]]
    faster = config(source, answers="target", answer_batch=5, answer_batch_tokens=999)
    run(faster, tokenizer, tmp_path, generate=author, author={"target": "t"})
    assert len(author.calls) == 3  # how they are grouped changes nothing


@pytest.mark.parametrize(
    "values,word",
    [
        ({"labels": "first"}, "answers, last_answer"),
        ({"question": "maybe"}, "prompt, response"),
        ({"prompt_tokens": [9]}, "SHORTEST, LONGEST"),
        ({"prompt_tokens": [90, 10]}, "SHORTEST <= LONGEST"),
        ({"prompt_tokens": "wide"}, "SHORTEST, LONGEST"),
        ({"answer_batch": 0}, "answer_batch=0"),
        ({"mask": "all"}, "mask=template or prefix"),
        ({"long_documents": "split"}, "long_documents=truncate or error"),
        ({"labels": "answers", "question": "response"}, "labels=last_answer"),
        ({"sources": [{"text": "x", "prompts": -1}]}, "prompts=-1"),
        ({"sources": [{"text": "x", "answers": "mine"}]}, "source, target"),
    ],
)
def test_mistakes_are_named(values, word):
    given = {"name": "mine", "sources": [{"text": "x"}], "stages": STAGES, "labels": "last_answer"}
    with pytest.raises(ConfigError, match=word):
        DataConfig.parse({**given, "long_documents": "truncate", **values})


def test_a_limit_without_room_for_prompts_is_refused(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"no room for data\.answer_tokens=20"):
        run(config(chat(tmp_path, ["a", "b"]), max_doc_tokens=20), tokenizer, tmp_path)


def test_questions_without_text_say_what_to_give(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"no text to hide facts in.*data\.books=PATH"):
        run(config({"synthetic": "questions", "rows": 2}, prompt_tokens=[1000, 2000]), tokenizer, tmp_path)
    with pytest.raises(ConfigError, match=r"'riddles'; known: needles"):
        run(
            config({"synthetic": "questions", "rows": 2, "options": {"tasks": ["riddles"]}}),
            tokenizer,
            tmp_path,
        )
