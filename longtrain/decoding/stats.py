"""Statistics of decoding, cycle by cycle, and the metrics computed from them (acceptance length, speed).

A cycle is one verified draft: it emits the accepted drafts and one token of the target's own. The token that
prefill gives belongs to no cycle. Three rules keep the metrics unbiased when a cycle is cut short:

- Cut by the maximum length: all drafts that verification accepted count, although the surplus is not output.
  The cycle that reaches the maximum is a stopping time, so by Wald's identity the pooled ratio is unbiased;
  leaving that cycle out would drop long cycles more often than short ones.
- Ended by a stop id or stop string before its last token: not counted in any acceptance metric, because
  tokens after the end are not text. `ended` counts these cycles.
- Cut by the cache, which quantises a block at that point (QuantSpec with strict flushing): accepted drafts
  count as accepted at every level, but the deferred ones are not tokens of the cycle: the next one drafts
  them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longtrain.decoding.roles import TreeShape


@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle of one sequence.

    Args:
        position: number of tokens generated before it (1 or more).
        drafted: number of drafted levels, which is the most drafts that can be accepted.
        nodes: number of drafted nodes (equal to `drafted` for a chain).
        accepted: number of drafts accepted by the target, before any cut, without the target's own token.
        emitted: number of its tokens that became output.
        ended: True if a stop id or a stop string ended the text before the cycle's last token.
        put_off: number of its tokens (drafts or the target's own) that the cache's limit deferred to the next
            cycle.
        copied: number of the accepted drafts that were copied from the text; a token that the draft proposed
            as well counts as the draft's.
    """

    position: int
    drafted: int
    nodes: int
    accepted: int
    emitted: int
    ended: bool = False
    put_off: int = 0
    copied: int = 0

    @property
    def tokens(self) -> int:
        """New tokens of the sequence, before a cut by the maximum length: 1 or more."""
        return self.accepted + 1 - self.put_off

    @property
    def depth_hits(self) -> tuple[bool, ...]:
        """For each level tried, True if a draft was accepted; levels below the first miss were not tried."""
        return (True,) * self.accepted + (False,) * (self.accepted < self.drafted)

    @property
    def cut(self) -> bool:
        """True if the maximum length cut accepted tokens off."""
        return not self.ended and self.emitted < self.tokens


@dataclass(frozen=True)
class Stats:
    """Counts and times of one or several calls of `Engine.generate`; `+` pools them.

    Args:
        rows: the cycles of each sequence, in order of the prompts; in plain decoding they draft nothing.
        prompt_tokens: number of tokens of each prompt.
        output_tokens: number of output tokens of each sequence.
        prefill_s: wall time from the start to the first tokens, in seconds, including the draft's start.
        decode_s: wall time of all cycles, in seconds.
        capture_s: wall time of recording CUDA graphs and of the first cycles, which compile kernels, in
            seconds; not part of `decode_s`.
        kept_entries: KV entries of each prompt after eviction, mean over layers and KV heads.
        cache_bytes: bytes of the target's cache while decoding, maximum over the pooled calls.
        cache_bytes_full: bytes of that cache before eviction, likewise.
        draft_bytes: bytes of the draft's own state, maximum over the pooled calls.
        target_forwards: number of target forwards, prefill included.
        shapes: number of cycles by the widths of the drafted tree, with a 0 after them for each token copied
            by look-up; () for plain cycles (`counted`).
    """

    rows: list[list[Cycle]] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    kept_entries: list[float] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    capture_s: float = 0.0
    cache_bytes: int = 0
    cache_bytes_full: int = 0
    draft_bytes: int = 0
    target_forwards: int = 0
    shapes: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __add__(self, other: Stats) -> Stats:
        """Pool two runs: lists are concatenated, times and counts added, and the larger byte counts used."""
        return Stats(
            rows=self.rows + other.rows,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            kept_entries=self.kept_entries + other.kept_entries,
            prefill_s=self.prefill_s + other.prefill_s,
            decode_s=self.decode_s + other.decode_s,
            capture_s=self.capture_s + other.capture_s,
            cache_bytes=max(self.cache_bytes, other.cache_bytes),
            cache_bytes_full=max(self.cache_bytes_full, other.cache_bytes_full),
            draft_bytes=max(self.draft_bytes, other.draft_bytes),
            target_forwards=self.target_forwards + other.target_forwards,
            shapes=dict(Counter(self.shapes) + Counter(other.shapes)),
        )

    def cycles(self) -> Iterator[Cycle]:
        """Iterate over the cycles that count for acceptance metrics."""
        return (cycle for row in self.rows for cycle in row if not cycle.ended)

    @property
    def tau(self) -> float:
        """Acceptance length: tokens per cycle, with the target's own, without prefill's; nan if none."""
        return tau(self.cycles())

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts divided by drafted levels (the longest path); nan if nothing was drafted."""
        return _ratio((cycle.accepted, cycle.drafted) for cycle in self.cycles())

    @property
    def copied_share(self) -> float:
        """Share of the accepted drafts that were copied from the text; nan if none was accepted."""
        return _ratio((cycle.copied, cycle.accepted) for cycle in self.cycles())

    def by_depth(self) -> list[tuple[int, int]]:
        """Return (accepted, tried) for each level; a level is tried if every level above it was accepted."""
        deepest = max((cycle.drafted for cycle in self.cycles()), default=0)
        counts = [[0, 0] for _ in range(deepest)]
        for cycle in self.cycles():
            for level, hit in enumerate(cycle.depth_hits):
                counts[level][0] += hit
                counts[level][1] += 1
        return [(accepted, tried) for accepted, tried in counts]

    @property
    def cut(self) -> int:
        """Number of cycles cut by the maximum length."""
        return sum(cycle.cut for row in self.rows for cycle in row)

    @property
    def ended(self) -> int:
        """Number of cycles left out of acceptance metrics because the text ended inside them."""
        return sum(cycle.ended for row in self.rows for cycle in row)

    @property
    def decode_tokens(self) -> int:
        """Number of output tokens of the cycles: all but prefill's."""
        return sum(cycle.emitted for row in self.rows for cycle in row)

    @property
    def evicted(self) -> bool:
        """True if entries of any prompt were evicted."""
        return any(kept < rows for kept, rows in zip(self.kept_entries, self.prompt_tokens, strict=False))

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all sequences per second, without prefill's tokens and time; nan without any."""
        return self.decode_tokens / self.decode_s if self.decode_s else float("nan")

    @property
    def end_to_end_tokens_per_s(self) -> float:
        """All output tokens divided by prefill and decoding time; nan without any."""
        total_s = self.prefill_s + self.decode_s
        return sum(self.output_tokens) / total_s if total_s else float("nan")


def counted(used: Mapping[TreeShape, int]) -> dict[tuple[int, ...], int]:
    """`Stats.shapes` of the cycles of each shape; shapes that differ in nothing else are added up."""
    found = Counter[tuple[int, ...]]()
    for shape, count in used.items():
        found[shape.widths + (0,) * shape.copied] += count
    return dict(found)


def tau(cycles: Iterable[Cycle]) -> float:
    """Acceptance length: mean over cycles of accepted drafts plus one token of the target; nan if none."""
    return _ratio((cycle.tokens, 1) for cycle in cycles)


def repeated(tokens: Sequence[int], n: int = 8) -> int:
    """Number of tokens in an n-gram that occurred earlier in `tokens` (overlaps count)."""
    seen: set[tuple[int, ...]] = set()
    covered, last = 0, 0
    for end in range(n, len(tokens) + 1):
        gram = tuple(tokens[end - n : end])
        if gram in seen:
            covered += end - max(last, end - n)
            last = end
        seen.add(gram)
    return covered


def _ratio(pairs: Iterable[tuple[int, int]]) -> float:
    """Sum of the first elements divided by the sum of the second; nan if the divisor is 0."""
    above = below = 0
    for a, b in pairs:
        above, below = above + a, below + b
    return above / below if below else float("nan")
