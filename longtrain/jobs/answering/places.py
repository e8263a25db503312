"""Places of sequences that begin and end one by one while others decode (continuous batching).

A step is one cycle of plain decoding over all places, from the same CUDA graph whatever is in them. A new
sequence's tokens but the last are read in a forward of their own, beside which no place decodes. Its last
token, and the tokens of a text that goes on from what its place has in the cache, are fed: the steps take
them in the place of drawn ones. A fed token costs a place a step, which is little for a question about a long
text; `PREFILL_SPEED` says when it is.

Shapes: N places that change, B all places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

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

PREFILL_SPEED = 8
"""Tokens that a prefill reads in about the time in which one place's share of the steps feeds one."""

SPLIT_TOKENS = 4096
"""Most entries of a KV head that one program of the attention kernel reads if there are `MANY` heads: one
long text beside short ones would keep the others waiting."""
MANY = 128
"""KV heads of all places that fill a GPU."""


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
        self._heard: deque[list[tuple[int, int]]] = deque()
        """The places that drew a token, with `_text`, in each step whose tokens have not arrived."""
        self._text = [0] * n
        """Counts the texts of each place, so that late tokens of an earlier one are known."""
        self._fed: dict[int, deque[int]] = {}
        self._busy: set[int] = set()
        self._changes: dict[int, tuple[int, int, int]] = {}
        """Place -> its new number of cached tokens, of steps, and id, to be set before the next step."""
        self._watches: list[Stopwatch] = []
        self._prefill_s = 0.0
        self.prefilled = self.fed = self.steps = 0
        """Tokens read in prefills, without padding, and in steps; number of steps."""

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
        self, places: Sequence[int], prompts: Sequence[Sequence[int]], ids: Sequence[int], *, most: int
    ) -> None:
        """Read prompts together, and let them go on in free places.

        Args:
            places: a free place for each.
            prompts: token ids; the prompt and `most` tokens are no more than `slots`.
            ids: ids of the sequences in random draws.
            most: most new tokens of each.

        Raises:
            ArtifactError: the target's logits are not finite.
        """
        target, heads = self.target, [list(prompt[:-1]) for prompt in prompts]
        if longest := max(map(len, heads)):
            watch = Stopwatch(target.device)
            cache = target.plain_cache(len(heads), longest, 0)
            ids_BT, n_B = map(self._sent, pad(heads, torch.device("cpu")))
            pos_BT = torch.arange(longest, device=target.device).expand_as(ids_BT)
            first = not self.prefilled
            step = target.forward(
                TokenBatch(pos_BT, ids_BT, n_B=n_B.clamp(min=1)),
                cache,
                outputs=OutputRequest("last" if first else "none"),
            )
            if first and step.logits_BTV is not None:
                refuse_not_finite(step.logits_BTV, target)
            for row, (place, head) in enumerate(zip(places, heads, strict=True)):
                self.cache.put(place, cache, row, len(head))
            watch.stop()
            self._watches.append(watch)
            self.prefilled += sum(map(len, heads))
        for place, prompt, one in zip(places, prompts, ids, strict=True):
            self.go_on(place, len(prompt) - 1, prompt[-1:], one, most=most)

    def go_on(self, place: int, cached: int, more: Sequence[int], sequence_id: int, *, most: int) -> None:
        """Let a place go on from the first `cached` of the tokens that it holds.

        Args:
            place: its number.
            cached: tokens that stay; their KV entries are in the place.
            more: tokens that follow them, at least one, before the first is drawn.
            sequence_id: the text's id in random draws.
            most: most new tokens.
        """
        self._text[place] += 1
        self._busy.add(place)
        self._fed[place] = deque(more)
        self._changes[place] = (cached, len(more) - 1 + most, sequence_id)

    def stop(self, place: int, *, kept: int = 0) -> None:
        """End a place's text.

        Args:
            place: its number.
            kept: first tokens that stay, for `go_on`.
        """
        self._text[place] += 1
        self._busy.discard(place)
        self._fed.pop(place, None)
        self._changes[place] = (kept, 0, 0)  # an idle place still writes an entry behind those that stay

    def step(self) -> Iterator[tuple[int, int]]:
        """Run a step of all places; yield (place, new token) of the one before it.

        The caller stops a place whose text has ended.
        """
        self._change()
        self._feed()
        self._heard.append([(place, self._text[place]) for place in self._busy if place not in self._fed])
        self._cycles.run()
        self._transfer.send(self._cycles.decode_step.news_BX)
        self.steps += 1
        for rows in self._transfer.arrived_rows(rest=False):
            for place, text in self._heard.popleft():
                if self._text[place] == text:
                    yield place, rows[place][2]  # each place has one token

    def _change(self) -> None:
        """Set the lengths, the steps left and the random numbers of places that begin or end."""
        if not self._changes:
            return
        states = HashRng(self._seed, torch.tensor([one for _, _, one in self._changes.values()]))
        rows = [list(self._changes), *([one[k] for one in self._changes.values()] for k in (0, 1))]
        values_4N = self._sent(torch.stack((*torch.tensor(rows), states.state_B)))
        place_N, cached_N, left_N, state_N = values_4N
        self.cache.begin(place_N, cached_N)
        self._texts.left_B[place_N] = left_N
        self._texts.rng.state_B[place_N] = state_N
        self._changes.clear()

    def _feed(self) -> None:
        """Put the next fed token of each place that has any into the coming step."""
        if not self._fed:
            return
        tokens = [-1] * self.n
        for place, left in list(self._fed.items()):
            tokens[place] = left.popleft()
            if not left:
                del self._fed[place]
        self.fed += self.n - tokens.count(-1)
        fed_B = self._sent(torch.tensor(tokens))
        self._texts.root_B.copy_(torch.where(fed_B < 0, self._texts.root_B, fed_B))

    def _sent(self, values: Tensor) -> Tensor:
        """Copy values to the device without waiting for the step that runs there."""
        device = self.target.device
        return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
