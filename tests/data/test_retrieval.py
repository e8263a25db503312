import pytest

from longtrain.data.config import DataConfig
from longtrain.data.retrieval.synthetic import turn_marks
from longtrain.data.rows.prepare import prepare
from longtrain.data.rows.prepared import Prepared
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


def test_turn_marks_are_those_of_the_template(tokenizer):
    marks = turn_marks(tokenizer)
    assert (marks.user, marks.assistant, marks.end) == ((1,), (2,), (3,))


@pytest.mark.parametrize("values", [{}, {"rows": 3, "options": {"colour": "red"}}])
def test_mistakes_are_named(tokenizer, text, tmp_path, values):
    with pytest.raises(ConfigError, match="rows: COUNT"):
        prepare(config(text, **values), tokenizer, home=tmp_path)
