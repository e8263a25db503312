from dataclasses import replace

import pytest

from longtrain.data.config import DataConfig
from longtrain.data.packing.prepare import prepare
from longtrain.data.packing.prepared import Prepared
from longtrain.data.retrieval.synthetic import turn_marks
from longtrain.data.retrieval.wording import KEY, PRETRAIN, RULER
from longtrain.errors import ConfigError


def config(text, **synthetic):
    sources = [{"text": str(text), "kind": "book"}, {"synthetic": "retrieval", **synthetic}]
    return DataConfig.parse({"name": "mixed", "sources": sources})


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("It was late. The rain went on. Nobody spoke of it again. " * 200)
    return path


def test_questions_are_written_into_the_other_sources_text(tokenizer, text, tmp_path):
    made = config(text, rows=6, options={"doc_tokens": [3000, 4000], "tasks": ["needles"]})
    data = Prepared.open(prepare(made, tokenizer, home=tmp_path))
    assert data.kinds == ["book", "needles"] and len(data.names) == 7
    for doc in range(1, 7):
        ids = data.ids[data.start[doc] : data.start[doc] + data.length[doc]]
        mask = data.mask[data.start[doc] : data.start[doc] + data.length[doc]].astype(bool)
        assert 3000 <= len(ids) <= 4000 and "rain went" in tokenizer.decode(ids.tolist())
        labels, read = tokenizer.decode(ids[mask].tolist()), tokenizer.decode(ids[~mask].tolist())
        assert "mentioned in the provided text are" in labels or "mentioned in the provided text is" in labels
        assert "What" in read and "What" not in labels


@pytest.mark.parametrize("kind", ["retrieval", "questions"])
def test_training_asks_in_the_words_of_the_suites(tokenizer, text, tmp_path, kind):
    made = config(text, rows=4, options={"doc_tokens": [1200, 1300], "tasks": ["needles"]})
    made = replace(made, sources=(made.sources[0], replace(made.sources[1], where=kind)))
    if kind == "questions":
        made = replace(made, labels="last_answer", answers="source", long_documents="truncate")
    seen = {}
    for wording in (RULER, PRETRAIN):
        tokenizer.init_kwargs[KEY] = wording.name
        data = Prepared.open(prepare(made, tokenizer, home=tmp_path))
        whole = tokenizer.decode(data.ids[data.start[-1] :].tolist())
        intros = {words.intro for words in (wording.needle, wording.needles)}
        assert any(intro in whole for intro in intros)
        seen[wording.name] = data.manifest["fingerprint"]
    assert len(set(seen.values())) == 2  # data of other words are made again


def test_turn_marks_are_those_of_the_template(tokenizer):
    marks = turn_marks(tokenizer)
    assert (marks.user, marks.assistant, marks.end) == ((1,), (2,), (3,))


def test_a_system_message_that_the_template_puts_first_is_no_part_of_a_users_turn(tokenizer):
    """ChatML's usual one stood before every question of a document."""
    tokenizer.chat_template = "{{ '<|start|>s' }}" + tokenizer.chat_template
    marks, one = turn_marks(tokenizer), tokenizer("s", add_special_tokens=False).input_ids[0]
    assert (marks.start, marks.user, marks.assistant, marks.end) == ((0, one), (1,), (2,), (3,))


@pytest.mark.parametrize("values", [{}, {"rows": 3, "options": {"colour": "red"}}])
def test_mistakes_are_named(tokenizer, text, tmp_path, values):
    with pytest.raises(ConfigError, match="rows: COUNT"):
        prepare(config(text, **values), tokenizer, home=tmp_path)
