"""Time to the first token of systems that evict, beside the full cache, and where the added time goes.

A run is `Engine.generate`: prompt ids in, prefill, the policy's scores and choice, compaction of the cache,
the first answer token on the host, everything on the device done. Every run of a system is paired with a run
of the full cache on the same prompt right before it, in one process; no two pairs share a prompt. Differences
are taken pair by pair, so a clock that drifts meets both sides.

The parts of the added time (scores, choice of rows, compaction) are each timed alone on the cache of one
prompt. Alone, a part waits for the host to launch it; behind a prefill the host is ahead, so each is timed
behind other work too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from longtrain import methods
from longtrain.artifact import Artifact
from longtrain.bench import clock
from longtrain.bench.clock import Timing
from longtrain.bench.suites import Context, Row
from longtrain.cache.evicted import compact
from longtrain.costs.hardware import Gpu
from longtrain.costs.method import PromptShape
from longtrain.decoding.engine import PLAIN, Engine, Generation
from longtrain.decoding.evict import Budget, PromptRun
from longtrain.errors import ConfigError
from longtrain.log import get_logger
from longtrain.methods import policies
from longtrain.systems import EVICTOR, FULL_CACHE, Builder, Entry, System, parse
from longtrain.targets.model import Target
from longtrain.targets.step import Rows, Want

log = get_logger(__name__)

COLUMNS = {
    "prompt": "prompt_tokens",
    "method": "method",
    "pairs": "pairs",
    "first token ms": "ms.median",
    **clock.spread_columns("added ms", "extra_ms"),
    "overhead %": "overhead_percent",
    "theory ms": "theory_ms",
    "theory %": "theory_percent",
    "cache MB before": "cache_mb_before",
    "cache MB after": "cache_mb_after",
    "peak GiB": "peak_gib",
    "failed": "failed",
}
PART_COLUMNS = {
    "prompt": "prompt_tokens",
    "method": "method",
    "scores ms": "scores.ms.median",
    "queued": "scores.queued_ms.median",
    "choice ms": "selection.ms.median",
    "choice queued": "selection.queued_ms.median",
    "compaction ms": "compaction.ms.median",
    "compaction queued": "compaction.queued_ms.median",
    "failed": "failed",
}
QUEUE_WRITES = 300
"""Writes of scratch memory (tens of milliseconds) behind which a part is queued, as behind a prefill."""
FULL = FULL_CACHE.family


@dataclass(frozen=True)
class FirstTokenSettings:
    """What is measured.

    Args:
        lengths: prompt tokens.
        systems: entries of the grammar of `suite.systems`; the full cache is measured at any rate.
        budget: rows kept of each layer and KV head.
        warmup: runs of each system and length not counted.
        repeats: most pairs of a system and length.
        least: pairs run at any rate.
        seconds: of a length; no round of pairs starts later.
    """

    lengths: tuple[int, ...]
    systems: tuple[Any, ...]
    budget: int = 128
    warmup: int = 2
    repeats: int = 20
    least: int = 3
    seconds: float = 30.0


class Prompts:
    """Random token ids, new ones every time."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self._coins = torch.Generator().manual_seed(seed)

    def next(self, length: int) -> list[int]:
        """Ids of a prompt."""
        return torch.randint(self.vocab_size, (length,), generator=self._coins).tolist()


def entries(systems: Sequence[Any], context: Context) -> list[Entry]:
    """The systems, a method that `method=` chooses with its settings.

    Raises:
        ConfigError: an entry is wrong, or needs a tokenizer, which random weights do not have.
    """
    keys = context.method or {}
    found = []
    for value in systems:
        named = {"name": value} if isinstance(value, str) else value
        if keys and named == {"name": keys["name"]}:
            named = {**keys, "label": keys["name"]}
        entry = parse(named)
        if entry.policy is not None and entry.policy.name == "kvzip":
            raise ConfigError(
                "suite.cost.methods names kvzip, which asks the target in words; random weights come without "
                "a tokenizer, so it cannot be measured here"
            )
        found.append(entry)
    return found


def needs_draft(entry: Entry) -> bool:
    """Whether the system writes with a small model, and none is named."""
    policy = entry.policy
    if policy is None or policy.options.get("draft") is not None:
        return False
    return any(one.name == "draft" for one in fields(policies.policy_class(policy.name)))


def theory(entry: Entry, prompt: PromptShape, gpu: Gpu) -> tuple[Mapping[str, float], str]:
    """What a system adds to the first token by arithmetic, and the figure that is to be measured."""
    if entry.method is not None:
        cost = methods.get(entry.method.name).cost
        if cost.first_token is not None:
            return cost.first_token(entry.config(), prompt, gpu), cost.as_built
    if entry.is_policy and entry.policy is not None:
        return policies.policy_class(entry.policy.name).first_token(prompt, gpu), "ms"
    return {}, "ms"


def built(target: Target, settings: FirstTokenSettings, context: Context, draft: Any) -> list[System]:
    """The full cache and the systems.

    Args:
        target: the model.
        settings: see `FirstTokenSettings`.
        context: see `Context`.
        draft: gives the small model, where one is needed.
    """
    builder = Builder(
        target,
        budgets=[Budget(tokens=settings.budget)],
        shapes=(),
        load=lambda name: Artifact.load(name, home=str(context.home)),
        random_seed=context.seed,
    )
    values: list[Any] = []
    for value, entry in zip(settings.systems, entries(settings.systems, context), strict=True):
        if needs_draft(entry):
            named = {"name": value} if isinstance(value, str) else value
            values.append({"label": entry.called(), **named, "draft": draft()})
        elif entry.method is not None and context.method and entry.method.name == context.method["name"]:
            values.append({**context.method, "label": entry.called()})
        else:
            values.append(value)
    return builder.systems(values, roles={EVICTOR}, taker="the first token")


def measure(
    target: Target, systems: Sequence[System], settings: FirstTokenSettings, *, seed: int
) -> Iterator[Row]:
    """Rows of one length after the other, the full cache first; a system that fails ends no other."""
    engines = {system.family: Engine(target, system.parts if system.evicts else None) for system in systems}
    prompts = Prompts(target.info.vocab_size, seed)
    for length in settings.lengths:
        yield from _Length(target, engines, prompts, length, settings).rows()
        clock.release(target.device)


class _Length:
    """The runs of one prompt length."""

    def __init__(
        self,
        target: Target,
        engines: Mapping[str, Engine],
        prompts: Prompts,
        length: int,
        settings: FirstTokenSettings,
    ) -> None:
        self.target, self.engines, self.prompts = target, engines, prompts
        self.length, self.settings = length, settings
        self.pairs: dict[str, list[tuple[Timing, Timing]]] = {name: [] for name in engines if name != FULL}
        self.alone: list[Timing] = []
        self.failed: dict[str, str] = {}
        self.bytes_of: dict[str, Row] = {}

    def rows(self) -> list[Row]:
        """Warm up, run pairs, and say what was found."""
        settings = self.settings
        for name in self.engines:
            self._guarded(name, self._warm)
        if FULL in self.failed:
            return [{"prompt_tokens": self.length, "method": FULL, "failed": self.failed[FULL]}]
        if not self.pairs:
            self.alone = [self._one(FULL, self.prompts.next(self.length)) for _ in range(settings.least)]
        going = clock.rounds(settings.repeats, least=settings.least, seconds=settings.seconds)
        i = 0
        while any(name not in self.failed for name in self.pairs) and going(i):
            for name in self.pairs:
                if name not in self.failed:
                    self._guarded(name, self._pair)
            i += 1
        return [*self._full(), *(self._row(name) for name in self.pairs)]

    def _full(self) -> list[Row]:
        if not self.alone:
            return []
        return [
            {
                "prompt_tokens": self.length,
                "method": FULL,
                **clock.summary(self.alone),
                **self.bytes_of[FULL],
            }
        ]

    def _row(self, name: str) -> Row:
        row: Row = {"prompt_tokens": self.length, "method": name, "budget": self.settings.budget}
        if pairs := self.pairs[name]:
            base, own = [a for a, _ in pairs], [b for _, b in pairs]
            row |= {**clock.summary(own), **clock.versus(base, own), **self.bytes_of[name]}
            row["pairs_ms"] = [[a.wall_ms, b.wall_ms] for a, b in pairs]
        if name in self.failed:
            row["failed"] = self.failed[name]
        return row

    def _one(self, name: str, prompt: list[int]) -> Timing:
        found: list[Generation] = []
        timing = clock.timed(
            lambda: found.append(first_token(self.engines[name], prompt)), self.target.device
        )
        stats = found[0].stats
        self.bytes_of[name] = {
            "kept_rows": stats.kept_rows[0],
            "cache_bytes_before": stats.cache_bytes_full,
            "cache_bytes_after": stats.cache_bytes,
            "cache_mb_before": stats.cache_bytes_full / 1e6,
            "cache_mb_after": stats.cache_bytes / 1e6,
        }
        return timing

    def _pair(self, name: str) -> None:
        prompt = self.prompts.next(self.length)
        base = self._one(FULL, prompt)
        self.pairs[name].append((base, self._one(name, prompt)))
        self.alone.append(base)

    def _warm(self, name: str) -> None:
        for _ in range(self.settings.warmup):
            self._one(name, self.prompts.next(self.length))

    def _guarded(self, name: str, work: Callable[[str], None]) -> None:
        row: Row = {}
        with clock.memory_may_run_out(row, self.target.device):
            try:
                work(name)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # one system's fault must not lose the others' figures
                log.exception("system=%s prompt_tokens=%d failed", name, self.length)
                row["failed"] = f"{type(error).__name__}: {error}"
        if "failed" in row:
            self.failed[name] = row["failed"]


def first_token(engine: Engine, prompt: list[int]) -> Generation:
    """Prefill, evict and give the first answer token."""
    return engine.generate([prompt], max_new_tokens=1, shape=PLAIN, ignore_eos=True)


def measure_parts(
    target: Target, systems: Sequence[System], settings: FirstTokenSettings, *, seed: int
) -> Iterator[Row]:
    """One row a length and system, as they are ready; what does not fit in memory says so."""
    prompts = Prompts(target.info.vocab_size, seed)
    for length in settings.lengths:
        for system in systems:
            row: Row = {"prompt_tokens": length, "method": system.family, "budget": settings.budget}
            with clock.memory_may_run_out(row, target.device):
                row |= _parts(target, system, prompts.next(length), settings)
            yield row


@torch.no_grad()
def _parts(target: Target, system: System, prompt: list[int], settings: FirstTokenSettings) -> Row:
    evictor: Any = system.parts.evictor  # a scorer: it takes scores that are there already
    run = prefilled(target, prompt, evictor)
    scores = evictor.scores(run)
    keep = evictor.select(run, scores=scores)
    if keep is None:
        return {"failed": f"a prompt of {len(prompt)} tokens fits the budget of {settings.budget}"}
    work: dict[str, Callable[[], object]] = {
        "scores": lambda: evictor.scores(run),
        "selection": lambda: evictor.select(run, scores=scores),
        "compaction": lambda: compact(run.cache, keep, run.lengths, room=1),
    }
    found: Row = {}
    for part, one in work.items():
        how = {"warmup": settings.warmup, "repeats": settings.repeats}
        found[part] = {**clock.summary(clock.repeated(one, target.device, **how)), "queued_ms": None}
        if target.device.type == "cuda":
            few = max(3, settings.repeats // 2)
            found[part]["queued_ms"] = clock.cold(
                lambda _, one=one: one(),  # type: ignore[misc]
                target.device,
                warmup=0,
                repeats=few,
                writes=QUEUE_WRITES,
            )
    return found


def prefilled(target: Target, prompt: list[int], evictor: Any) -> PromptRun:
    """A prompt as an evictor sees it right after its prefill."""
    n = len(prompt)
    tokens_BS = torch.tensor([prompt], device=target.device)
    n_B = torch.tensor([n], device=target.device)
    pos_BS = torch.arange(n, device=target.device)[None]
    watch = evictor.watch((n,))
    cache = target.new_cache(1, n + 1 + evictor.extra_rows(n), 1)
    step = target.forward(Rows(pos_BS, tokens_BS, n_B=n_B), cache, want=Want(logits="last"), watch=watch)
    cache.commit(None, n_B)
    assert step.logits_BTV is not None
    return PromptRun(target, cache, (n,), tokens_BS, n_B, step.logits_BTV[:, -1].argmax(-1), watch, 1)
