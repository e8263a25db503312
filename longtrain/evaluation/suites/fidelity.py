"""Suite `fidelity`: what a cache changes in the full cache's own answers, on any prompts.

The full cache answers each prompt once for all systems. Each system then reads prompt and answer with its own
cache (teacher forcing). The score is the KL divergence of the full cache's distribution from the system's, in
nats per token of the answer. It needs no reference answers and no ability of the target, since what is judged
is the change: evicted, quantised or selected KV entries against all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.data.read.files import BUNDLED, HUB
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.harness.protocol import prompt_room
from longtrain.evaluation.longbench_rows import read_tasks
from longtrain.evaluation.prompt_rows import is_prompts, prompt_rows
from longtrain.evaluation.prompts import Encoded, chat_note, uses_chat
from longtrain.evaluation.records import ids_sha256
from longtrain.evaluation.rollouts import RolloutWriter, Steps
from longtrain.evaluation.suite import DIVERGENCE, Metric, Scale, Suite
from longtrain.evaluation.suites import longbench
from longtrain.evaluation.suites.continuation import choose_points, continuations, held_out
from longtrain.evaluation.suites.generated import REPEATED, Texts
from longtrain.evaluation.suites.shared import prompts_up_to, settings_of
from longtrain.evaluation.task import Example, Facet, Task
from longtrain.settings import Count, Lengths, Text, Tokens, wrong
from longtrain.systems import EVICTOR, SELECTOR, System

if TYPE_CHECKING:
    from longtrain.decoding.roles import Parts
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

METRICS = (
    Metric("agreement", "agreed", "tokens", unit="percent", main=True),
    Metric("same answers", "same", kind="wilson", unit="percent"),
    Metric("tokens until the own answer departs", "own_tokens"),
    Metric("answer tokens", "tokens", kind="mean"),
    REPEATED,
    Metric("entries read", "read_entries", "context_tokens", "mean", "percent"),
    Metric("cache", "cache_bytes", kind="mean", unit="bytes"),
    Metric("full cache", "full_cache_bytes", kind="mean", unit="bytes"),
)


@dataclass(frozen=True)
class FidelitySettings:
    """The keys of the suite; see conf/suite/fidelity.yaml."""

    prompts: tuple[Text, ...]
    data: Text
    lengths: Lengths
    limit: Count | None
    max_prompt_tokens: Count | None
    max_new_tokens: Tokens
    home: str
    against: Text | None = None
    chat: bool | None = None

    def __post_init__(self) -> None:
        if not self.prompts or len(set(self.prompts)) < len(self.prompts):
            raise wrong("suite.prompts", list(self.prompts), "LongBench tasks, files and folders, each once")
        for where in self.prompts:
            known = where in longbench.NAMES or where.startswith((BUNDLED, HUB))
            if not known and not Path(where).expanduser().exists():
                allowed = (
                    f"LongBench's tasks ({', '.join(longbench.NAMES)}), a file of JSON lines, a file or "
                    "folder of text that exists, bundled:heldout"
                )
                raise wrong("suite.prompts", where, allowed)


@dataclass(frozen=True, eq=False)
class OwnAnswers(Texts):
    """Prompts that the full cache answers.

    Args:
        task: the task with these prompts, which is decoded where speed is timed.
        lengths: the length of each prompt as a facet: exact for pieces of text, else rounded up to a power of
            two.
        n_cut: number of prompts whose middle was left out.
    """

    task: Task
    lengths: tuple[int, ...] = ()
    n_cut: int = 0
    _own: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False)
    """Bytes of a system's own kind of cache for a prompt length."""

    @property
    def generating(self) -> Task:
        """See `Measured`."""
        return self.task

    def facets(self, example: Example) -> dict[str, Facet]:
        """The prompt's length."""
        return {"length": self.lengths[example.fields["number"]]}

    def settings(self) -> dict[str, Any]:
        """See `Measured`."""
        return {**super().settings(), "metric": "divergence"}

    def score(self, measures: Mapping[str, float], example: Example) -> float | None:  # type: ignore[override]
        """Always None, since the divergence is a ratio of sums over all prompts."""
        return None

    def measure(self, target: Target, parts: Parts, examples: Sequence[Example]) -> list[dict[str, float]]:
        """`rollouts.Steps.metrics` and what the prompt's KV entries take.

        `same` is 1 if the system would have given the answer itself; `kept_entries`, `read_entries` and
        `context_tokens` count entries of the prompt, mean over KV heads and layers without a window;
        `cache_bytes` and
        `full_cache_bytes` are those of the prompt alone.
        """
        found = self.followed(target, parts, examples)
        return [self._measures(target, parts, *both) for both in zip(found, examples, strict=True)]

    def _measures(self, target: Target, parts: Parts, steps: Steps, example: Example) -> dict[str, float]:
        count = self.size(example)
        info = target.info
        entry = 2 * info.n_kv_heads * info.head_dim * target.dtype.itemsize
        kept = read = steps.kept_entries
        held = entry * info.entries(count, kept=kept)
        if parts.cache is not None:
            held = self._cache_bytes(parts, count, near=entry * info.entries(count, kept=0))
        if parts.selector is not None:
            budget = parts.selector.budget
            dense = len({*budget.dense_layers} & {*info.full_layers}) / len(info.full_layers)
            read = dense * count + (1 - dense) * min(budget.rows, count)
        return {
            **steps.metrics([]),
            "same": float(all(steps.own)),
            "kept_entries": kept,
            "read_entries": read,
            "context_tokens": float(count),
            "cache_bytes": float(held),
            "full_cache_bytes": float(entry * info.entries(count)),
        }

    def _cache_bytes(self, parts: Parts, count: int, *, near: float) -> float:
        """Bytes of an own cache for one prompt, whatever the prompts that are read together.

        Of layers with a window these are the `near` bytes of what later tokens see, as in the full cache.
        """
        from longtrain.cache.layered import LayeredCache

        assert parts.cache is not None
        key = (id(parts.cache), count)
        if key not in self._own:
            cache = parts.cache(1, count, 1)
            self._own[key] = cache.full.bytes() + near if isinstance(cache, LayeredCache) else cache.bytes()
        return self._own[key]


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The tasks of `suite.prompts`: one for each LongBench task and file of prompts, and one for each length
    of running text. The seed determines the pieces of text.

    Raises:
        ConfigError: a wrong setting, or prompts and answers beyond the target's context window.
        DataError: a missing file or field, a prompt that is too long and cannot be cut, or too little text.
    """
    asked = settings_of(FidelitySettings, settings)
    most = target.info.max_positions - 2
    if asked.max_new_tokens > most:
        raise wrong("suite.max_new_tokens", asked.max_new_tokens, f"1 to {most}, the target's window")
    folder = Path(asked.home).expanduser() / "rollouts"
    writer = RolloutWriter(folder, asked.max_new_tokens, sampling, ignore_eos=False)
    given = list(_tasks(asked, target, seed))
    if len({task.name for task in given}) < len(given):
        names = [task.name for task in given]
        raise ConfigError(f"suite.prompts gives the tasks {names}; allowed: files of different names")
    tasks = [_answers(task, target, writer) for task in given]
    how = "greedily" if sampling.greedy else f"at temperature {sampling.temperature:g}"
    notes = [
        f"the full cache answers {how}, up to {asked.max_new_tokens} tokens or to where it ends; each system "
        "reads its answers with its own cache (teacher forcing)",
        "KL: divergence of the full cache's distribution from the system's, in nats, mean over the answer's "
        "tokens; the first is given by the prefill, before anything is evicted, and always agrees",
        *(
            f"{one.n_cut} of {len(one.rows)} prompts of {one.name} cut in the middle"
            for one in tasks
            if one.n_cut
        ),
    ]
    if any(task.chat for task in given):
        notes.append(chat_note(target.require_tokenizer(), asked.chat))
    return Suite(
        "fidelity",
        tuple(tasks),
        scale=Scale(DIVERGENCE, None, higher_is_better=False),
        title="Fidelity to the full cache's own answers",
        notes=notes,
        metrics=METRICS,
        needs=frozenset({EVICTOR, SELECTOR}),
        rivals=lambda systems: against(systems, asked.against),
        meet=lambda suite, systems: _checked(suite, systems, asked.against),
    )


def against(systems: Sequence[System], name: str | None) -> list[tuple[str, str]]:
    """Pairs of each system with the baseline at the same budget.

    Args:
        systems: the systems that ran.
        name: the baseline's name without its budget; None: the first system with a budget.
    """
    baseline = name or next((system.family for system in systems if system.budget), None)
    base = {system.budget: system.name for system in systems if baseline in (system.family, system.name)}
    return [
        (system.name, base[system.budget])
        for system in systems
        if system.budget in base and system.name not in base.values() and system.kind != "full"
    ]


def _checked(suite: Suite, systems: Sequence[System], name: str | None) -> Suite:
    """Refuse a run without a system to judge, or with a baseline that is none of its systems; add notes on
    systems.
    """
    if len(systems) < 2:
        raise ConfigError(
            "suite=fidelity judges what evictors, caches and selectors change and none is given; pass "
            "artifact=NAME, or suite.systems=[snapkv,{cache: int8}]"
        )
    families = list(dict.fromkeys(system.family for system in systems[1:]))
    if name is not None and name not in families:
        raise wrong("suite.against", name, f"{', '.join(families)}, or null for the first with a budget")
    own = list(dict.fromkeys(system.family for system in systems if system.parts.cache is not None))
    note = (
        f"{', '.join(own)}: the bytes of the cache include buffers of a fixed size, which weigh on short "
        "prompts"
    )
    return replace(suite, notes=[*suite.notes, note]) if own else suite


def _tasks(asked: FidelitySettings, target: Target, seed: int) -> Iterator[Task]:
    """The tasks whose prompts are answered, each example of which can be encoded."""
    chat = uses_chat(target.require_tokenizer(), asked.chat)
    for where in asked.prompts:
        if where in longbench.NAMES and not Path(where).exists():
            rows = read_tasks(asked.data, (where,))[where][: asked.limit]
            task = longbench.make_task(where, rows, chat=chat)
            yield _with_room(task, asked, target)
        elif is_prompts(where):
            rows = prompt_rows(where)[: asked.limit]
            task = Task(Path(where).name, rows, "{prompt}", asked.max_new_tokens, "none", None, chat=chat)
            yield _with_room(task, asked, target)
        else:
            yield from _running_text(where, asked, target, seed)


def _with_room(task: Task, asked: FidelitySettings, target: Target) -> Task:
    """A task whose prompts and answers fit the target's window."""
    task = replace(task, max_new_tokens=asked.max_new_tokens)
    return prompts_up_to(asked.max_prompt_tokens, [task], target)[0]


def _running_text(where: str, asked: FidelitySettings, target: Target, seed: int) -> Iterator[Task]:
    """Pieces of text that the full cache continues: the same places at every length."""
    bundled = where.startswith(BUNDLED)
    documents = held_out(target, "bundled" if bundled else where, ())
    count = len(documents) if asked.limit is None else asked.limit
    points = choose_points(documents, longest=asked.lengths[-1], count=count, seed=seed).points
    name = "text {}" if bundled else f"{Path(where).name} {{}}"
    yield from continuations(
        points, asked.lengths, target, max_new_tokens=asked.max_new_tokens, ignore_eos=False, name=name
    )


def _answers(task: Task, target: Target, writer: RolloutWriter) -> OwnAnswers:
    """Encode a task's prompts."""
    tokenizer = target.require_tokenizer()
    room = prompt_room(task, target)
    encoded: list[Encoded] = []
    for row in task.examples():
        encoded.append(task.encode(row, tokenizer, max_tokens=room))
        if (count := len(encoded[-1].ids)) + writer.max_new_tokens > target.info.max_positions:
            raise DataError(
                f"{task.name}, example {row.id}: {count} tokens of prompt and {writer.max_new_tokens} new "
                f"ones exceed the target's window of {target.info.max_positions}; pass a lower "
                "suite.max_prompt_tokens or suite.max_new_tokens"
            )
    prompts = tuple(one.ids for one in encoded)
    rows = tuple(
        Example(row.id, {"number": number, "sha256": ids_sha256(ids)})
        for number, (row, ids) in enumerate(zip(task.examples(), prompts, strict=True))
    )
    lengths = tuple(
        int(task.facets(row).get("length", 1 << (len(ids) - 1).bit_length()))
        for row, ids in zip(task.examples(), prompts, strict=True)
    )
    cut = sum(one.cut for one in encoded)
    return OwnAnswers(task.name, rows, prompts, writer, None, task, lengths=lengths, n_cut=cut)
