"""Suite `generated`: agreement of systems with the full cache over long generated outputs of short prompts.

The full cache generates a sequence after each prompt, once for all systems. Each system then processes that
sequence with its own cache (teacher forcing). The score is the share of tokens at which its most likely token
is the full cache's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError
from longtrain.evaluation.corpora import prefix_of
from longtrain.evaluation.records import ids_sha256
from longtrain.evaluation.rollouts import Rollout, RolloutWriter, Steps, follow, stretches
from longtrain.evaluation.suite import AGREEMENT, Metric, Scale, Suite
from longtrain.evaluation.suites.continuation import choose_points, held_out
from longtrain.evaluation.suites.shared import settings_of
from longtrain.evaluation.task import Example, Measured, rows_sha256
from longtrain.settings import Count, Tokens, wrong
from longtrain.systems import EVICTOR, SELECTOR, System
from longtrain.tables import tokens

if TYPE_CHECKING:
    from longtrain.decoding.roles import Parts
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

REPEATED = Metric("repeated", "repeated_tokens", "tokens", "mean", "percent", main=True)
"""How repetitive the full cache's texts are: a loop needs little of the prompt, so any cache continues it."""
METRICS = (
    Metric("perplexity", "nats", "tokens", growth=True, plotted=True),
    Metric("perplexity above full, %", "nats", "tokens", "change", growth=True, plotted=True),
    Metric("divergence, nats", "divergence", "tokens", plotted=True),
    Metric("tokens until its own text departs", "own_tokens"),
    REPEATED,
)
PROMPT_ONLY = "prompt_only"


@dataclass(frozen=True)
class GeneratedSettings:
    """The keys of the suite; see conf/suite/generated.yaml."""

    new_tokens: Tokens
    prompts: Count
    prompt_tokens: Tokens
    first_stretch: Count
    home: str
    ignore_eos: bool = False
    text: str | None = None
    kinds: tuple[str, ...] | None = ()
    data: str | None = None


@dataclass(frozen=True, eq=False)
class Texts(Measured):
    """Prompts that the full cache continues.

    Args:
        name: the task's name.
        rows: examples, one per prompt.
        prompts: token ids of each example.
        writer: generates and stores the sequences.
        first_stretch: tokens of the first stretch of a sequence with its own metrics; None: no stretches.
    """

    name: str
    rows: tuple[Example, ...]
    prompts: tuple[tuple[int, ...], ...] = field(repr=False)
    writer: RolloutWriter
    one_prefill = True
    first_stretch: int | None
    known: dict[tuple[str, ...], list[Rollout]] = field(default_factory=dict, init=False, repr=False)
    """Examples read together -> the full cache's sequences after their prompts, with its hidden states in
    host memory. Rounding depends on what is read together, so a part of a batch is read anew.
    """

    def serves(self, system: System) -> bool:
        """True for systems without a draft, which would not affect the result."""
        return not system.drafts

    def size(self, example: Example) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompts[example.fields["number"]])

    def settings(self) -> dict[str, Any]:
        """See `Measured`."""
        rows = {"rows": len(self.rows), "rows_sha256": rows_sha256(self.rows)}
        return {"task": self.name, "metric": "agreement", **self.writer.settings(), **rows}

    def score(self, measures: Mapping[str, float], example: Example) -> float:
        """Share of tokens at which the system's most likely token is the full cache's."""
        return measures["agreed"] / measures["tokens"]

    def measure(self, target: Target, parts: Parts, examples: Sequence[Example]) -> list[dict[str, float]]:
        """See `rollouts.Steps.metrics`."""
        count, first = self.writer.max_new_tokens, self.first_stretch
        places = stretches(count, first) if first else []
        return [one.metrics(places) for one in self.followed(target, parts, examples)]

    def followed(self, target: Target, parts: Parts, examples: Sequence[Example]) -> list[Steps]:
        """A system's predictions along the full cache's sequences, which are generated first if need be."""
        together = tuple(one.id for one in examples)
        if together not in self.known:
            numbers = [int(one.fields["number"]) for one in examples]
            prompts = {number: self.prompts[number] for number in numbers}
            self.known[together] = self.writer.write(target, prompts)
        return follow(target, parts, self.known[together], self.writer.sampling)


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """One task, whose prompts are pieces of held-out text. The seed determines the pieces.

    Raises:
        ConfigError: a wrong setting, or a prompt and a sequence beyond the target's context window.
        DataError: there is no held-out text.
    """
    asked = settings_of(GeneratedSettings, settings)
    most = target.info.max_positions - asked.new_tokens
    if most < 1:
        raise wrong(
            "suite.new_tokens",
            asked.new_tokens,
            f"fewer than the target's context of {target.info.max_positions}",
        )
    if asked.prompt_tokens > most:
        raise ConfigError(
            f"a prompt of {asked.prompt_tokens} tokens and suite.new_tokens={asked.new_tokens} exceed the "
            f"target's context of {target.info.max_positions}; pass suite.new_tokens of at most "
            f"{target.info.max_positions - asked.prompt_tokens}"
        )
    documents = held_out(target, asked.text, asked.kinds or (), home=asked.home, data=asked.data)
    chosen = choose_points(documents, longest=asked.prompt_tokens, count=asked.prompts, seed=seed)
    prefix = prefix_of(target.tokenizer)
    prompts = tuple(tuple(point.prompt(asked.prompt_tokens, prefix)) for point in chosen.points)
    rows = tuple(
        Example(
            f"{number:04d}",
            {
                "number": number,
                "document": point.document.name,
                "end": point.end,
                "sha256": ids_sha256(prompt),
            },
        )
        for number, (point, prompt) in enumerate(zip(chosen.points, prompts, strict=True))
    )
    folder = Path(asked.home).expanduser() / "rollouts"
    writer = RolloutWriter(folder, asked.new_tokens, sampling, asked.ignore_eos)
    how = "greedily" if sampling.greedy else f"at temperature {sampling.temperature:g}"
    return Suite(
        "generated",
        (Texts(f"{tokens(asked.new_tokens)} new", rows, prompts, writer, asked.first_stretch),),
        scale=Scale(AGREEMENT),
        title="Agreement with the full cache along its own texts",
        notes=[
            f"the full cache wrote up to {asked.new_tokens} tokens {how} after prompts of "
            f"{asked.prompt_tokens}; each "
            "system reads its texts with its own cache (teacher forcing)",
            "position: where a stretch of the text ends; it begins where the one before it ends",
            *(f"{count} {reason}" for reason, count in chosen.dropped.items()),
        ],
        metrics=METRICS,
        needs=frozenset({EVICTOR, SELECTOR}),
        rivals=rivals,
        meet=_with_notes,
    )


def rivals(systems: Sequence[System]) -> list[tuple[str, str]]:
    """Pairs of selection rules that choose only prompt entries, each with the trained heads and with the same
    rule over all entries, at the same budget.
    """
    found = []
    for other in systems:
        method = _method(other)
        if not method.get(PROMPT_ONLY):
            continue
        reference = method | {PROMPT_ONLY: False}
        found += [
            (system.name, other.name)
            for system in systems
            if system.budget == other.budget
            and (system.facts.get("artifacts") or _method(system) == reference)
        ]
    return found


def _method(system: System) -> dict[str, Any]:
    return dict(system.facts.get("method", {}))


def _with_notes(suite: Suite, systems: Sequence[System]) -> Suite:
    """Add a note on the entries that prompt-only rules read to the suite."""
    if not any(_method(system).get(PROMPT_ONLY) for system in systems):
        return suite
    note = (
        f"rules with {PROMPT_ONLY} read generated entries first, within the budget: once these fill it, they "
        "read the last entries only. With generated entries beside the budget, as in their papers, they "
        "would read all of a text whose prompt fits the budget, which is the full cache"
    )
    return replace(suite, notes=[*suite.notes, note])
