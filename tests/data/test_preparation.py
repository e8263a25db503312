import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from longtrain.data.chat.mask import spans
from longtrain.data.config import DataConfig
from longtrain.data.packing.prepare import prepare, tokenizer_hash
from longtrain.data.packing.prepared import Prepared
from longtrain.errors import ConfigError, DataError, LongtrainError

from .conftest import TEMPLATE, UNMARKED

STAGES = [{"steps": 1, "sequence_tokens": 64, "doc_tokens": 64}]


def config(*sources, **values):
    return DataConfig.parse({"name": "mine", "sources": list(sources), "stages": STAGES, **values})


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(10):
        (folder / f"t{i}.txt").write_text(f"Text number {i}. " * (i + 1))
    return folder


def chats(tmp_path, n=6, **row):
    path = tmp_path / "chats.jsonl"
    rows = [
        row
        or {
            "messages": [
                {"role": "user", "content": f"ask {i}"},
                {"role": "assistant", "content": f"say {i}"},
            ]
        }
        for i in range(n)
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def left_in(tmp_path):
    """What preparing left behind, but for its lock."""
    return [path.name for path in (tmp_path / "home" / "data").iterdir() if path.suffix != ".lock"]


def run(made, tokenizer, tmp_path, **options):
    return Prepared.open(prepare(made, tokenizer, home=tmp_path / "home", **options), verify=True)


def test_text_becomes_tokens_that_read_the_same(tokenizer, texts, tmp_path):
    data = run(config({"text": str(texts), "kind": "prose"}), tokenizer, tmp_path)
    assert data.kinds == ["prose"] and data.names == [f"t{i}" for i in range(10)]
    for i in range(10):
        ids = data.ids[data.start[i] : data.start[i] + data.length[i]]
        assert tokenizer.decode(ids.tolist()) == f"Text number {i}. " * (i + 1)
    assert data.mask.all() and data.manifest["counts"]["tokens"] == data.length.sum()
    files = data.manifest["sources"][0]["inputs"]["files"]
    assert len(files) == 10 and all(len(item["sha256"]) == 64 for item in files)
    assert data.folder.name == f"mine-{tokenizer_hash(tokenizer)[:8]}"


def test_equal_inputs_do_nothing_and_changed_ones_are_done_anew(tokenizer, texts, tmp_path, caplog):
    made = config({"text": str(texts)})
    manifest = run(made, tokenizer, tmp_path).folder / "manifest.json"
    before = manifest.stat().st_mtime_ns
    with caplog.at_level("INFO"):
        run(made, tokenizer, tmp_path)
    assert manifest.stat().st_mtime_ns == before and "nothing to do" in caplog.text
    os.utime(texts / "t0.txt")  # touched, not changed
    run(config({"text": str(texts)}, val_sequences=3, stages=STAGES * 2), tokenizer, tmp_path)
    assert manifest.stat().st_mtime_ns == before
    (texts / "t0.txt").write_text("Changed in place, once.")
    data = run(made, tokenizer, tmp_path)
    assert manifest.stat().st_mtime_ns != before
    assert tokenizer.decode(data.ids[: data.length[0]].tolist()) == "Changed in place, once."


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "WordPiece", "unk_token": "[U]", "vocab": {"a": 0}}},  # raises
        {
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(T+|T)*$"}, "behavior": "Isolated"}
        },  # panics
    ],
)
def test_a_tokenizer_that_fails_on_text_is_told_in_a_sentence(tokenizer, texts, tmp_path, change):
    from tokenizers import Tokenizer

    values = json.loads(tokenizer.backend_tokenizer.to_str())
    if "model" in change:
        change["model"] |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9}
    else:
        change["pre_tokenizer"]["invert"] = False
        (texts / "t0.txt").write_text("T" * 64 + "x")
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps({**values, **change}))
    with pytest.raises(DataError, match=r"tokenizer fails on the text \(.*get the target folder again"):
        run(config({"text": str(texts)}), tokenizer, tmp_path)


def test_damaged_data_is_told_of_and_written_anew(tokenizer, texts, tmp_path, caplog):
    made = config({"text": str(texts)})
    data = run(made, tokenizer, tmp_path)
    whole = (data.folder / "mask.npy").read_bytes()
    (data.folder / "mask.npy").write_bytes(whole[:-1] + b"\0")
    again = run(made, tokenizer, tmp_path)
    assert "mask.npy is damaged" in caplog.text and "nothing to do" not in caplog.text
    assert (again.folder / "mask.npy").read_bytes() == whole
    (data.folder / "manifest.json").write_text("{")
    run(made, tokenizer, tmp_path)
    assert "has no manifest that this version reads" in caplog.text


def test_current_data_in_a_place_that_may_only_be_read_is_taken(tokenizer, texts, tmp_path, monkeypatch):
    made = config({"text": str(texts)})
    folder = run(made, tokenizer, tmp_path).folder
    before = {path: path.read_bytes() for path in folder.iterdir()}
    (folder.parent / f".{folder.name}.lock").unlink()
    real = os.open

    def read_only(path, flags, *rest, **more):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(
        Path, "mkdir", lambda path, **_: read_only(path, os.O_WRONLY) if not path.is_dir() else None
    )
    assert run(made, tokenizer, tmp_path).folder == folder
    with pytest.raises(LongtrainError, match=r"cannot write .*: Read-only file system"):
        run(config({"text": str(texts)}, append_eos=True), tokenizer, tmp_path)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_one_rank_of_a_machine_hashes_the_data(tokenizer, texts, tmp_path, caplog, monkeypatch):
    made = config({"text": str(texts)})
    mask = run(made, tokenizer, tmp_path).folder / "mask.npy"
    mask.write_bytes(mask.read_bytes()[:-1] + b"\0")
    caplog.clear()
    monkeypatch.setenv("LOCAL_RANK", "1")
    prepare(made, tokenizer, home=tmp_path / "home")
    assert "damaged" not in caplog.text
    monkeypatch.setenv("LOCAL_RANK", "0")
    prepare(made, tokenizer, home=tmp_path / "home")
    assert "mask.npy is damaged" in caplog.text


@pytest.mark.parametrize(
    "values", [{"append_eos": True}, {"min_doc_tokens": 40}, {"val_fraction": 0.5}, {"seed": 1}]
)
def test_changed_options_are_done_anew(tokenizer, texts, tmp_path, values):
    first = run(config({"text": str(texts)}), tokenizer, tmp_path).manifest["fingerprint"]
    assert run(config({"text": str(texts)}, **values), tokenizer, tmp_path).manifest["fingerprint"] != first


def test_another_tokenizer_has_its_own_folder(tokenizer, texts, tmp_path):
    one = run(config({"text": str(texts)}), tokenizer, tmp_path).folder
    tokenizer.chat_template = UNMARKED
    assert run(config({"text": str(texts)}), tokenizer, tmp_path).folder != one and one.is_dir()


def test_calling_a_tokenizer_does_not_change_its_hash(tokenizer):
    before = tokenizer_hash(tokenizer)
    tokenizer("text", truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == before


def test_append_eos_ends_every_text(tokenizer, texts, tmp_path):
    data = run(config({"text": str(texts)}, append_eos=True), tokenizer, tmp_path)
    assert (data.ids[data.start + data.length - 1] == tokenizer.eos_token_id).all()


def test_conversations_are_labelled_by_the_marks(tokenizer, tmp_path):
    data = run(config({"conversations": chats(tmp_path)}), tokenizer, tmp_path)
    for i in range(6):
        ids = np.asarray(data.ids[data.start[i] : data.start[i] + data.length[i]])
        mask = np.asarray(data.mask[data.start[i] : data.start[i] + data.length[i]])
        assert [tokenizer.decode(ids[a:b].tolist()) for a, b in spans(mask)] == [f"say {i}<|end|>"]


@pytest.mark.parametrize(
    "template,word",
    [
        (UNMARKED, "generation %}"),
        (
            TEMPLATE.replace(
                "{% generation %}{{ m['content'] }}<|end|>", "{{ m['content'] }}<|end|>{% generation %}"
            ),
            "0%",
        ),
        ("{% generation %}" + UNMARKED + "{% endgeneration %}", "100%"),
        (TEMPLATE.replace("<|assistant|>{% generation %}", "{% generation %}<|user|>Assistant "), "line up"),
    ],
)
def test_templates_that_mask_wrongly_stop_the_run(tokenizer, tmp_path, template, word):
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=word):
        run(config({"conversations": chats(tmp_path)}, mask="template"), tokenizer, tmp_path)
    assert not left_in(tmp_path)


def test_the_usual_mask_is_the_templates_marks_or_turn_by_turn(tokenizer, texts, tmp_path, caplog):
    sources = ({"text": str(texts)}, {"conversations": chats(tmp_path)})
    marked = run(config(*sources), tokenizer, tmp_path)
    assert np.array_equal(marked.mask, run(config(*sources, mask="template"), tokenizer, tmp_path).mask)
    assert "is current" in caplog.text or marked.folder.is_dir()
    tokenizer.chat_template = UNMARKED
    with caplog.at_level("INFO"):
        unmarked = run(config(*sources), tokenizer, tmp_path)
    assert "data.mask=prefix: the chat template has no generation marks" in caplog.text
    assert np.array_equal(unmarked.mask, marked.mask) and np.array_equal(unmarked.ids, marked.ids)


@pytest.mark.parametrize("template,word", [(UNMARKED, "generation %}"), (None, "no chat template")])
def test_a_template_that_cannot_serve_is_told_before_texts_are_read(
    tokenizer, texts, tmp_path, template, word, monkeypatch
):
    """Hours of books and code were tokenised first, and nothing of them was kept."""
    tokenizer.chat_template = template
    monkeypatch.setattr("longtrain.data.packing.prepare.Tokenise", None)
    sources = ({"text": str(texts)}, {"conversations": chats(tmp_path)})
    with pytest.raises(DataError, match=word):
        run(config(*sources, mask="template"), tokenizer, tmp_path)


def test_a_wrong_mask_is_found_before_the_whole_corpus_is_read(tokenizer, tmp_path):
    tokenizer.chat_template = "{% generation %}" + UNMARKED + "{% endgeneration %}"
    with pytest.raises(DataError, match="in 200 conversations"):
        run(config({"conversations": chats(tmp_path, n=450)}), tokenizer, tmp_path)


def test_mask_all_labels_prompts_too_when_asked(tokenizer, tmp_path):
    tokenizer.chat_template = UNMARKED
    assert run(config({"conversations": chats(tmp_path)}, mask="all"), tokenizer, tmp_path).mask.all()


def test_conversations_without_a_last_answer_are_counted(tokenizer, tmp_path):
    path = chats(tmp_path)
    with Path(path).open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "left open"}]}) + "\n")
    data = run(config({"conversations": path}), tokenizer, tmp_path)
    assert len(data.names) == 6 and data.manifest["read"]["unanswered"] == 1


@pytest.mark.parametrize("labels", ["answers", "last_answer"])
def test_conversations_with_blank_answers(tokenizer, tmp_path, labels):
    """One whose answers are all blank is left out; a blank one among others does not end the preparation."""
    path = tmp_path / "chats.jsonl"
    said = [["yes"], [""], ["", "late"], ["early", " \n"]]
    turns = [
        [turn for answer in answers for turn in (("user", "ask"), ("assistant", answer))] for answers in said
    ]
    rows = [{"messages": [{"role": role, "content": text} for role, text in one]} for one in turns]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = run(
        config({"conversations": str(path)}, labels=labels, long_documents="truncate"), tokenizer, tmp_path
    )
    kept = [int(name.partition(":")[2]) for name in data.names]
    assert kept == ([1, 3, 4] if labels == "answers" else [1, 3])
    assert data.manifest["read"]["empty"] == (1 if labels == "answers" else 2)
    found = [
        tokenizer.decode(ids[mask].tolist())
        for ids, mask in (
            (
                data.ids[start : start + length],
                np.asarray(data.mask[start : start + length], bool),
            )
            for start, length in zip(data.start, data.length, strict=True)
        )
    ]
    both = ["yes<|end|>", "<|end|>late<|end|>", "early<|end|> \n<|end|>"]
    assert found == (both if labels == "answers" else ["yes<|end|>", "late<|end|>"])


def test_half_characters_and_damaged_files_are_skipped_where_that_is_asked(tokenizer, texts, tmp_path):
    rows = tmp_path / "r.jsonl"
    rows.write_text('{"text": "whole"}\n{"text": "half \\ud83d"}\n')
    (texts / "t0.txt").write_bytes(b"\xff\xff")
    (texts / "t1.txt.gz").write_bytes(b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 40)
    sources = {"jsonl": str(rows)}, {"text": str(texts)}
    with pytest.raises(DataError, match=r"r\.jsonl:2 holds \\ud83d"):
        run(config(*sources), tokenizer, tmp_path)
    data = run(config(*sources, on_error="skip"), tokenizer, tmp_path)
    assert data.names == ["r.jsonl:1", *(f"t{i}" for i in range(1, 10))]
    assert data.manifest["read"]["bad"] == 3


def test_pre_tokenised_rows_keep_ids_and_mask(tokenizer, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"input_ids": [9, 8, 7, 6], "loss_mask": [0, 0, 1, 1]}) + "\n")
    data = run(config({"tokenised": str(path)}), tokenizer, tmp_path)
    assert data.ids.tolist() == [9, 8, 7, 6] and data.mask.tolist() == [0, 0, 1, 1]
    path.write_text(json.dumps({"input_ids": [9, 8000]}) + "\n")
    with pytest.raises(DataError, match="8000"):
        run(config({"tokenised": str(path)}), tokenizer, tmp_path)


@pytest.mark.parametrize("how", ["error", "split", "truncate"])
def test_a_document_longer_than_the_context(tokenizer, texts, tmp_path, how):
    (texts / "t3.txt").write_text("a" * 700)
    made = config({"text": str(texts)}, long_documents=how)
    if how == "error":
        with pytest.raises(
            DataError, match=r"document t3 has 700 tokens, the limit is 512.*long_documents=split"
        ):
            run(made, tokenizer, tmp_path, context_tokens=512)
        return
    data = run(made, tokenizer, tmp_path, context_tokens=512)
    assert data.length[3] == (700 if how == "split" else 512)
    assert data.manifest["read"].get("truncated", 0) == (how == "truncate")


def test_a_long_conversation_loses_the_middle_of_its_prompt(tokenizer, tmp_path):
    ask = "Sum up: " + "x" * 400 + " Now sum up."
    row = {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": "Many x."}]}
    made = config(
        {"conversations": chats(tmp_path, n=3, **row)}, long_documents="truncate", max_doc_tokens=100
    )
    data = run(made, tokenizer, tmp_path)
    text = tokenizer.decode(data.ids[: data.length[0]].tolist())
    assert (
        data.length.max() <= 100
        and text.startswith("<|user|>Sum up: x")
        and " Now sum up.<|assistant|>Many x.<|end|>" in text
    )
    assert data.labels.tolist() == [len("Many x.") + 1] * 3 and data.manifest["read"]["truncated"] == 3


def test_a_conversation_whose_answer_does_not_fit_is_left_out(tokenizer, tmp_path):
    path = chats(tmp_path)
    with Path(path).open("a") as file:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "y" * 300}]
        file.write(json.dumps({"messages": turns}) + "\n")
    data = run(
        config({"conversations": path}, long_documents="truncate", max_doc_tokens=100), tokenizer, tmp_path
    )
    assert len(data.names) == 6 and data.manifest["read"]["long"] == 1


@pytest.mark.parametrize("content", ["", "x", "\n"])
def test_empty_data_is_an_error(tokenizer, tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_text(content)
    with pytest.raises(DataError, match="gave no document"):
        run(config({"text": str(path)}), tokenizer, tmp_path)


def test_paths_that_are_not_set(tokenizer, texts, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.text=PATH"):
        run(config({"text": None}), tokenizer, tmp_path)
    with pytest.raises(ConfigError, match=r"data\.text=PATH"):
        run(config({"text": None, "optional": True}), tokenizer, tmp_path)
    data = run(config({"text": None, "optional": True}, {"text": str(texts)}), tokenizer, tmp_path)
    assert len(data.names) == 10


def test_held_out_documents_do_not_depend_on_the_others(tokenizer, texts, tmp_path):
    before = run(config({"text": str(texts)}, val_fraction=0.4), tokenizer, tmp_path)
    held = {name for name, val in zip(before.names, before.val, strict=True) if val}
    (texts / "a_new_one.txt").write_text("One more text comes first.")
    after = run(config({"text": str(texts)}, val_fraction=0.4), tokenizer, tmp_path)
    now = {name for name, val in zip(after.names, after.val, strict=True) if val}
    assert 0 < len(held) < 10 and now - {"a_new_one"} == held


def test_a_small_corpus_still_holds_one_document_out(tokenizer, texts, tmp_path):
    assert run(config({"text": str(texts)}, val_fraction=0.0001), tokenizer, tmp_path).val.sum() == 1


def test_every_kind_holds_a_document_out(tokenizer, texts, tmp_path):
    """A few novels beside many answers: without one of them `eval` would find no novel after the training."""
    few = tmp_path / "few"
    few.mkdir()
    for name in ("a", "b", "c"):
        (few / f"{name}.txt").write_text(f"Novel {name}. " * 9)
    made = config({"text": str(texts)}, {"text": str(few), "kind": "book"}, val_fraction=0.3, seed=3)
    data = run(made, tokenizer, tmp_path)
    kinds = [data.kinds[number] for number in data.kind[np.asarray(data.val, bool)]]
    assert kinds.count("book") == 1 and kinds.count("text") >= 1
    alone = run(config({"text": str(texts / "t0.txt")}, val_fraction=0.0001), tokenizer, tmp_path)
    assert not alone.val.any(), "the only document is trained on"


def test_a_source_can_be_the_held_out_one(tokenizer, texts, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Held out on purpose.")
    made = config(
        {"text": str(texts), "split": "train"}, {"text": str(other), "split": "val"}, val_fraction=0.9
    )
    assert run(made, tokenizer, tmp_path).val.tolist() == [False] * 10 + [True]
    with pytest.raises(DataError, match="no document to train on"):
        run(config({"text": str(other), "split": "val"}), tokenizer, tmp_path)


def test_rows_and_columns_of_a_source(tokenizer, tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps({"body": f"row {i}"}) + "\n" for i in range(9)))
    source = {"jsonl": str(path), "columns": {"text": "body"}, "rows": 4, "kind": "web"}
    data = run(config(source), tokenizer, tmp_path)
    assert data.names == [f"r.jsonl:{i}" for i in range(1, 5)] and data.kinds == ["web"]


def test_the_target_writes_the_last_answer(tokenizer, tmp_path):
    calls = []

    def generate(prompts):
        calls.append(prompts)
        return [[*tokenizer("new")["input_ids"], tokenizer.eos_token_id] for _ in prompts]

    tokenizer.chat_template = UNMARKED
    made = config({"conversations": chats(tmp_path)}, answers="target", answer_tokens=8)
    data = run(made, tokenizer, tmp_path, generate=generate, author={"target": "t"})
    text = tokenizer.decode(data.ids[: data.length[0]].tolist())
    assert text == "<|user|>ask 0<|assistant|>new<|end|>" and data.labels.tolist() == [4] * 6
    assert len(calls) == 1
    run(made, tokenizer, tmp_path, generate=generate, author={"target": "t"})
    run(
        config({"conversations": chats(tmp_path)}, answers="target", answer_tokens=8, min_doc_tokens=3),
        tokenizer,
        tmp_path,
        generate=generate,
        author={"target": "t"},
    )
    assert len(calls) == 1  # prepared anew from the answers there are
    with pytest.raises(DataError, match="longtrain prepare"):
        run(made, tokenizer, tmp_path, author={"target": "another"})


@pytest.mark.parametrize(
    "values,word",
    [
        ({"colour": 1}, "colour"),
        ({"mask": "guess"}, "template, prefix, all"),
        ({"min_doc_tokens": 1}, "2 or more"),
        ({"val_fraction": 1.0}, "val_fraction"),
        ({"sources": []}, "at least one source"),
        ({"sources": [{"text": "x", "jsonl": "y"}]}, "2 readers"),
        ({"sources": [{"text": "x", "wieght": 2}]}, "wieght"),
        ({"sources": [{"text": "x", "weight": 0}]}, "above 0"),
        ({"stages": [{"steps": 1, "sequence_tokens": 8, "doc_tokens": 9}]}, "doc_tokens <= sequence_tokens"),
        ({"stages": [{"sequence_tokens": 8, "doc_tokens": 8}]}, "exactly one"),
    ],
)
def test_mistakes_in_a_config_are_named(values, word):
    with pytest.raises(ConfigError, match=word):
        DataConfig.parse({"name": "mine", "sources": [{"text": "x"}], "stages": STAGES, **values})


TWO = """
import sys
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from longtrain.data.config import DataConfig
from longtrain.data.packing.prepare import prepare
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
config = DataConfig.parse({"name": "mine", "sources": [{"text": sys.argv[2]}]})
print(prepare(config, tokenizer, home=Path(sys.argv[3])))
"""


def test_ranks_that_prepare_at_once_do_it_once(tokenizer_folder, texts, tmp_path):
    command = [sys.executable, "-c", TWO, str(tokenizer_folder), str(texts), str(tmp_path / "home")]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {rank.communicate(timeout=120)[0].strip() for rank in ranks}
    assert len(folders) == 1 and all(rank.returncode == 0 for rank in ranks)
    assert len(Prepared.open(tmp_path / folders.pop(), verify=True).names) == 10


def test_a_row_in_error_stops_or_is_counted(tokenizer, tmp_path, caplog):
    path = Path(chats(tmp_path, 4))
    bad = ["{oops", json.dumps({"messages": 5}), json.dumps({"messages": [{"role": "x", "content": "y"}]})]
    path.write_text("\n".join([*bad[:1], path.read_text().strip(), *bad[1:]]) + "\n")
    source = {"conversations": str(path)}
    with pytest.raises(DataError, match=r"chats.jsonl:1 is not JSON"):
        run(config(source), tokenizer, tmp_path)
    with caplog.at_level("INFO"):
        assert len(run(config(source, on_error="skip"), tokenizer, tmp_path).start) == 4
    assert "3 in error" in caplog.text and "left out: " in caplog.text
    path.write_text("{oops\n")
    with pytest.raises(DataError, match=r"gave no document; .*1 in error.*; the first: .* is not JSON"):
        run(config(source, on_error="skip"), tokenizer, tmp_path)


def test_a_missing_column_says_what_to_type(tokenizer, tmp_path, texts):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "x y z"}\n')
    with pytest.raises(DataError, match=r"pass '\+\+data.sources.1.columns=\{text: NAME\}'"):
        run(config({"text": str(texts)}, {"jsonl": str(rows)}), tokenizer, tmp_path)


def test_what_is_left_out_is_among_what_was_read(tokenizer, tmp_path, caplog):
    turns = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "yes"}]
    rows = [
        {"messages": turns},
        {"messages": None},
        {"body": "x"},
        {"messages": turns[:1]},
        {"messages": turns},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{oops\n")
    with pytest.raises(
        DataError, match=r"'messages' is null; drop the row; or pass data\.on_error=skip, which"
    ):
        run(config({"conversations": str(path)}), tokenizer, tmp_path)
    with caplog.at_level("INFO", "longtrain"):
        run(config({"conversations": str(path)}, on_error="skip"), tokenizer, tmp_path)
    assert (
        "documents=2 " in caplog.text and "read 6 documents: 1 conversations that do not end" in caplog.text
    )
    assert (
        "3 in error" in caplog.text and "pass '++data.sources.0.columns={conversations: NAME}'" in caplog.text
    )


def test_prompts_too_short_for_a_question_are_told_before_text_is_read(
    tokenizer, tmp_path, texts, monkeypatch
):
    monkeypatch.setattr("longtrain.data.chat.tokenise.documents", None)
    sources = ({"text": str(texts)}, {"synthetic": "questions", "rows": 2})
    says = (
        r"data.prompt_tokens begins at 20, too short for a question of the task '\w+'; .*: \d{3} or more, e.g"
    )
    with pytest.raises(ConfigError, match=says):
        run(config(*sources, prompt_tokens=[20, 100], answer_tokens=8), tokenizer, tmp_path)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        run(config(*sources, prompt_tokens=[20, 100], answer_tokens=8), tokenizer, tmp_path)


def test_a_source_tree_is_code(tokenizer, tmp_path):
    root = tmp_path / "tree"
    for name in (
        "src/main.c",
        "src/deep/main.rs",
        ".git/hook.py",
        "node_modules/x.js",
        "README.md",
        "p.json",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"int a = 1; // {name}")
    source = {"jsonl": str(root), "kind": "code"}
    data = run(config(source), tokenizer, tmp_path)
    assert list(data.names) == ["src/deep/main.rs", "src/main.c"]
    (root / "rows.jsonl").write_text('{"text": "a row of code"}\n')
    (root / "p.json").unlink()
    (root / "src" / "main.c").unlink()  # then as many files of rows as of source
    assert list(run(config(source), tokenizer, tmp_path).names) == ["rows.jsonl:1"]
