"""Retrieval tasks: exact lengths, right answers, determinism, and rows of a mixture."""

import re
from itertools import pairwise

import numpy as np
import pytest

from longtrain.data.config import PackingStage
from longtrain.data.packing.batch import Batch
from longtrain.data.packing.mixture import Mixture, MixtureSequences
from longtrain.data.retrieval.material import Role, RoleDocument, TextStream
from longtrain.data.retrieval.synthetic import RetrievalWriter
from longtrain.data.retrieval.wording import PRETRAIN, RULER
from longtrain.errors import ConfigError, DataError
from tests.data.latin import TEXT, VOCABULARY, decode


@pytest.mark.parametrize("task", RetrievalWriter.tasks)
def test_documents_have_exactly_the_length_asked_for(writer: RetrievalWriter, task: str) -> None:
    rng = np.random.default_rng(0)
    for n in (1200, 1337, 2500, 4096):
        document = writer.write(task, n, rng)
        assert len(document.ids_T) == len(document.roles_T) == n


@pytest.mark.parametrize("task", RetrievalWriter.tasks)
def test_a_document_is_a_function_of_its_generator(writer: RetrievalWriter, task: str) -> None:
    first, again, other = (writer.write(task, 2000, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert (first.ids_T == again.ids_T).all() and (first.roles_T == again.roles_T).all()
    assert not np.array_equal(first.ids_T, other.ids_T)


def turns(document: RoleDocument) -> list[tuple[str, str]]:
    """(question with what is before it, answer) of each turn."""
    found = re.findall(r"<user>(.*?)<assistant>(.*?)<end>", decode(document.ids_T), flags=re.DOTALL)
    assert found
    return found


def test_needle_answers_are_the_values_hidden_for_the_key(writer: RetrievalWriter) -> None:
    for seed in range(20):
        document = writer.write("needles", 6000, np.random.default_rng(seed))
        text = decode(document.ids_T)
        for question, answer in turns(document):
            key = re.findall(r"numbers? for (\S+) mentioned", question)[-1]
            hidden = re.findall(rf"One of the special magic numbers for {key} is: (\d{{7}})\.", text)
            assert hidden and sorted(re.findall(r"\d+", answer)) == sorted(hidden)
        values = decode(document.ids_T[document.roles_T == Role.VALUE])
        assert re.fullmatch(r"\d+", values) and len(values) % 7 == 0


def test_table_answers_stand_in_the_table(writer: RetrievalWriter) -> None:
    for seed in range(20):
        document = writer.write("table", 1500, np.random.default_rng(seed))
        table = dict(re.findall(r"^(\d+): (\d+)$", decode(document.ids_T), flags=re.MULTILINE))
        for question, answer in turns(document):
            key = re.findall(r"(?:Look up |What is the value of )(\d+)", question)[-1]
            begin = f" The value of {key} in the table above is " if writer.wording is RULER else ""
            assert answer == f"{begin}{table[key]}."


def test_chain_answers_follow_the_assignments(writer: RetrievalWriter) -> None:
    for seed in range(20):
        document = writer.write("chains", 3000, np.random.default_rng(seed))
        if document.kind != "chains":
            continue
        text = decode(document.ids_T)
        for question, answer in turns(document):
            value = re.findall(r"the value (\d{5}) in", question)[-1]
            names = re.findall(r"[A-Z]{5}", answer)
            assert f"VAR {names[0]} = {value}." in text
            for before, after in pairwise(names):
                assert f"VAR {after} = VAR {before}." in text


def test_quotes_and_copies_stand_in_the_text(writer: RetrievalWriter) -> None:
    for seed in range(10):
        for question, answer in turns(writer.write("quote", 2000, np.random.default_rng(seed))):
            cue = question[-12:]
            assert writer.wording is PRETRAIN or answer.startswith(cue)
            assert cue + answer.removeprefix(cue) in TEXT * 2
        (question, answer), *_ = turns(writer.write("copy", 800, np.random.default_rng(seed)))
        assert question.endswith(answer)


def test_a_needle_prompt_hides_one_value_a_key_and_asks_for_one(writer: RetrievalWriter) -> None:
    ids, value = writer.needle_prompt(3000, 8, np.random.default_rng(0))
    text = decode(np.array(ids))
    hidden = re.findall(r"numbers for (\S+) is: (\d{7})\.", text)
    end = {
        "ruler": r"What is the special magic number for (\S+) mentioned in the provided text\?<assistant> "
        r"The special magic number for (\1) mentioned in the provided text is$",
        "pretrain": r"What are all the special magic numbers for (\S+) mentioned in the provided text\?"
        r"<assistant>$",
    }
    asked = re.search(end[writer.wording.name], text)
    assert len(ids) == 3000 and len(hidden) == 8 and len(dict(hidden)) == 8
    assert asked and dict(hidden)[asked[1]] == value


def test_hidden_sentences_leave_the_text_around_them_as_it_is(writer: RetrievalWriter) -> None:
    ids, _ = writer.needle_prompt(2000, 4, np.random.default_rng(1))
    body = decode(np.array(ids)).split("afterwards.\n")[1].split("\nWhat ")[0]
    rest = re.sub(r" One of the special magic numbers for \S+ is: \d{7}\.|One of[^\n]*: \d{7}\.\n", "", body)
    assert rest in TEXT * 2


def test_what_cannot_be_written_is_refused(writer: RetrievalWriter) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="too short"):
        writer.write("needles", 100, rng)
    with pytest.raises(ConfigError, match="too few"):
        writer.needle_prompt(300, 16, rng)
    with pytest.raises(DataError, match="at least 64"):
        TextStream(np.zeros(8, np.uint16), VOCABULARY, "book")


def mixture(writer: RetrievalWriter, **changes: object) -> Mixture:
    chat = RoleDocument(
        np.array([256, 65, 257, 66, 258], np.int32), np.array([1, 0, 1, 2, 2], np.uint8), "chat"
    )
    values: dict = dict(shares={"needles": 1, "text": 1, "chat": 1}, stream_weights=[1.0], min_doc_tokens=300)
    return Mixture(writer, writer.streams, [chat], **{**values, **changes})


def test_rows_are_full_and_weighted_by_role(writer: RetrievalWriter) -> None:
    batch = mixture(writer).batch(0, PackingStage(sequence_tokens=8000, doc_tokens=2000, steps=1), seed=0)
    assert batch.weights_T is not None
    starts = list(batch.bounds[:-1])
    assert batch.bounds[0] == 0 and batch.bounds[-1] == len(batch.ids_T) == 8000
    assert max(np.diff(batch.bounds)) <= 2000 and len(set(batch.kinds)) > 1
    assert not batch.loss_mask_T[starts].any()
    assert batch.tokens_in_step == int(batch.loss_mask_T.sum())
    labelled = [bool(batch.loss_mask_T[a:b].any()) for a, b in pairwise(batch.bounds)]
    assert batch.documents_in_step == sum(labelled) >= 3
    assert set(batch.weights_T.unique().tolist()) <= {0.0, 1.0, 4.0}


def test_any_rank_and_any_start_gives_the_same_rows(writer: RetrievalWriter) -> None:
    stages = [
        PackingStage(sequence_tokens=2000, doc_tokens=600, fraction=0.5),
        PackingStage(sequence_tokens=2000, doc_tokens=1500, fraction=0.5),
    ]

    def make(**keys: int) -> MixtureSequences:
        return MixtureSequences(mixture(writer), stages, total_steps=3, sequences_per_step=2, seed=1, **keys)

    whole, late = list(make()), list(make(start=4))
    ranks = [list(make(world=2, rank=rank)) for rank in (0, 1)]
    assert [len(whole), len(late), len(ranks[0])] == [6, 2, 3]
    for i, batch in enumerate(whole):
        assert batch.ids_T.equal(ranks[i % 2][i // 2].ids_T)
        assert batch.tokens_in_step == sum(
            int(b.loss_mask_T.sum()) for b in whole[i // 2 * 2 : i // 2 * 2 + 2]
        )
    assert late[0].ids_T.equal(whole[4].ids_T)


def test_a_process_writes_each_row_of_a_step_once(writer: RetrievalWriter, monkeypatch) -> None:
    written: list[int] = []
    write = Mixture.batch

    def counted(self: Mixture, index: int, stage: PackingStage, *, seed: int) -> Batch:
        written.append(index)
        return write(self, index, stage, seed=seed)

    monkeypatch.setattr(Mixture, "batch", counted)
    stages = [PackingStage(sequence_tokens=2000, doc_tokens=600, fraction=1.0)]
    rows = MixtureSequences(mixture(writer), stages, total_steps=2, sequences_per_step=4, seed=1)
    batches = list(rows)
    counts = [batch.tokens_in_step for batch in batches]
    documents = [write(rows.mixture, i, stages[0], seed=1).documents_in_step for i in range(8)]
    assert [batch.documents_in_step for batch in batches[3:5]] == [sum(documents[:4]), sum(documents[4:])]
    assert written == list(range(8))
    labels = [int(write(rows.mixture, i, stages[0], seed=1).loss_mask_T.sum()) for i in range(8)]
    assert counts == [sum(labels[:4])] * 4 + [sum(labels[4:])] * 4
    assert [rows[i].tokens_in_step for i in (5, 2, 2, 7)] == [counts[i] for i in (5, 2, 2, 7)]  # any order


def test_wrong_shares_are_refused(writer: RetrievalWriter) -> None:
    with pytest.raises(ConfigError, match="unknown share 'poems'"):
        mixture(writer, shares={"poems": 1})
    with pytest.raises(ConfigError, match="steps or fraction"):
        MixtureSequences(
            mixture(writer), [PackingStage(sequence_tokens=64, doc_tokens=64, epochs=1)], total_steps=1
        )
