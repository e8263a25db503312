"""LongBench's tasks: prompts, truncation, scores, files and names of results."""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation import longbench_rows as files
from longtrain.evaluation.longbench_rows import TEMPLATES, answer_mark, read_tasks, unlike_published
from longtrain.evaluation.prompts import encode
from longtrain.evaluation.suites.longbench import NAMES, SPECS, make_task, task_score
from longtrain.evaluation.task import Example, Task

CLASSES = ["City", "State", "Other"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<assistant>"


def row(name: str, number: int = 0, **changed: Any) -> dict[str, Any]:
    fields = {
        "input": "Who?",
        "context": f"A {{story}} of {number}.",
        "answers": ["Paragraph 7", "7"] if name != "passage_retrieval_en" else ["Paragraph 7"],
        "length": 4,
        "dataset": name,
        "language": "en",
        "all_classes": CLASSES if name == "trec" else None,
        "_id": f"{name}-{number}",
    }
    return {**fields, **changed}


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(fields) + "\n" for fields in rows), encoding="utf-8")
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every task with two rows."""
    for name in NAMES:
        write(tmp_path / "longbench", name, [row(name, 0), row(name, 1)])
    return tmp_path / "longbench"


def load(where: str, names: Sequence[str] = NAMES) -> list[Task]:
    return [make_task(name, rows) for name, rows in read_tasks(where, tuple(names)).items()]


def one(tmp_path: Path, name: str, **changed: Any) -> Task:
    write(tmp_path / name, name, [row(name, **changed)])
    return load(str(tmp_path / name), [name])[0]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, but "ab" is one token, and a first token that is added."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789 .,:?\n<>", "ab"]
    vocabulary = {letter: i for i, letter in enumerate(["<bos>", "<unk>", "<user>", "<assistant>", *letters])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def test_the_settings_are_the_official_ones() -> None:
    assert len(NAMES) == 16 and sum(spec.rows for spec in SPECS.values()) == 13 * 200 + 150 + 2 * 500
    lengths = {name: spec.max_new_tokens for name, spec in SPECS.items()}
    assert lengths == {
        **dict.fromkeys(("narrativeqa", "qasper", "samsum"), 128),
        **dict.fromkeys(("multifieldqa_en", "trec", "lcc", "repobench-p"), 64),
        **dict.fromkeys(("hotpotqa", "2wikimqa", "musique", "triviaqa", "passage_count"), 32),
        "passage_retrieval_en": 32,
        **dict.fromkeys(("gov_report", "qmsum", "multi_news"), 512),
    }
    plain = {name for name, spec in SPECS.items() if not spec.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
    assert {name for name, spec in SPECS.items() if spec.first_line} == {"trec", "triviaqa", "samsum"}
    assert {name for name, spec in SPECS.items() if spec.stops or spec.min_new_tokens} == {"samsum"}


def test_the_prompts_are_the_official_ones_to_the_letter() -> None:
    assert tuple(TEMPLATES) == NAMES
    digest = hashlib.sha256(json.dumps(TEMPLATES, sort_keys=True).encode()).hexdigest()
    assert digest == "75e339f4f58566663b9e2916d85ca7258191b614158272128161675baece6c42"
    assert TEMPLATES["narrativeqa"].count("asconcisely as") == 2
    assert "\n\n Answer the question based on the above article" in TEMPLATES["qasper"]
    assert TEMPLATES["passage_count"].endswith("is: ") and TEMPLATES["multi_news"].startswith(
        "You are given several news passages. Write a one-page summary of all news. \n"
    )


def test_prompts_are_filled(folder: Path) -> None:
    tasks = {task.name: task for task in load(str(folder))}
    assert list(tasks) == list(NAMES)
    prompts = {name: task.prompt(next(task.examples())) for name, task in tasks.items()}
    assert prompts["lcc"] == "Please complete the code given below. \nA {story} of 0.Next line of code:\n"
    assert prompts["repobench-p"].endswith("A {story} of 0.Who?Next line of code:\n")
    assert prompts["trec"].endswith("questions.\n\nA {story} of 0.\nWho?")
    assert prompts["triviaqa"].endswith("examples.\n\nA {story} of 0.\n\nWho?")
    assert all("A {story} of 0." in prompt for prompt in prompts.values())


@pytest.mark.parametrize(
    ("name", "text", "answers", "score"),
    [
        ("triviaqa", "\n\nAnn\nBob", ["bob", "ann"], 1.0),  # the first line alone
        ("hotpotqa", "Ann\nBob", ["bob", "ann"], 2 / 3),
        ("samsum", "Ann left\nBob left", ["Ann left"], 2.0 * (1.0 / (2.0 + 1e-8))),
        ("qmsum", "Ann left\nBob left", ["Ann left"], 2.0 * ((1.0 * (2 / 3)) / (1 + 2 / 3 + 1e-8))),
        ("trec", "City\nState", ["City"], 1.0),
        ("trec", "City State", ["City"], 0.5),
        ("lcc", "\n# no\nx = 1\ny", ["x = 1"], 1.0),  # not cut to one line before
        ("passage_count", "7, not 8", ["7"], 0.5),
        ("passage_retrieval_en", "Paragraph 7", ["Paragraph 7"], 1.0),
    ],
)
def test_scores_by_hand(tmp_path: Path, name: str, text: str, answers: list[str], score: float) -> None:
    task = one(tmp_path, name, answers=answers)
    assert task.score(text, task.rows[0]) == score


def test_classes_are_those_of_the_last_row(tmp_path: Path) -> None:
    rows = [row("trec", 0, answers=["City"]), row("trec", 1, all_classes=["City"])]
    write(tmp_path, "trec", rows)
    (task,) = load(str(tmp_path), ["trec"])
    assert task.score("City State", task.rows[0]) == 1.0


def test_a_task_is_scored_as_the_official_loop_does() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        scores = [rng.choice((0, 1, 0.5, 1 / 3, rng.random())) for _ in range(rng.randrange(1, 40))]
        total_score = 0.0
        for score in scores:
            total_score += score
        assert task_score(scores) == round(100 * total_score / len(scores), 2)
    assert task_score([1 / 3]) == 33.33 and task_score([0.00125]) == 0.12


def official_ids(tokenizer: Any, prompt: str, max_length: int, chat: bool) -> list[int]:
    """Oracle: the official runner's steps, with a template that writes the first token itself."""
    tokenized = tokenizer(prompt, truncation=False).input_ids
    if len(tokenized) > max_length:
        half = int(max_length / 2)
        prompt = tokenizer.decode(tokenized[:half], skip_special_tokens=True) + tokenizer.decode(
            tokenized[-half:], skip_special_tokens=True
        )
    if chat:
        prompt = f"<user>{prompt}<assistant>"
    return tokenizer(prompt, truncation=False).input_ids


def test_prompts_are_cut_in_the_middle_as_the_official_runner_does(tokenizer) -> None:
    rng = random.Random(0)
    cuts = 0
    for _ in range(300):
        text = "".join(rng.choices("abcab \n", k=rng.randrange(40))) + rng.choice(("", "<user>", "<bos>x"))
        most, chat = rng.randrange(2, 30), rng.random() < 0.5
        got = encode(tokenizer, text, chat=chat, max_tokens=most)
        assert list(got.ids) == official_ids(tokenizer, text, most, chat)
        assert got.cut == (len(tokenizer(text).input_ids) > most)
        cuts += got.cut
    assert 50 < cuts < 250


def test_the_halves_are_joined_as_text(tokenizer) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text).input_ids)

    got = encode(tokenizer, "caxxxxbd", chat=False, max_tokens=6)  # <bos> c a | x b d
    assert got.ids == ids("caxbd") and got.cut
    got = encode(tokenizer, "caxxxxbd", chat=False, max_tokens=5)  # <bos> c | b d
    assert got.ids == ids("cbd")
    got = encode(tokenizer, "caxxxxbdef", chat=False, max_tokens=8)  # <bos> c a x | b d e f
    assert got.ids == ids("caxbdef")
    joined = encode(tokenizer, "cdaxxxxbefg", chat=False, max_tokens=8)  # a and b meet and become one token
    assert joined.ids == ids("cdabefg") and len(joined.ids) == 7
    chat = encode(tokenizer, "cd", chat=True, max_tokens=50)
    assert chat.ids.count(tokenizer.bos_token_id) == 1 and not chat.cut


def test_what_cannot_be_encoded_is_an_error(tokenizer) -> None:
    with pytest.raises(ConfigError, match="max_tokens=1 leaves no prompt"):
        encode(tokenizer, "a", chat=False, max_tokens=1)
    tokenizer.chat_template = None
    try:
        with pytest.raises(ConfigError, match="no chat template"):
            encode(tokenizer, "a", chat=True, max_tokens=9)
    finally:
        tokenizer.chat_template = TEMPLATE


def test_samsum_also_ends_at_a_line_break(folder: Path, tokenizer) -> None:
    tasks = {task.name: task for task in load(str(folder))}
    assert tasks["samsum"].stop_ids(tokenizer) == (tokenizer.convert_tokens_to_ids("\n"),)
    assert tasks["qasper"].stop_ids(tokenizer) == ()


def test_rows_come_from_any_place(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [task.settings() for task in load(str(folder))]
    inner = tmp_path / "inner"
    inner.mkdir()
    folder.rename(inner / "data")
    assert [task.settings() for task in load(str(inner))] == expected
    packed = inner / "data" / "qasper.jsonl"
    packed.with_suffix(".jsonl.xz").write_bytes(lzma.compress(packed.read_bytes()))
    packed.unlink()
    assert [task.settings() for task in load(str(inner))] == expected
    packed.write_bytes(lzma.decompress(packed.with_suffix(".jsonl.xz").read_bytes()))
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for file in sorted((inner / "data").glob("*.jsonl")):
            archive.write(file, f"data/{file.name}")
            archive.writestr(f"__MACOSX/data/{file.name}", b"\x00not json")
            archive.writestr(f"data/{file.stem}_e.jsonl", "{}")
    assert [task.settings() for task in load(str(tmp_path / "data.zip"))] == expected

    def download(repo: str, file: str, *, repo_type: str) -> str:
        assert (repo, file, repo_type) == ("THUDM/LongBench", "data.zip", "dataset")
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert [task.settings() for task in load("THUDM/LongBench")] == expected


def test_repeated_ids_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, "lcc", [row("lcc", 0), row("lcc", 1), row("lcc", 0), row("lcc", 0)])
    (task,) = load(str(tmp_path), ["lcc"])
    assert [example.id for example in task.examples()] == ["lcc-0", "lcc-1", "lcc-0#2", "lcc-0#3"]


@pytest.mark.parametrize("field", row("trec"))
def test_a_missing_field_is_named_with_file_and_line(
    tmp_path: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = row("trec", 1)
    del wrong[field]
    file = write(tmp_path, "trec", [row("trec", 0), wrong])
    missing = rf"trec\.jsonl:2: field '{field}' is missing, there are .*"
    if field in ("input", "context", "answers"):
        with pytest.raises(DataError, match=missing):
            load(str(tmp_path), ["trec"])
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(file, "data/trec.jsonl")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(tmp_path / "data.zip"))
    with pytest.raises(DataError, match=missing):  # a published row has every field
        load("THUDM/LongBench", ["trec"])


def test_rows_of_ones_own_need_a_question_a_context_and_answers(tmp_path: Path) -> None:
    short = {"input": "Who?", "context": "A long story.", "answers": ["Ann", "Anna"]}
    write(tmp_path, "qasper", [short, short | {"length": 9, "_id": "mine"}])
    (rows,) = read_tasks(str(tmp_path), ("qasper",)).values()
    assert [one.id for one in rows] == ["qasper-1", "mine"]
    made = {"length": 6, "dataset": "qasper", "language": "en", "all_classes": None, "_id": "qasper-1"}
    assert rows[0].fields == short | made and rows[1].fields["length"] == 9
    assert "2 ids of qasper that are not of the published form" in unlike_published("qasper", rows)
    write(tmp_path, "trec", [short])
    with pytest.raises(DataError, match="trec needs the list of all classes"):
        load(str(tmp_path), ["trec"])


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("qasper", {"answers": "yes"}, r"qasper\.jsonl:1: field 'answers' is a str; it must be list"),
        ("qasper", {"answers": []}, r"qasper/qasper\.jsonl:1: field 'answers' is an empty list"),
        ("qasper", {"answers": [7]}, "field 'answers' holds 7; it must hold strings alone"),
        ("qasper", {"context": None}, "field 'context' is a NoneType; it must be str"),
        ("qasper", {"length": True}, "field 'length' is a bool; it must be int"),
        ("qasper", {"all_classes": "x"}, "field 'all_classes' is a str; it must be list or null"),
        ("qasper", {"dataset": "hotpotqa"}, "field 'dataset' is 'hotpotqa'; in a file of qasper it must be"),
        ("qasper", {"language": "zh"}, "field 'language' is 'zh'; of qasper it must be 'en'"),
        ("trec", {"all_classes": None}, "trec needs the list of all classes"),
        ("passage_retrieval_en", {"answers": ["7"]}, "answer '7' must hold e.g. 'Paragraph 7'"),
    ],
)
def test_a_wrong_field_is_an_error(tmp_path: Path, name: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        one(tmp_path, name, **changed)


def test_what_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "qasper", [row("qasper")])
    with pytest.raises(DataError, match=r"has no lcc\.jsonl, it has qasper\.jsonl"):
        load(str(tmp_path), ["qasper", "lcc"])
    with pytest.raises(ConfigError, match="no folder, no zip file and no Hub id"):
        load(str(file), ["qasper"])
    with pytest.raises(ConfigError, match="no folder"):
        load(str(tmp_path / "nowhere"), ["qasper"])
    file.write_text("{}\n{", encoding="utf-8")
    with pytest.raises(DataError, match="field 'input' is missing, there are none"):
        load(str(tmp_path), ["qasper"])
    file.write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="has no example"):
        load(str(tmp_path), ["qasper"])

    def offline(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(
        DataError, match=r"data\.zip of data set someone/longbench could not be .*\(no network\)"
    ):
        load("someone/longbench", ["qasper"])


def test_rows_of_a_copy_are_recognised_by_what_is_published_of_them(tmp_path: Path) -> None:
    answers = [["Paragraph 7"], ["Paragraph  11"], ["other"]]
    rows = [
        Example(f"{n:048x}", row("lcc", n, answers=some, context="word " * 9, _id=f"{n:048x}"))
        for n, some in enumerate(answers)
    ]
    known = [answer_mark("lcc", some) for some in (["Paragraph 7"], ["Paragraph 11"])]
    facts = {"answers": {"lcc": known}, "mean_words": {"lcc": 12}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "DATA", facts)
        assert unlike_published("lcc", rows) == []
        patch.setitem(facts["mean_words"], "lcc", 20)
        assert unlike_published("lcc", rows) == ["examples of lcc have 12 words on average, published 20"]
        patch.setitem(facts["mean_words"], "lcc", 12)
        strange = [*rows[:2], Example("x", {**rows[2].fields, "_id": "x"})]
        assert unlike_published("lcc", strange) == ["1 ids of lcc that are not of the published form"]
        assert unlike_published("lcc", rows[1:]) == ["1 published examples of lcc are missing"]
    assert {name: len(some) > 3 for name, some in files.DATA["answers"].items()} == dict.fromkeys(NAMES, True)
    assert set(files.DATA["mean_words"]) == set(NAMES)
