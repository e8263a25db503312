"""What a run of the engine did, cycle by cycle, and the figures people quote.

A cycle is one verified draft: it emits the accepted drafts and one token of the target's own. The token that
prefill gives belongs to no cycle. Three rules keep the figures fair where a cycle is cut:

- cut by the maximum length: what the verification accepted counts whole, though the surplus is not output.
  The cycle that crosses the line is a stopping time, so by Wald's identity the pooled ratio has no bias;
  without that cycle, long ones would be left out more often than short ones.
- ended by a stop id or stop string before its last token: left out of every acceptance figure, because what
  follows the end is not text. `ended` counts them.
- cut by the cache, which quantises a block just there (QuantSpec's strict flushing): accepted drafts count as
  accepted, level by level, but not as tokens of the cycle: the next one finds them anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle of one sequence.

    Args:
        position: tokens generated before it (so 1 or more).
        drafted: levels drafted, i.e. the most drafts that could be accepted.
        nodes: nodes drafted (equal to `drafted` for a chain).
        accepted: drafts accepted by the target, before any cut; the target's own token is not counted.
        emitted: tokens of it that became output.
        ended: the text ended before the cycle's last token, by a stop id or a stop string.
        put_off: tokens of it, drafts or the target's own, that the cache's limit left to the next cycle.
    """

    position: int
    drafted: int
    nodes: int
    accepted: int
    emitted: int
    ended: bool = False
    put_off: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that it gave the text, before a cut by the maximum length: 1 or more."""
        return self.accepted + 1 - self.put_off

    @property
    def depth_hits(self) -> tuple[bool, ...]:
        """Level by level, whether a draft was accepted; levels below the first miss were not tried."""
        return (True,) * self.accepted + (False,) * (self.accepted < self.drafted)

    @property
    def cut(self) -> bool:
        """Whether the maximum length cut accepted tokens away."""
        return not self.ended and self.emitted < self.tokens


@dataclass(frozen=True)
class Stats:
    """Counts and times of one or several calls of `Engine.generate`; `+` pools them.

    Args:
        rows: the cycles of each sequence, in order of the prompts; in plain decoding they draft nothing.
        prompt_tokens: tokens of each prompt.
        output_tokens: tokens generated for each, cuts applied.
        prefill_s: wall time from the start to the first tokens, in seconds, the draft's own start included.
        decode_s: wall time of all cycles, in seconds.
        capture_s: wall time of making CUDA graphs and of the first cycles, which compile; not in
            `decode_s`.
        kept_rows: rows of each prompt left in the cache after eviction, mean over layers and KV heads.
        cache_bytes: the target's cache while decoding, largest of the pooled calls.
        cache_bytes_full: that cache before eviction, likewise.
        draft_bytes: state the draft holds beside it, largest of the pooled calls.
        target_forwards: forwards of the target, prefill included.
        shapes: cycles run by the widths of what was drafted in them; () drafted nothing.
    """

    rows: list[list[Cycle]] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    kept_rows: list[float] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    capture_s: float = 0.0
    cache_bytes: int = 0
    cache_bytes_full: int = 0
    draft_bytes: int = 0
    target_forwards: int = 0
    shapes: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __add__(self, other: Stats) -> Stats:
        """Both runs as one: lists joined, times and counts added, bytes the larger."""
        return Stats(
            rows=self.rows + other.rows,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            kept_rows=self.kept_rows + other.kept_rows,
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
        """Every cycle that acceptance figures are made of."""
        return (cycle for row in self.rows for cycle in row if not cycle.ended)

    @property
    def tau(self) -> float:
        """Acceptance length: tokens a cycle, the target's own included, prefill's not; nan without cycles."""
        return tau(self.cycles())

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts over drafted levels, the share of the longest path; nan if nothing was drafted."""
        return _ratio((cycle.accepted, cycle.drafted) for cycle in self.cycles())

    @property
    def node_rate(self) -> float:
        """Accepted drafts over drafted nodes; below `acceptance_rate` for a tree, equal for a chain."""
        return _ratio((cycle.accepted, cycle.nodes) for cycle in self.cycles())

    def by_depth(self) -> list[tuple[int, int]]:
        """Per level, (accepted, tried); a level is tried where every level above was accepted."""
        deepest = max((cycle.drafted for cycle in self.cycles()), default=0)
        counts = [[0, 0] for _ in range(deepest)]
        for cycle in self.cycles():
            for level, hit in enumerate(cycle.depth_hits):
                counts[level][0] += hit
                counts[level][1] += 1
        return [(accepted, tried) for accepted, tried in counts]

    @property
    def cut(self) -> int:
        """Cycles cut by the maximum length."""
        return sum(cycle.cut for row in self.rows for cycle in row)

    @property
    def ended(self) -> int:
        """Cycles left out of the acceptance figures because the text ended inside them."""
        return sum(cycle.ended for row in self.rows for cycle in row)

    @property
    def decode_tokens(self) -> int:
        """Output tokens of the cycles, i.e. all but prefill's."""
        return sum(cycle.emitted for row in self.rows for cycle in row)

    @property
    def evicted(self) -> bool:
        """Whether any prompt lost rows."""
        return any(kept < rows for kept, rows in zip(self.kept_rows, self.prompt_tokens, strict=False))

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all sequences a second, prefill's tokens and time left out; nan without any."""
        return self.decode_tokens / self.decode_s if self.decode_s else float("nan")

    @property
    def end_to_end_tokens_per_s(self) -> float:
        """All output tokens over prefill and decoding time; nan without any."""
        total_s = self.prefill_s + self.decode_s
        return sum(self.output_tokens) / total_s if total_s else float("nan")


def tau(cycles: Iterable[Cycle]) -> float:
    """Acceptance length of some cycles: accepted drafts and the target's own token; nan without any."""
    return _ratio((cycle.tokens, 1) for cycle in cycles)


def repeated(tokens: Sequence[int], n: int = 8) -> int:
    """How many tokens lie in an n-gram that occurred earlier in `tokens` (overlaps count)."""
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
    """Sum over sum; nan where the lower sum is 0."""
    above = below = 0
    for a, b in pairs:
        above, below = above + a, below + b
    return above / below if below else float("nan")
