"""Places of sequences that begin and end one by one while others decode (continuous batching).

A step is one cycle of plain decoding over all places, from the same CUDA graph whatever is in them. What is
new in a text is read in a forward of its own, together with that of other texts, beside which no place
decodes: a whole prompt, or what follows the entries that a place has kept. Its last token goes through the
next step as a drawn one does, and gives the first token of the answer.

Shapes: N places that change, B all places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from longtrain.cache.arena import ArenaCache
from longtrain.decoding.captured import Cycles, Stopwatch
from longtrain.decoding.decode_step import CycleState, DecodeStep
from longtrain.decoding.engine import PLAIN, gains, refuse_not_finite
from longtrain.decoding.output import TokenTransfer
from longtrain.decoding.prefill import pad
from longtrain.decoding.sampling import HashRng, MinNewTokens, Sampling
from longtrain.targets.step import OutputRequest, TokenBatch

if TYPE_CHECKING:
    from longtrain.targets.model import Target

PREFILL_TOKENS = 16384
"""Most tokens that are read together, padding included; a longer text is read alone."""
PREFILL_ENTRIES = 1 << 18
"""Most KV entries, padding included, of texts that are read together: attention has a mask of new tokens x
entries."""
PADDED = 64
"""A text is read beside one of at most twice its tokens and so many more."""

SPLIT_TOKENS = 4096
"""Most entries of a KV head that one program of the attention kernel reads if there are `MANY` heads: one
long text beside short ones would keep the others waiting."""
MANY = 128
"""KV heads of all places that fill a GPU."""


class Unread(NamedTuple):
    """A text that a place is to go on with, but for its last token.

    Args:
        place: its place.
        cached: first tokens whose KV entries are there already.
        ids: token ids.
    """

    place: int
    cached: int
    ids: Sequence[int]

    @property
    def new(self) -> int:
        """Number of tokens to be read."""
        return len(self.ids) - self.cached


class Places:
    """Sequences of one target, each in a place of its own.

    A sequence's draws depend on seed, its id and the position alone, so that its text does not depend on what
    other places hold, nor on when it begins, up to the rounding of a forward.

    Args:
        target: the frozen model.
        n: number of places.
        slots: most positions of a sequence, its answer included.
        sampling: logits processors and seed.

    Raises:
        NoRoomError: the KV entries do not fit in the free memory.
    """

    def __init__(self, target: Target, n: int, slots: int, sampling: Sampling) -> None:
        self.target, self.n, self.slots, self._seed = target, n, slots, sampling.seed
        many = n * target.info.n_kv_heads >= MANY
        splits = -(-slots // SPLIT_TOKENS) if many else None
        self.cache = ArenaCache(target.plain_cache(n, slots, 0), splits=splits)
        self._texts = CycleState(self.cache.len_B)
        none = MinNewTokens((), 0, target.device)
        step = DecodeStep(target, self.cache, None, PLAIN, sampling, none, texts=self._texts)
        # on a GPU without the kernel the host launches each operator
        captured = target.device.type != "cuda" or gains(target)
        self._cycles = Cycles(step, captured=captured)
        self._transfer = TokenTransfer(self._cycles.late)
        self._heard: deque[list[int]] = deque()
        """`_text` in each step whose tokens have not arrived."""
        self._text = [0] * n
        """Counts the texts of each place, so that late tokens of an earlier one are known."""
        self._busy: set[int] = set()
        self._changes: dict[int, tuple[int, int, int, int]] = {}
        """Place -> its new number of cached tokens, of steps, token that follows, and id, to be set before
        the next step."""
        self._watches: list[Stopwatch] = []
        self._prefill_s = 0.0
        self.prefilled = self.prefills = self.steps = 0
        """Tokens read in prefills, without padding; number of prefills, and of steps."""

    @property
    def busy(self) -> int:
        """Number of places that decode."""
        return len(self._busy)

    @property
    def prefill_s(self) -> float:
        """Seconds of the device in prefills; waits for the last."""
        if self._watches and self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        self._prefill_s += sum(watch.seconds() for watch in self._watches)
        self._watches.clear()
        return self._prefill_s

    def begin(
        self,
        places: Sequence[int],
        texts: Sequence[Sequence[int]],
        ids: Sequence[int],
        *,
        most: int,
        cached: Sequence[int] | None = None,
    ) -> None:
        """Read texts together, and let them go on in places.

        Args:
            places: a place for each, in which nothing is being written.
            texts: token ids; a text and `most` tokens are no more than `slots`.
            ids: ids of the sequences in random draws.
            most: most new tokens of each.
            cached: first tokens of each text whose KV entries its place has kept, not all; None: none.

        Raises:
            ArtifactError: the target's logits are not finite.
        """
        known = cached or [0] * len(texts)
        heads = (text[:-1] for text in texts)
        unread = [Unread(*one) for one in zip(places, known, heads, strict=True)]
        for group in self._groups([one for one in unread if one.new]):
            self._read(group)
        for place, text, one in zip(places, texts, ids, strict=True):
            self._text[place] += 1
            self._busy.add(place)
            self._changes[place] = (len(text) - 1, most, text[-1], one)

    def _groups(self, unread: list[Unread]) -> Iterator[list[Unread]]:
        """Yield texts that are read together, of similar numbers of new tokens."""
        group: list[Unread] = []
        for text in sorted(unread, key=lambda one: -one.new):
            longest = group[0].new if group else text.new
            entries = longest + max(one.cached for one in (*group, text))
            rows = len(group) + 1
            if group and (
                rows * longest > PREFILL_TOKENS
                or rows * entries > PREFILL_ENTRIES
                or entries > self.slots
                or longest > 2 * text.new + PADDED
            ):
                yield group
                group = []
            group.append(text)
        if group:
            yield group

    def _read(self, group: list[Unread]) -> None:
        """Read texts in one forward; their KV entries are written to their places."""
        watch = Stopwatch(self.target.device)
        cached = [one.cached for one in group]
        ids_NT, new_N = pad([one.ids[one.cached :] for one in group], torch.device("cpu"))
        place_N = torch.tensor([one.place for one in group])
        place_N, cached_N, new_N = self._sent(torch.stack((place_N, torch.tensor(cached), new_N)))
        cache = self.cache.store.some(place_N, cached_N, cached)
        pos_NT = cached_N[:, None] + torch.arange(ids_NT.shape[1], device=place_N.device)
        first = not self.prefills
        step = self.target.forward(
            TokenBatch(pos_NT, self._sent(ids_NT), n_B=new_N),
            cache,
            outputs=OutputRequest("last" if first else "none"),
        )
        if first and step.logits_BTV is not None:
            refuse_not_finite(step.logits_BTV, self.target)
        watch.stop()
        self._watches.append(watch)
        self.prefilled += sum(one.new for one in group)
        self.prefills += 1

    def stop(self, place: int, *, kept: int = 0) -> None:
        """End a place's text.

        Args:
            place: its number.
            kept: first tokens whose KV entries stay, for `begin`.
        """
        self._text[place] += 1
        self._busy.discard(place)
        self._changes[place] = (kept, 0, 0, 0)  # an idle place still writes an entry behind those that stay

    def step(self) -> list[tuple[int, int]]:
        """Run a step of all places; return (place, new token) of the one before it.

        The caller stops a place whose text has ended.
        """
        self._change()
        self._heard.append([*self._text])
        self._cycles.run()
        self._transfer.send(self._cycles.decode_step.news_BX)
        self.steps += 1
        arrived: list[tuple[int, int]] = []
        for rows in self._transfer.arrived_rows(rest=False):
            heard, text = self._heard.popleft(), self._text
            arrived += [(at, rows[at][2]) for at in self._busy if heard[at] == text[at]]  # each has one token
        return arrived

    def _change(self) -> None:
        """Set the state of places that begin or end: lengths, steps left, tokens and random numbers."""
        if not self._changes:
            return
        numbers_5N = torch.tensor([(place, *values) for place, values in self._changes.items()]).T
        states = HashRng(self._seed, numbers_5N[4])
        numbers_5N[4] = states.state_B
        place_N, cached_N, left_N, root_N, state_N = self._sent(numbers_5N)
        self.cache.begin(place_N, cached_N)
        self._texts.left_B[place_N] = left_N
        self._texts.root_B[place_N] = root_N
        self._texts.rng.state_B[place_N] = state_N
        self._changes.clear()

    def _sent(self, values: Tensor) -> Tensor:
        """Copy values to the device without waiting for the step that runs there."""
        device = self.target.device
        return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
