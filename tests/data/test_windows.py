"""Pieces of long documents: exact bounds, everywhere in the text, from few characters of it."""

from functools import partial

import numpy as np
import pytest

from longtrain.data.chat.asked import Asking, WeightedQuestions
from longtrain.data.chat.prompts import cut_text
from longtrain.data.chat.windows import WINDOW_CHARS, Window, cut_window, windows
from longtrain.data.config import DataConfig
from longtrain.data.read.adapters import Document

BOS = 0
TEXT = "".join(map(chr, range(1, 30_001)))
"""Each character says where it stands."""
QUESTIONS = {"text": WeightedQuestions(("What?", "Why?"), (1, 1))}


def config(where="x", *, prompts=1, **values):
    return DataConfig.parse({"name": "w", "sources": [{"text": str(where), "prompts": prompts}], **values})


def tokens(text, chars):
    """One token for so many characters, the number of the first, after one that each text begins with."""
    return np.array([BOS, *map(ord, text[::chars])])


def chosen(text=TEXT, *, count=1, name="d", limit=10**6, **values):
    own = config(prompt_tokens=[10, 50], **values)
    return windows(Document(name, "text", text=text), own, count=count, limit=limit)


def pieces(text=TEXT, chars=1, **options):
    larger = partial(tokens, chars=chars)
    return [
        cut_window(one, larger(one.of(text)), text, larger, shortest=10, bos=BOS)
        for one in chosen(text, **options)
    ]


@pytest.mark.parametrize("chars", [1, 4, 6, 40])
def test_pieces_have_the_tokens_wanted_however_many_characters_that_takes(chars):
    made = pieces(chars=chars, count=60)
    lengths = np.array([len(one) for one in made])
    assert [one.tokens for one in chosen(count=60)] == lengths.tolist()
    assert lengths.min() == 10 and 45 < lengths.max() <= 50 and 15 < np.exp(np.log(lengths).mean()) < 35
    for piece in made:
        assert piece[0] == BOS and set(np.diff(piece[1:]).tolist()) == {chars}


def test_pieces_lie_everywhere_and_depend_on_seed_name_and_number_alone():
    places = [one.start for one in chosen(count=90)]
    assert places == [one.start for one in chosen(count=90)] and len(set(places)) > 80
    assert len({one.within for one in chosen(count=90)}) > 80
    assert [[one.name for one in chosen(count=count)] for count in (1, 2)] == [["d"], ["d@0", "d@1"]]
    for other in ({"seed": 1}, {"name": "e"}):
        assert [one.start for one in chosen(count=90, **other)] != places
    found = [pieces(name=str(number))[0] for number in range(300)]
    assert min(one[1] for one in found) < 400 and max(one[-1] for one in found) > len(TEXT) - 400
    assert abs(np.mean([one[1] for one in found]) / len(TEXT) - 0.5) < 0.05


def test_a_piece_is_no_longer_than_the_limit_and_the_document():
    assert max(len(one) for one in pieces(count=20, limit=20)) <= 20
    assert chosen(limit=9) == []  # the shortest piece does not fit
    text = TEXT[:3_000]
    assert all(10 <= len(piece) <= 12 for piece in pieces(text, 250, count=3))  # it has 13 tokens in all
    assert pieces(text, 400) == [None]


@pytest.mark.parametrize("within", [0.0, 0.5, 0.999])
def test_a_windows_last_token_is_in_no_piece(within):
    """10 characters from the sixth on give 11 tokens: enough for a piece of 10, too few for one of 11."""

    def cut(wanted):
        window, larger = Window("d", 5, 10, wanted, within), partial(tokens, chars=1)
        return cut_window(window, larger(window.of(TEXT)), TEXT, larger, shortest=1, bos=BOS).tolist()

    assert cut(10) == [BOS, *range(6, 15)]
    first = 6 + int(10 * within)  # of 20 characters
    assert cut(11) == [BOS, *range(first, first + 10)]


def test_a_document_as_long_as_its_windows_is_tokenised_whole():
    most = WINDOW_CHARS * 50
    assert chosen(TEXT[:most]) == [] and len(chosen(TEXT[: most + 1])) == 1
    assert chosen(TEXT[: 2 * most], count=2) == []
    chat = Document("c", "chat", messages=({"role": "user", "content": "1" * 9_000},))
    assert windows(chat, config(prompt_tokens=[10, 50]), count=1, limit=99) == []


def test_few_characters_are_tokenised_for_a_prompt_of_a_long_document(tmp_path, tokenizer, monkeypatch):
    for number in range(3):
        words = " ".join(f"Page {page} of book {number}." for page in range(2_000))
        (tmp_path / f"{number}.txt").write_text(words)
    (tmp_path / "short.txt").write_text("Too short.")
    given, real = [], type(tokenizer).__call__

    def counted(self, texts, *args, **options):
        given.extend([texts] if isinstance(texts, str) else texts)
        return real(self, texts, *args, **options)

    def asked():
        asking = Asking(config(tmp_path, prompts=2), tokenizer, 600, (100, 300), QUESTIONS, {})
        return list(asking.prompts()), asking.counts

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    made, counts = asked()
    chars = sum(map(len, given))
    assert len(made) == 6 and all(100 <= len(one.ids_T) <= 320 for one in made)
    assert 0 < chars <= WINDOW_CHARS * sum(len(one.ids_T) for one in made)
    assert (counts["short"], counts["documents"], counts["characters"]) == (1, 4, chars)
    assert [one.key for one in asked()[0]] == [one.key for one in made]


def test_pieces_leave_room_for_the_question_and_the_chat_template(tmp_path, tokenizer):
    (tmp_path / "long.txt").write_text(" ".join(f"Page {page}." for page in range(5_000)))
    asking = Asking(config(tmp_path, prompts=24), tokenizer, 180, (100, 300), QUESTIONS, {})
    assert len(list(asking.prompts())) == 24 and not asking.counts["long"]


def test_a_long_text_of_few_tokens_is_counted_as_short(tmp_path, tokenizer, monkeypatch):
    """Its windows grow until they are all of it; each growth is counted."""

    def coarse(_, texts):
        return [np.arange(100, 101 + len(one) // 400) for one in texts]

    monkeypatch.setattr("longtrain.data.chat.asked.encode", coarse)
    (tmp_path / "spaces.txt").write_text("x" * 4_000)
    for shortest, made in ((20, 0), (10, 1)):
        asking = Asking(config(tmp_path), tokenizer, 600, (shortest, 100), QUESTIONS, {})
        assert len(list(asking.prompts())) == made
        assert asking.counts["short"] == 1 - made and asking.counts["characters"] > 4_000


def test_a_short_document_is_asked_about_where_all_its_tokens_are_cut(tmp_path, tokenizer):
    """As earlier versions do, whose answers to it a run that goes on keeps."""
    text = " ".join(f"Page {page}." for page in range(60))
    (tmp_path / "short.txt").write_text(text)
    own = config(tmp_path, prompt_tokens=[100, 300], answer_tokens=1)
    (made,) = Asking(own, tokenizer, 600, (100, 300), QUESTIONS, {}).prompts()
    (cut,) = cut_text(Document("short", "text"), np.array(tokenizer(text).input_ids), own)
    assert made.messages[0]["content"].startswith(tokenizer.decode(cut.ids_T).strip() + "\n\nWh")
