import numpy as np
import pytest

from longtrain.assets import asset_dir
from longtrain.data.read.adapters import ADAPTERS, adapt, messages_of
from longtrain.data.read.manifest import Manifest
from longtrain.errors import ConfigError, DataError

ROWS = {
    "slimpajama": {"text": "A page.", "meta": {"redpajama_set_name": "RedPajamaC4"}},
    "prolong64k": {"text": "decoded", "domain": "book", "length": 65536},
    "longspec_long": {"source": "book", "text": "Once.", "index": 0},
    "longspec_sft": {"source": "gov-report", "report": "R", "summary": "S", "index": 1},
    "qwq_longcot": {"problem": "1+1?", "qwq": "Let me see. 2", "source": "NuminaMath"},
    "gov_report": {"report": "R", "summary": "S"},
    "multi_news": {"document": "a NEWLINE_CHAR b ||||| c", "summary": "– S"},
    "meetingbank": {"transcript": "T", "summary": "S", "uid": "x"},
    "lcc_python": {"context": "def f():", "gt": "    return 1"},
    "pg19": {"text": "A book.", "short_book_title": "t"},
    "chatqa2_long": {
        "question": "User: A long document.\n\nQ: Who wrote it?\n\nAssistant:",
        "answer": "Nobody knows.",
        "word count": 9,
    },
    "tulu3": {
        "id": "a_1",
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
        "source": "ai2-adapt-dev/flan_v2_converted",
    },
    "stack": {"content": "x = 1", "lang": "Python", "max_stars_repo_licenses": ["MIT"]},
    "fewshot_metamath": {"question": "Q: 1+1? A: 2. Q: 2+2?", "answer": "4"},
    "fewshot_arc": {"prompt": "Question. Answer. Question.", "chosen": "Right", "rejected": "Wrong"},
    "fewshot_hellaswag": {"prompt": "She sat down and", "chosen": "read.", "rejected": "flew."},
    "code_permissive": {"content": "x = 1", "license": "mit"},
    "nemotron_sample": {"text": "A page."},
    "wikitext2": {"text": " = Robert Boulter = \n"},
    "c4": {"text": "A page.", "timestamp": "2019-04-24T02:17:53Z", "url": "http://a.b"},
    "pg19_test": {"text": "A book.", "short_book_title": "t", "publication_date": 1884},
    "infbench_sum": {"id": 0, "context": "A book.", "input": "", "answer": ["S"], "options": []},
    "multi_lexsum": {"id": "EE-1", "sources": ["One.", "Two."], "summary/short": "S"},
}
"""One hand-made row of each manifest, with the columns its Hub card lists."""


def one(adapter, row, **columns):
    (document,) = adapt(adapter, row, columns, name="r", kind="")
    return document


def test_every_manifest_has_a_row_here():
    assert sorted(ROWS) == sorted(path.stem for path in asset_dir("data_prep").glob("*.yaml"))


@pytest.mark.parametrize("name", sorted(ROWS))
def test_manifests_read_their_rows(name):
    manifest = Manifest.load(name)
    for part in manifest.parts:
        documents = adapt(part.adapter, ROWS[name], part.columns, name="r", kind=part.kind)
        assert len(documents) == 1
        assert documents[0].text or documents[0].messages[-1]["role"] == "assistant"
        assert part.licence and part.revision and "/" in part.hub


def test_a_list_of_texts_is_one_document():
    assert one("text", {"sources": ["One.", "Two."]}, text="sources").text == "One.\n\nTwo."


def test_turns_of_both_forms_become_messages():
    roles = one(
        "conversation",
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    )
    shares = one(
        "conversation", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    )
    assert (
        roles.messages
        == shares.messages
        == ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    )


@pytest.mark.parametrize(
    "turns", [[{"role": "judge", "content": "x"}], [{"role": "user", "content": None}], "text", 3]
)
def test_turns_that_are_not_turns_are_refused(turns):
    with pytest.raises(DataError, match="row r"):
        one("conversation", {"conversations": turns})


def test_tokens_keep_their_mask():
    document = one("tokenised", {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]})
    assert document.ids_T.tolist() == [5, 6, 7] and document.mask_T.tolist() == [False, True, True]
    assert one("tokenised", {"input_ids": [5, 6]}).mask_T.all()
    with pytest.raises(DataError, match="equally long"):
        one("tokenised", {"input_ids": [5, 6], "loss_mask": [1]})


def test_packed_tokens_become_one_document_each():
    row = {
        "input_ids": np.arange(10, dtype=np.uint32),
        "indices": np.array([[0, 4], [4, 5], [5, 10]]),
        "domain": "book",
    }
    documents = adapt("packed_tokens", row, {}, name="r", kind="")
    assert [d.ids_T.tolist() for d in documents] == [[0, 1, 2, 3], [5, 6, 7, 8, 9]]
    assert [d.name for d in documents] == ["r", "r/1"] and documents[0].kind == "book"


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "answer": "a"},
        {"instruction": "q", "input": "", "response": "a"},
        {"instruction": "q", "input": "", "output": "a"},
    ],
)
def test_instructions_under_their_usual_names(row):
    assert [m["content"] for m in one("instruct", row).messages] == ["q", "a"]


def test_an_instructions_input_follows_it():
    assert (
        one("instruct", {"instruction": "q", "input": "i", "output": "a"}).messages[0]["content"] == "q\n\ni"
    )


def test_longspec_rows_by_source():
    paper = one("longspec_long", {"source": "arxiv", "article": ["A", "B"], "abstract": ["a", "b"]})
    assert [m["role"] for m in paper.messages] == ["user", "assistant"] * 2 and paper.messages[3][
        "content"
    ] == "b"
    assert (
        one("longspec_long", {"source": "arxiv", "article": "A", "abstract": "a"}).messages[1]["content"]
        == "a"
    )
    chat = one("longspec_long", {"source": "tulu-v2", "conversation": [{"role": "user", "content": "x"}]})
    assert chat.messages[0]["content"] == "x"
    code = one("longspec_sft", {"source": "code", "prefix": "def f", "suffix": "():"})
    assert code.messages[1]["content"] == "():" and "def f" in code.messages[0]["content"]
    for adapter in ("longspec_long", "longspec_sft"):
        with pytest.raises(DataError, match="poems"):
            one(adapter, {"source": "poems"})


def test_news_lose_their_separators():
    prompt, answer = one("multi_news", ROWS["multi_news"]).messages
    assert (
        "|||||" not in prompt["content"]
        and "NEWLINE_CHAR" not in prompt["content"]
        and answer["content"] == "S"
    )


def test_files_under_other_licences_are_left_out():
    assert (
        adapt(
            "permissive_code", {"content": "x", "license": "gpl-3.0"}, {"text": "content"}, name="r", kind=""
        )
        == []
    )


def test_a_missing_column_names_those_there_are():
    with pytest.raises(DataError, match=r"row r: its column 'messages' is null; drop the row"):
        adapt("conversation", {"messages": None}, {}, name="r", kind="")
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    with pytest.raises(DataError, match="row r: a turn of assistant with tool_calls, which is not read"):
        adapt("conversation", {"messages": [called]}, {}, name="r", kind="")
    with pytest.raises(DataError, match=r"row r has no column 'text'; it has: body.*columns: {text: NAME}"):
        one("text", {"body": "x"})
    assert one("text", {"body": "x"}, text="body").text == "x"


def test_an_unknown_adapter_names_the_known():
    with pytest.raises(ConfigError, match=f"known: {sorted(ADAPTERS)[0]}"):
        one("csv", {})


def test_a_long_question_loses_the_marks_of_its_dialogue():
    row = {"question": "User: A book.\n\nIts end.\n\nQ: Who?\n\nAssistant:", "answer": ["Him.", "Her."]}
    asked, answer = one("chatqa_long", row).messages
    assert asked["content"] == "A book.\n\nIts end.\n\nQ: Who?" and asked["question"] == "Q: Who?"
    assert answer["content"] == "Him."
    (asked, _) = one("chatqa_long", {"question": "Plain", "answer": "A"}).messages
    assert asked["content"] == "Plain"


def test_preference_pairs_give_the_preferred_answer():
    part = Manifest.load("fewshot_arc").parts[0]
    asked, answer = one(part.adapter, ROWS["fewshot_arc"], **part.columns).messages
    assert (asked["content"], answer["content"]) == ("Question. Answer. Question.", "Right")


ASKED = [{"role": "user", "content": "a?"}]
SAID = [{"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a?", "response": "b"},
        {"instruction": "a?", "output": "b"},
        {"question": "a?", "answer": "b"},
        {"prompt": ASKED, "completion": SAID},
        {"prompt": ASKED, "completion": "b"},
        {"messages": [*ASKED, *SAID], "prompt": "another"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "?"]}, *SAID]},
    ],
)
def test_conversations_in_the_columns_that_are_common(row):
    (document,) = adapt("conversation", row, {}, name="r", kind="")
    assert document.messages == (*ASKED, *SAID)


def test_tools_are_turns_and_pictures_are_refused():
    turns = [*ASKED, {"role": "tool", "content": "42"}, *SAID]
    assert [turn["role"] for turn in messages_of(turns, "r")] == ["user", "tool", "assistant"]
    with pytest.raises(DataError, match=r"list content; allowed roles: .*or a list of texts"):
        messages_of([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "r")
    with pytest.raises(DataError, match="a turn is a str"):
        messages_of(["hello"], "r")
