"""Prompts to the letter, and figures as FastChat and LongWriter compute them."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pandas as pd
import pytest

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.judge import rubrics
from longtrain.evaluation.judge.prompts import longbench_write_prompts, mt_bench_prompts
from longtrain.evaluation.task import Example

PUBLISHED = {
    "single-v1": ("75357d685f238b6a", "0935c7ff79f38d3f"),
    "single-math-v1": ("75357d685f238b6a", "8e11dbbf609a3d6f"),
    "single-v1-multi-turn": ("d1e77aa107f02dd8", "33067cf18206b4ab"),
    "single-math-v1-multi-turn": ("4b8fe8086dbdf4a8", "6a2b8ad2961c275c"),
}
"""First digits of the SHA-256 of FastChat's `system_prompt` and `prompt_template`."""

MT_BENCH = mt_bench_prompts().texts
LONGBENCH_WRITE = longbench_write_prompts().texts["judge"][1]

WRITING = Example("81", {"question_id": 81, "category": "writing", "turns": ["Compose {a}.", "Again."]})
MATHS = Example("111", {"question_id": 111, "category": "math", "turns": ["2+2?", "And +1?"]})


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_prompts_are_the_published_ones() -> None:
    assert {name: (sha(a), sha(b)) for name, (a, b) in MT_BENCH.items()} == PUBLISHED
    assert sha(LONGBENCH_WRITE) == "2c423ce88a0eb6a6"  # of LongWriter's judge.txt
    assert mt_bench_prompts().official
    assert longbench_write_prompts().official


def prompt_file(folder: Path, **changed: str) -> Path:
    rows = [
        {
            "name": name,
            "system_prompt": system,
            "prompt_template": changed.get(name, template),
            "type": "single",
        }
        for name, (system, template) in MT_BENCH.items()
    ]
    path = folder / "judge_prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"name": "pair-v2"}, *rows]))
    return path


def test_prompts_from_a_file(tmp_path: Path) -> None:
    same = mt_bench_prompts(str(prompt_file(tmp_path)))
    assert same.official
    assert same.sha256 == mt_bench_prompts().sha256
    own = mt_bench_prompts(str(prompt_file(tmp_path, **{"single-v1": "{question} {answer} [[rating]]"})))
    assert not own.official
    assert own.sha256 != same.sha256
    assert own.source == "judge_prompts.jsonl"
    text = tmp_path / "judge.txt"
    text.write_text("Mark $RESPONSE$ to $INST$")
    assert longbench_write_prompts(str(text)).facts() == {
        "sha256": longbench_write_prompts(str(text)).sha256,
        "official": False,
        "source": "judge.txt",
    }
    text.write_text(LONGBENCH_WRITE)
    assert longbench_write_prompts(str(text)).official


def test_wrong_prompt_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"suite\.judge\.prompts=nowhere is no file"):
        mt_bench_prompts("nowhere")
    with pytest.raises(
        DataError, match=r"jsonl: prompt single-v1 has the places question; it needs answer, question"
    ):
        mt_bench_prompts(str(prompt_file(tmp_path, **{"single-v1": "{question}"})))
    with pytest.raises(DataError, match=r"a brace is written \{\{"):
        mt_bench_prompts(str(prompt_file(tmp_path, **{"single-v1": "{question} {answer} {"})))
    (tmp_path / "none.jsonl").write_text('{"name": "pair-v2"}\n')
    with pytest.raises(DataError, match=r"no prompt single-v1; it needs single-v1, single-math-v1"):
        mt_bench_prompts(str(tmp_path / "none.jsonl"))
    (tmp_path / "judge.txt").write_text("$INST$")
    with pytest.raises(DataError, match=r"lacks \$RESPONSE\$"):
        longbench_write_prompts(str(tmp_path / "judge.txt"))


def test_mt_bench_questions() -> None:
    rubric = rubrics.MtBenchRubric(mt_bench_prompts(), {"111": ("4", "5")})
    first, second = rubric.questions(WRITING, [" An {b}. \n", "More."])
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert first.messages[0]["content"] == "You are a helpful assistant."
    assert first.messages[1]["content"].endswith(
        "[Question]\nCompose {a}.\n\n"
        "[The Start of Assistant's Answer]\nAn {b}.\n[The End of Assistant's Answer]"
    )
    assert "More." not in first.messages[1]["content"]
    assert second.messages[1]["content"] == (
        "<|The Start of Assistant A's Conversation with User|>\n\n### User:\nCompose {a}.\n\n"
        "### Assistant A:\nAn {b}.\n\n### User:\nAgain.\n\n### Assistant A:\nMore.\n\n"
        "<|The End of Assistant A's Conversation with User|>"
    )
    assert first.key != second.key
    one, two = rubric.questions(MATHS, ["5", "6"])
    assert "[The Start of Reference Answer]\n4\n[The End" in one.messages[1]["content"]
    assert (
        "### Reference answer:\n4\n\n### User:\nAnd +1?\n\n### Reference answer:\n5"
        in two.messages[1]["content"]
    )
    with pytest.raises(DataError, match=r"question 111 \(math\).*suite\.references=FILE"):
        rubrics.MtBenchRubric(mt_bench_prompts(), {}).questions(MATHS, ["5", "6"])


@pytest.mark.parametrize(
    ("reply", "rating"),
    [
        ("Good. Rating: [[7]]", 7.0),
        ("[[6.5]] or [[9]]", 6.5),
        ("[[3.]]", 3.0),
        ("as in [1], I say [[10]]", 10.0),
        ("Rating: [8]", 8.0),  # the second choice of FastChat
        ("[[0]]", 0.0),
        ("[[007]]", 7.0),
        ("[[11]]", None),
        ("[[7/10]]", None),
        ("Rating: 7", None),
        ("[[rating]]", None),
        ("[[-3]]", None),
        ("[[٣]]", None),
        ("", None),
        ("<think>[[2]] hm, no</think>\nRating: [[9]]", 9.0),
        ("<think>[[2]] hm", None),
    ],
)
def test_ratings(reply: str, rating: float | None) -> None:
    mark = rubrics.MtBenchRubric(mt_bench_prompts(), {}).parse(reply)
    assert mark == (None if rating is None else {"rating": rating})


def test_mt_bench_figures_are_those_of_fastchat() -> None:
    """FastChat: a rating that could not be had is -1 and left out; means over the rest, also by turn."""
    rng = random.Random(1)
    ratings: list[tuple[str, list[float | None]]] = [
        (rng.choice(["writing", "math"]), [rng.choice([None, 1.0, 4.5, 7.0, 10.0]) for _ in range(2)])
        for _ in range(80)
    ]
    rows = [
        {"category": category, "turn": turn, "score": -1 if rating is None else rating}
        for category, turns in ratings
        for turn, rating in enumerate(turns, 1)
    ]
    frame = pd.DataFrame(rows)
    frame = frame[frame["score"] != -1]
    found = rubrics.mt_bench_figures(ratings)
    assert found["score"] == pytest.approx(frame["score"].mean())
    assert found["ratings"] == len(frame)
    for turn, mean in frame.groupby("turn")["score"].mean().items():
        assert found["turns"][f"turn {turn}"] == pytest.approx(mean)
    for category, mean in frame.groupby("category")["score"].mean().items():
        assert found["categories"][category] == pytest.approx(mean)
    assert rubrics.mt_bench_figures([("math", [None, None])])["score"] is None


def test_mt_bench_score_of_an_example() -> None:
    rubric = rubrics.MtBenchRubric(mt_bench_prompts(), {})
    assert rubric.score(WRITING, [], [{"rating": 7.0}, {"rating": 4.0}]) == pytest.approx(0.55)
    assert rubric.score(WRITING, [], [{"rating": 7.0}, None]) == pytest.approx(0.7)
    assert rubric.score(WRITING, [], [None, None]) is None


GOOD = {name: 4 for name in rubrics.DIMENSIONS}
REQUEST = Example("1", {"prompt": "Write $RESPONSE$ in 4 words", "type": "x", "length": 4})


@pytest.mark.parametrize(
    ("reply", "good"),
    [
        (json.dumps({"Analysis": "fine", **GOOD}), True),
        (json.dumps(GOOD, indent=2), True),
        (f"Here it is:\n```json\n{json.dumps(GOOD, indent=1)}\n```\nDone.", True),
        ('{"Analysis": "two\nlines", ' + json.dumps(GOOD)[1:], True),  # line breaks go before JSON is read
        (json.dumps({**GOOD, "Clarity": "4"}), True),  # float("4") in the official reader
        ("<think>{}</think>" + json.dumps(GOOD), True),
        (f"Here it is: {json.dumps(GOOD)}", False),
        (f"```\n{json.dumps(GOOD)}\n```", False),
        (f"```json{json.dumps(GOOD)}```", False),
        (json.dumps({**GOOD, "Clarity": None}), False),
        (json.dumps({**GOOD, "Clarity": True}), False),
        (json.dumps({**GOOD, "Clarity": 0}), False),
        (json.dumps({**GOOD, "Clarity": 6}), False),
        (json.dumps({**GOOD, "Clarity": "4/5"}), False),
        (json.dumps({**GOOD, "Clarity": [4]}), False),
        (json.dumps(GOOD).replace("4", "NaN", 1), False),
        (json.dumps({k: v for k, v in GOOD.items() if k != "Accuracy"}), False),
        (json.dumps(GOOD)[:-3], False),
        ("[4, 4, 4, 4, 4, 4]", False),
        ("[" * 100_000, False),
        ("null", False),
        ("", False),
    ],
)
def test_marks(reply: str, good: bool) -> None:
    mark = rubrics.LongWriteRubric(longbench_write_prompts()).parse(reply)
    assert mark == ({name: 4.0 for name in rubrics.DIMENSIONS} if good else None)


@pytest.mark.parametrize(
    ("reply", "tries"),
    [
        ("not JSON", 1),
        ("null", 1),
        ("5", 1),
        ("[4, 4, 4]", 2),
        ("{}", 2),
        (json.dumps({k: v for k, v in GOOD.items() if k != "Relevance"}), 2),
        (json.dumps({k: v for k, v in GOOD.items() if k != "Breadth and Depth"}), 2),
        (json.dumps({k: v for k, v in GOOD.items() if k != "Reading Experience"}), 1),
        (json.dumps({k: v for k, v in GOOD.items() if k not in ("Clarity", "Reading Experience")}), 2),
    ],
)
def test_tries_are_those_of_the_official_loop(reply: str, tries: int) -> None:
    def official() -> int:
        """THUDM/LongWriter, eval_quality.py, `process_data`: one turn of its loop."""
        tries = 0
        try:
            scores = json.loads(reply.replace("\n", ""))
            for dim in rubrics.DIMENSIONS:
                if dim not in scores:
                    scores = None
                    tries += 1
        except Exception:
            tries += 1
        return tries

    assert rubrics.LongWriteRubric(longbench_write_prompts()).tries_of(reply) == tries == official()


def test_longbench_write_question() -> None:
    (question,) = rubrics.LongWriteRubric(longbench_write_prompts()).questions(REQUEST, ["My $INST$ text"])
    (message,) = question.messages
    assert message["role"] == "user"
    # one replacement after the other, as in the official runner: the request's own mark is filled as well
    assert "<User Request>\n\nWrite My $INST$ text in 4 words\n\n</User Request>" in message["content"]
    assert "<Response>\n\nMy $INST$ text\n\n</Response>" in message["content"]


@pytest.mark.parametrize(
    ("wanted", "written", "score"),
    [
        (100, 100, 100),
        (100, 50, 50),
        (100, 250, 50),
        (100, 400, 0),
        (300, 100, 0),
        (100, 0, 0),
        (100, 9999, 0),
    ],
)
def test_length_scores(wanted: int, written: int, score: float) -> None:
    assert rubrics.length_score(wanted, written) == pytest.approx(score)


def test_words() -> None:
    assert rubrics.count_words("Don't stop: 12 apples, naïve 中文 x_y") == 6  # Don t stop apples 中 文
    assert rubrics.count_words("") == 0


def test_longbench_write_figures() -> None:
    low, high = {name: 2.0 for name in rubrics.DIMENSIONS}, {name: 4.0 for name in rubrics.DIMENSIONS}
    high["Clarity"] = 5.0
    found = rubrics.long_write_figures([low, None, high], [(100, 100), (100, 50), (100, 400)])
    assert found["dimensions"]["Clarity"] == 3.5
    assert found["dimensions"]["Relevance"] == 3.0
    assert found["dimensions_mean"] == pytest.approx((5 * 3.0 + 3.5) / 6)
    assert found["quality"] == pytest.approx((5 * 50.0 + 62.5) / 6)
    assert found["length"] == pytest.approx(50.0)
    assert found["score"] == pytest.approx((found["quality"] + 50.0) / 2)
    assert (found["marked"], found["words"]) == (2, 550 / 3)
    none = rubrics.long_write_figures([None], [(100, 100)])
    assert (none["score"], none["quality"], none["dimensions"], none["length"]) == (None, None, None, 100.0)


def test_score_of_a_text() -> None:
    rubric = rubrics.LongWriteRubric(longbench_write_prompts())
    marks = {name: 4.0 for name in rubrics.DIMENSIONS}
    assert rubric.score(REQUEST, ["two words"], [marks]) == pytest.approx((75 + 50) / 200)
    assert rubric.score(REQUEST, ["two words"], [None]) is None


def test_thoughts() -> None:
    assert rubrics.without_thoughts("a <think>b</think> c") == "a <think>b</think> c"  # only in front
    assert rubrics.without_thoughts("\n<think>b\n</think>c</think>") == "c</think>"
