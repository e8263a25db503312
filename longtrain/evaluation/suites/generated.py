"""Short prompts, long texts: does a system go on agreeing with the full cache while the text grows?

The full cache writes a text after each prompt, once for all systems. Each system is then told that text and
reads it in its own way. The score is the share of tokens at which its likeliest one is the full cache's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.corpora import prefix_of
from longtrain.evaluation.prompts import encode
from longtrain.evaluation.records import ids_sha256
from longtrain.evaluation.rollouts import RolloutWriter, follow, stretches
from longtrain.evaluation.suite import AGREEMENT, Figure, Scale, Suite
from longtrain.evaluation.suites.continuation import choose_points, held_out
from longtrain.evaluation.suites.shared import read_rows, settings_of
from longtrain.evaluation.suites.speculation import CONTEST_TEMPLATE
from longtrain.evaluation.task import Example, Measured, rows_sha256
from longtrain.settings import Count, Text, Tokens, wrong
from longtrain.systems import EVICTOR, SELECTOR, System
from longtrain.tables import tokens

if TYPE_CHECKING:
    from longtrain.decoding.roles import Parts
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

FIGURES = (
    Figure("perplexity", "nats", "tokens", growth=True, plotted=True),
    Figure("perplexity above full, %", "nats", "tokens", "change", growth=True, plotted=True),
    Figure("divergence, nats", "divergence", "tokens", plotted=True),
    Figure("tokens until its own text departs", "own_tokens"),
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
    ignore_eos: bool = True
    requests: Text | None = None
    chat: bool = True
    text: str | None = None
    kinds: tuple[str, ...] | None = ()
    data: str | None = None


@dataclass(frozen=True, eq=False)
class Texts(Measured):
    """Prompts after which the full cache writes.

    Args:
        name: of the task.
        rows: a prompt each.
        prompts: token ids of each row.
        writer: of the texts.
        first_stretch: tokens of the first stretch of a text that has figures of its own.
    """

    name: str
    rows: tuple[Example, ...]
    prompts: tuple[tuple[int, ...], ...] = field(repr=False)
    writer: RolloutWriter
    first_stretch: int
    against_full = True

    def serves(self, system: System) -> bool:
        """Drafts have no part in this."""
        return not system.drafts

    def size(self, example: Example) -> int:
        """Tokens of the prompt."""
        return len(self.prompts[example.fields["number"]])

    def settings(self) -> dict[str, Any]:
        """See `Measured`."""
        rows = {"rows": len(self.rows), "rows_sha256": rows_sha256(self.rows)}
        return {"task": self.name, "metric": "agreement", **self.writer.settings(), **rows}

    def score(self, measures: Mapping[str, float], example: Example) -> float:
        """Share of tokens at which the likeliest one is the full cache's."""
        return measures["agreed"] / measures["tokens"]

    def measure(self, target: Target, parts: Parts, examples: Sequence[Example]) -> list[dict[str, float]]:
        """See `rollouts.Steps.figures`."""
        return self.measure_against_full(target, parts, examples, {})

    def measure_against_full(
        self, target: Target, parts: Parts, examples: Sequence[Example], known: dict[str, Any]
    ) -> list[dict[str, float]]:
        """As `measure`; texts and the full cache's states are kept in `known`."""
        new = {one.fields["number"]: one.id for one in examples if one.id not in known}
        if new:
            written = self.writer.write(target, {number: self.prompts[number] for number in new})
            known.update(zip(new.values(), written, strict=True))
        places = stretches(self.writer.max_new_tokens, self.first_stretch)
        found = follow(target, parts, [known[one.id] for one in examples], self.writer.sampling)
        return [one.figures(places) for one in found]


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """One task: requests of a file, or pieces of held-out text. The seed is that of the choice of text.

    Raises:
        ConfigError: a wrong setting, or a prompt and a text that the target's context does not hold.
        DataError: there is no held-out text, or a request has no text.
    """
    asked = settings_of(GeneratedSettings, settings)
    most = target.info.max_positions - asked.new_tokens
    if most < 1:
        raise wrong(
            "suite.new_tokens",
            asked.new_tokens,
            f"fewer than the target's context of {target.info.max_positions}",
        )
    named, notes = _requests(asked, target) if asked.requests else _pieces(asked, target, seed=seed)
    shortest, longest = (pick(len(prompt) for _, prompt in named) for pick in (min, max))
    if longest > most:
        raise ConfigError(
            f"a prompt of {longest} tokens and suite.new_tokens={asked.new_tokens} exceed the target's "
            f"context of {target.info.max_positions}; pass suite.new_tokens of at most "
            f"{target.info.max_positions - longest}"
        )
    rows = tuple(
        Example(f"{number:04d}", {"number": number, **fields, "sha256": ids_sha256(prompt)})
        for number, (fields, prompt) in enumerate(named)
    )
    folder = Path(asked.home).expanduser() / "rollouts"
    writer = RolloutWriter(folder, asked.new_tokens, sampling, asked.ignore_eos)
    prompts = tuple(tuple(prompt) for _, prompt in named)
    how = "greedily" if sampling.greedy else f"at temperature {sampling.temperature:g}"
    before = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
    return Suite(
        "generated",
        (Texts(f"{tokens(asked.new_tokens)} new", rows, prompts, writer, asked.first_stretch),),
        scale=Scale(AGREEMENT),
        title="Agreement with the full cache along its own texts",
        notes=[
            f"the full cache wrote up to {asked.new_tokens} tokens {how} after prompts of {before}; each "
            "system is told its texts and reads them in its own way",
            "position: where a stretch of the text ends; it begins where the one before it ends",
            *notes,
        ],
        figures=FIGURES,
        needs=frozenset({EVICTOR, SELECTOR}),
        rivals=rivals,
        meet=_with_notes,
    )


def rivals(systems: Sequence[System]) -> list[tuple[str, str]]:
    """Rules that choose among the prompt alone, each against the trained heads and the same rule over all
    rows, at the same budget.
    """
    found = []
    for other in systems:
        method = _method(other)
        if not method.get(PROMPT_ONLY):
            continue
        twin = method | {PROMPT_ONLY: False}
        found += [
            (system.name, other.name)
            for system in systems
            if system.budget == other.budget and (system.facts.get("artifacts") or _method(system) == twin)
        ]
    return found


def _method(system: System) -> dict[str, Any]:
    return dict(system.facts.get("method", {}))


def _with_notes(suite: Suite, systems: Sequence[System]) -> Suite:
    """Say what rules of the prompt alone read."""
    if not any(_method(system).get(PROMPT_ONLY) for system in systems):
        return suite
    note = (
        f"rules with {PROMPT_ONLY} read generated rows first, within the budget: once these fill it, they "
        "read the last rows alone. With generated rows beside the budget, as in their papers, they would "
        "read all of a text whose prompt fits the budget, which is the full cache"
    )
    return replace(suite, notes=[*suite.notes, note])


Prompts = list[tuple[dict[str, Any], list[int]]]
"""Fields of an example, and its prompt."""


def _pieces(asked: GeneratedSettings, target: Target, *, seed: int) -> tuple[Prompts, list[str]]:
    """Pieces of held-out text to be continued, and notes."""
    documents = held_out(target, asked.text, asked.kinds or (), home=asked.home, data=asked.data)
    chosen = choose_points(documents, longest=asked.prompt_tokens, count=asked.prompts, seed=seed)
    prefix = prefix_of(target.tokenizer)
    found: Prompts = [
        ({"document": point.document.name, "end": point.end}, point.prompt(asked.prompt_tokens, prefix))
        for point in chosen.points
    ]
    return found, [f"{count} {reason}" for reason, count in chosen.dropped.items()]


def _requests(asked: GeneratedSettings, target: Target) -> tuple[Prompts, list[str]]:
    """The first requests of a file, and notes."""
    assert asked.requests is not None
    tokenizer, found = target.require_tokenizer(), []
    rows = read_rows(asked.requests, "requests", {})
    for number, row in enumerate(rows[: asked.prompts], 1):
        text = row.get("prompt")
        if text is None and isinstance(problem := row.get("problem"), str):
            text = CONTEST_TEMPLATE.format(problem=problem)
        if not isinstance(text, str) or not text.strip():
            raise DataError(
                f"{asked.requests}, row {number}: no request; a row has a text `prompt`, or AIME's `problem`"
            )
        room = target.info.max_positions
        found.append(({"row": number}, list(encode(tokenizer, text, chat=asked.chat, max_tokens=room).ids)))
    plain = [] if asked.chat else ["requests as plain text, without the chat template"]
    return found, [f"the first {len(found)} of {len(rows)} requests", *plain]
