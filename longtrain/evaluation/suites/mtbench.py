"""MT-Bench: 80 questions of two turns in 8 categories, rated by a judge model.

Source: Zheng et al., 2306.05685; FastChat, fastchat/llm_judge: gen_model_answer.py, common.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from longtrain.data.read.files import PACKED_SUFFIXES, read_jsonl
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.judge.client import judge_settings
from longtrain.evaluation.judge.marker import JudgeMarker, marker_from, marks_of
from longtrain.evaluation.judge.naming import judged_summary, judging, own_judging
from longtrain.evaluation.judge.prompts import mt_bench_prompts
from longtrain.evaluation.judge.rubrics import HIGHEST_RATING, MtBenchRubric, mt_bench_figures
from longtrain.evaluation.prompts import Encoded, encode_chat
from longtrain.evaluation.published import Published, narrowed
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Scale, Suite, Summary
from longtrain.evaluation.suites.shared import check_fields, existing_file, read_rows, settings_of
from longtrain.evaluation.task import Example, Task
from longtrain.settings import Count, Text, within

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

TEMPERATURES = {
    "writing": 0.7,
    "roleplay": 0.7,
    "extraction": 0.0,
    "math": 0.0,
    "coding": 0.0,
    "reasoning": 0.0,
    "stem": 0.1,
    "humanities": 0.1,
}
"""Category -> temperature of its answers; 0.7 where the benchmark has none."""

NAME = "mt_bench"
PUBLISHED = Published(
    "MT-Bench",
    tasks={NAME: 80},
    sha256={NAME: "a557e3ba9d6ec240"},
    settings={
        "temperature": None,
        "max_new_tokens": 1024,
        "chat": True,
        "judge.temperature": 0.0,
        "judge.max_tokens": 2048,
        "judge.tries": 1,
    },
    sampled=narrowed,
)
"""The hash is that of FastChat's question.jsonl."""
REFERENCES_SHA256 = "6bf4df98dfa8a105"
"""`references_sha256` of its reference_answer/gpt-4.jsonl, see `MtBenchRubric`."""

FIELDS: dict[str, tuple[type, ...]] = {"question_id": (int, str), "category": (str,), "turns": (list,)}


class MtBenchTask(Task):
    """The questions; the second turn is asked with the first one's answer before it."""

    def prompt(self, example: Example) -> str:
        """The first turn."""
        return str(example.fields["turns"][0])

    def encode(
        self,
        example: Example,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        answers: Sequence[str] = (),
    ) -> Encoded:
        """The conversation so far; if it is too long, the middle of its longest message is left out.

        Answers stand there without the space around them, as the benchmark's runner puts them. `max_tokens`
        is for what is asked; each earlier answer may take `max_new_tokens` beside it.

        Raises:
            ConfigError: no chat template, or `max_tokens` is too few for any conversation.
        """
        most = max_tokens + len(answers) * self.max_new_tokens
        turns = [str(turn) for turn in example.fields["turns"]][: len(answers) + 1]
        texts = [turns[0]]
        for answer, question in zip(answers, turns[1:], strict=True):
            texts += [answer.strip(), question]
        ids = self._ids(tokenizer, texts)
        if len(ids) <= most:
            return Encoded(ids)
        tokens: list[Any] = [
            tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text in texts
        ]
        longest = max(range(len(texts)), key=lambda i: len(tokens[i]))
        for left in range(len(tokens[longest]) - (len(ids) - most), 1, -1):
            half = left // 2  # a text joined anew may take a token more; then one less is kept
            parts = tokens[longest][:half], tokens[longest][-half:]
            texts[longest] = "".join(str(tokenizer.decode(part, skip_special_tokens=True)) for part in parts)
            ids = self._ids(tokenizer, texts)
            if len(ids) <= most:
                return Encoded(ids, cut=True)
        raise ConfigError(
            f"question {example.id} of MT-Bench does not fit into {most} tokens; allowed: fewer "
            "suite.max_new_tokens, or a target with a longer context"
        )

    def _ids(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> tuple[int, ...]:
        if self.chat:
            roles = ("user", "assistant")
            return encode_chat(
                tokenizer, [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
            )
        names = ("### User:", "### Assistant:")
        text = "".join(f"{names[i % 2]}\n{text}\n\n" for i, text in enumerate(texts))
        ids: Any = tokenizer(f"{text}{names[1]}\n", verbose=False).input_ids
        return tuple(ids)


@dataclass(frozen=True)
class MtBenchSettings:
    """The keys of conf/suite/mtbench.yaml that are this suite's own."""

    data: Text | None
    references: Text | None
    limit: Count | None
    chat: bool
    temperature: Annotated[float, within(0, 2)] | None
    max_new_tokens: Count
    judge: Mapping[str, Any]


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The questions at `suite.data`, judged where `suite.judge` names a judge.

    Raises:
        ConfigError: a wrong setting, or no questions.
        DataError: a wrong row, or a judge is set and a question's reference answer is missing.
    """
    own = settings_of(MtBenchSettings, settings)
    judge = judge_settings(own.judge)
    rows, references = _read(own)
    task = MtBenchTask(
        NAME,
        rows[: own.limit],
        template="{turns}",
        max_new_tokens=own.max_new_tokens,
        metric="judge",
        judge=None,
        chat=own.chat,
        n_turns=2,
        facets_of=lambda row: {"category": str(row.fields["category"])},
        expected=lambda row: references.get(row.id, ()),
        temperature_of=lambda row: (
            TEMPERATURES.get(row.fields["category"], 0.7) if own.temperature is None else own.temperature
        ),
    )
    marker = marker_from(judge, lambda: MtBenchRubric(mt_bench_prompts(judge.prompts), references))
    departures = PUBLISHED.departures({NAME: task.rows}, vars(own) | judging(marker), sampling)
    if marker is not None:
        for row in task.rows:
            marker.rubric.questions(row, ("", ""))  # a reference answer that is missing is told now
        if marker.settings()["references_sha256"] != REFERENCES_SHA256:
            departures.append("reference answers that are not the published ones")
    return Suite(
        "mtbench",
        (task,),
        Scale("rating", HIGHEST_RATING),
        summarise=lambda records: _summary(records.get(NAME, ()), marker),
        title=PUBLISHED.title,
        departures=[*departures, *own_judging(marker)],
        marker=marker,
    )


def _summary(records: Sequence[Record], marker: JudgeMarker | None) -> Summary:
    ratings = [[float(mark["rating"]) if mark else None for mark in marks_of(record)] for record in records]
    found = mt_bench_figures(
        [(str(record.facets["category"]), some) for record, some in zip(records, ratings, strict=True)]
    )
    table = {
        "title": "Mean rating by turn, 1 to 10",
        "columns": {"all ratings": found["score"], **found["turns"]},
    }
    extra = {} if marker is None else {"mt_bench": found, "table": table}
    return judged_summary(NAME, records, marker, score=found["score"], extra=extra, of="ratings")


def _read(own: MtBenchSettings) -> tuple[tuple[Example, ...], dict[str, tuple[str, ...]]]:
    """The questions and the reference answers."""
    data, references = own.data, own.references
    if data is None:
        raise ConfigError(
            "suite mtbench needs its questions; pass suite.data=FOLDER with question.jsonl and "
            "reference_answer/gpt-4.jsonl (FastChat's fastchat/llm_judge/data/mt_bench), or "
            "suite.data=FILE and suite.references=FILE"
        )
    folder = Path(data).expanduser()
    if folder.is_dir():
        data = str(_packed(folder / "question.jsonl"))
        beside = _packed(folder / "reference_answer" / "gpt-4.jsonl")
        references = references or (str(beside) if beside.is_file() else None)
    rows = []
    for number, row in enumerate(read_rows(data, "MT-Bench", FIELDS), 1):
        turns = row["turns"]
        if len(turns) != 2 or not all(isinstance(turn, str) and turn for turn in turns):
            raise DataError(
                f"{Path(data).name}: row {number}: field 'turns' must hold two texts, it is {turns!r}"
            )
        rows.append(Example(str(row["question_id"]), {key: row[key] for key in FIELDS}))
    return tuple(rows), _references(references) if references else {}


def _references(where: str) -> dict[str, tuple[str, ...]]:
    """Question id -> the reference answers of its turns."""
    found: dict[str, tuple[str, ...]] = {}
    for place, row in read_jsonl(existing_file(where, "reference answers of MT-Bench")):
        check_fields(
            row, place, "MT-Bench's reference answers", {"question_id": (int, str), "choices": (list,)}
        )
        try:
            turns = tuple(row["choices"][0]["turns"])
        except (IndexError, KeyError, TypeError):
            turns = ()
        if len(turns) != 2 or not all(isinstance(turn, str) for turn in turns):
            raise DataError(f"{place}: field 'choices' must hold two texts at [0]['turns']")
        found[str(row["question_id"])] = turns
    return found


def _packed(path: Path) -> Path:
    """A file as it is, or the same with .xz or .gz behind it."""
    names = [path.with_name(path.name + packed) for packed in PACKED_SUFFIXES]
    return next((name for name in names if name.is_file()), path)
