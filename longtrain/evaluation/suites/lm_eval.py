"""Suite `lm_eval`: tasks of lm-evaluation-harness run on our systems, with lm-eval's own prompts and metrics.

lm-eval creates the requests; they are run here like examples of any other suite; the answers go back
to lm-eval, which computes the scores. The context of a likelihood request is prefilled into the system's
cache, and evicted or quantised there, before its continuation is scored.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError
from longtrain.evaluation import lm_harness, perplexity
from longtrain.evaluation.prompts import Encoded
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import DRAFT, EVICTOR, SELECTOR, ByTask, Suite, Summary
from longtrain.evaluation.suites.shared import settings_of
from longtrain.evaluation.task import Example, Measured, Task, rows_sha256
from longtrain.settings import Count, CountOrZero, Text, wrong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longtrain.decoding.roles import Parts
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

TITLE = "lm-evaluation-harness"


@dataclass(frozen=True)
class LmEvalSettings:
    """The keys of the suite; see conf/suite/lm_eval.yaml."""

    tasks: tuple[Text, ...]
    include: Text | None = None
    fewshot: CountOrZero | None = None
    limit: Count | None = None
    chat: bool = False

    def __post_init__(self) -> None:
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise wrong("suite.tasks", list(self.tasks), "different tasks of lm-eval, such as [gsm8k,ifeval]")


@dataclass(frozen=True, eq=False)
class GenerationRequests(Task):
    """The requests of a generation task. An example is one request, or one of its repeats.

    Args:
        library: lm-eval's task object.
        model: the adapter that encodes prompts.
    """

    library: Any = field(kw_only=True, repr=False)
    model: Any = field(kw_only=True, repr=False)

    def encode(self, example: Example, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> Encoded:
        """Encode a prompt exactly as lm-eval does; one that is too long loses its beginning."""
        ids = self.model.tok_encode(example.fields["prompt"])
        return Encoded(tuple(ids[-max_tokens:]), len(ids) > max_tokens)

    def answer(self, text: str) -> str:
        """Cut a generated text at the stop strings, as lm-eval does."""
        return lm_harness.cut_answer(text, self.stop_strings)

    def score(self, text: str, example: Example) -> float | None:
        """The document's value of the task's first metric; None if the document has several requests."""
        if not example.fields["alone"]:
            return None
        request = self.library.instances[example.fields["request"]]
        return lm_harness.score(self.library, [request], [self.answer(text)])


@dataclass(frozen=True, eq=False)
class LikelihoodRequests(Measured):
    """The requests of a task that scores given text. An example is a document with all its requests.

    Args:
        name: the task's name.
        rows: the examples, one per document.
        library: lm-eval's task object.
        model: the adapter that encodes requests.
        protocol: JSON values that determine the scores.
    """

    name: str
    rows: tuple[Example, ...]
    library: Any = field(repr=False)
    model: Any = field(repr=False)
    protocol: Mapping[str, Any] = field(default_factory=dict)

    def size(self, example: Example) -> int:
        """Number of characters of all requests."""
        return len(json.dumps(example.fields["requests"]))

    def settings(self) -> dict[str, Any]:
        """See `Measured`."""
        rows = {"rows": len(self.rows), "rows_sha256": rows_sha256(self.rows)}
        return {"task": self.name, "protocol": dict(self.protocol), **rows}

    def measure(self, target: Target, parts: Parts, examples: Sequence[Example]) -> list[dict[str, float]]:
        """Request i of a document gives `loglikelihood_i` and `greedy_i`; cache sizes are means over
        contexts.
        """
        places, contexts, scored = [], [], []
        for number, example in enumerate(examples):
            for at, request in enumerate(example.fields["requests"]):
                for context, continuation in self.model.pairs(self.library.instances[request["request"]]):
                    places.append((number, at))
                    contexts.append(context[-(self.model.window - len(continuation)) :])
                    scored.append(continuation)
        found: list[dict[str, float]] = [defaultdict(float) for _ in examples]
        for first in range(0, len(places), len(examples)):
            some = slice(first, first + len(examples))
            for (number, at), one, context in zip(
                places[some],
                perplexity.measure(target, parts, contexts[some], scored=scored[some]),
                contexts[some],
                strict=True,
            ):
                share = 1 / sum(place[0] == number for place in places)
                measures = found[number]
                measures[f"loglikelihood_{at}"] -= one.nats
                greedy = one.likeliest == one.tokens
                measures[f"greedy_{at}"] = greedy and measures.get(f"greedy_{at}", True)
                measures["context_tokens"] += len(context) * share
                measures["kept_entries"] += one.kept_entries * share
        return [dict(measures) for measures in found]

    def answers(self, measures: Mapping[str, float], example: Example) -> list[Any]:
        """The answers to each request of a document, in lm-eval's form."""
        found = [
            (measures[f"loglikelihood_{at}"], bool(measures[f"greedy_{at}"]))
            for at in range(len(example.fields["requests"]))
        ]
        return [one[0] for one in found] if example.fields["rolling"] else found

    def score(self, measures: Mapping[str, float], example: Example) -> float | None:
        """The document's value of the task's first metric."""
        requests = [self.library.instances[one["request"]] for one in example.fields["requests"]]
        return lm_harness.score(self.library, requests, self.answers(measures, example))


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """One task for each lm-eval task that `suite.tasks` names, with groups expanded.

    Few-shot examples are drawn with lm-eval's own seeds. A task's own temperature overrides the run's, and
    lm-eval's default is greedy.

    Raises:
        ConfigError: a wrong setting, or a task that does not exist or cannot run.
        DataError: the data of a task cannot be read.
    """
    options = settings_of(LmEvalSettings, settings)
    model = lm_harness.RecordedModel(target)
    library = lm_harness.load(
        options.tasks,
        model,
        include=options.include,
        fewshot=options.fewshot,
        limit=options.limit,
        chat=options.chat,
    )
    tasks = tuple(_task(name, task, model, options) for name, task in library.tasks.items())
    notes = [f"{TITLE} {lm_harness.VERSION}"]
    if options.fewshot is not None:
        notes.append(f"{options.fewshot} solved examples in a prompt, where the task does not forbid them")
    if options.chat:
        notes.append("requests in the chat template")
    notes += [f"{name}: {','.join(lm_harness.main_metric(task))}" for name, task in library.tasks.items()]

    def summarise(records: ByTask) -> Summary:
        answers: dict[Any, list[Any]] = defaultdict(list)
        for task in tasks:
            for key, answer in _answers(task, records.get(task.name, ())):
                answers[key].append(answer)
        requests = [one for task in library.tasks.values() for one in task.instances]
        if any(len(answers[lm_harness.key_of(one)]) < (one.repeats or 1) for one in requests):
            return Summary()
        found = library.aggregate(lm_harness.RecordedModel(target, answers))
        metrics = {}
        for name, task in library.tasks.items():
            value = found["results"][name].get(",".join(lm_harness.main_metric(task)))
            scored = any(record.score is not None for record in records[name])
            if isinstance(value, int | float):
                metrics[name] = round(100 * value, 2) if scored else round(float(value), 4)
        return Summary(tasks=metrics, extra={"lm_eval": found})

    generates = any(isinstance(task, Task) for task in tasks)
    needs = frozenset({EVICTOR, DRAFT, SELECTOR} if generates else {EVICTOR})
    limit = [] if options.limit is None else [f"the first {options.limit} documents of each task"]
    return Suite(
        "lm_eval",
        tasks,
        summarise=summarise,
        title=TITLE,
        departures=limit,
        notes=notes,
        cuts=True,
        needs=needs,
    )


def _task(name: str, task: Any, model: Any, options: LmEvalSettings) -> Task | Measured:
    """Convert an lm-eval task to a `Task` or `Measured`."""
    kinds = {request.request_type for request in task.instances}
    if len(kinds) != 1:
        raise ConfigError(
            f"suite.tasks: {name} has requests of {len(kinds)} kinds ({', '.join(sorted(kinds))}), which "
            "suite=lm_eval cannot run; leave it out"
        )
    protocol = {
        "lm_eval": lm_harness.VERSION,
        "task_version": task.VERSION,
        "metrics": list(task.aggregation()),
        "filters": [one.name for one in task._filters],
        "chat": options.chat,
    }
    numbered = list(enumerate(task.instances))
    documents: dict[int, list[tuple[int, Any]]] = defaultdict(list)
    for number, request in numbered:
        documents[request.doc_id].append((number, request))
    if kinds != {lm_harness.GENERATE}:
        rows = tuple(
            Example(
                str(document),
                {
                    "rolling": kinds == {lm_harness.ROLLING},
                    "requests": [{"request": number, "texts": list(one.args)} for number, one in some],
                },
            )
            for document, some in documents.items()
        )
        return LikelihoodRequests(name, rows, task, model, protocol)
    how = lm_harness.generation_of(task)
    room = model.window - int(how["max_gen_toks"])
    if room < 2:
        raise ConfigError(
            f"suite.tasks: {name} answers with up to {how['max_gen_toks']} tokens, which leaves no prompt in "
            f"the target's window of {model.window}; take a target with a longer window"
        )
    rows = tuple(
        Example(
            f"{one.doc_id}.{one.idx}.{repeat}",
            {
                "request": number,
                "prompt": one.args[0],
                "temperature": float(how.get("temperature") or 0.0),
                "alone": len(documents[one.doc_id]) == 1 and (one.repeats or 1) == 1,
            },
        )
        for number, one in numbered
        for repeat in range(one.repeats or 1)
    )
    return GenerationRequests(
        name,
        rows,
        "{prompt}",
        int(how["max_gen_toks"]),
        protocol["metrics"][0],
        None,
        chat=False,
        stop_strings=tuple(text for text in how["until"] if text),
        max_prompt_tokens=room,
        protocol=protocol,
        expected=lambda row: [str(task.doc_to_target(task.instances[row.fields["request"]].doc))],
        temperature=float(how.get("temperature") or 0.0),
        library=task,
        model=model,
    )


def _answers(task: Any, records: Sequence[Record]) -> list[tuple[Any, Any]]:
    """Each request's key with its answer, repeats in order."""
    known, found = {record.example: record for record in records}, []
    for row in task.rows:
        if (record := known.get(row.id)) is None:
            continue
        if isinstance(task, GenerationRequests):
            request = task.library.instances[row.fields["request"]]
            found.append((lm_harness.key_of(request), task.answer(record.texts[-1])))
            continue
        requests = [task.library.instances[one["request"]] for one in row.fields["requests"]]
        answers = task.answers(record.measures or {}, row)
        found += [(lm_harness.key_of(one), answer) for one, answer in zip(requests, answers, strict=True)]
    return found
