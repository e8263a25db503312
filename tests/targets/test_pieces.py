"""Text from tokens as they come: whole characters, and words."""

from __future__ import annotations

from longtrain.targets.loading import load_target
from longtrain.targets.tokenizer import words_of


def test_words_and_pieces_are_the_text() -> None:
    tiny = load_target("tiny", layers=False)
    text = "A naïve  word,\nand 龙 🙂 ends."
    ids = tiny.encode(text)
    assert "".join(tiny.pieces(ids)) == text
    words = tiny.words(ids)
    assert "".join(word for word, _ in words) == text
    assert [at for _, tokens in words for at in tokens] == list(range(len(ids)))
    assert [word for word, _ in words_of(["a", "b", " c", "\n", "d"])] == ["ab", " c", "\n", "d"]
