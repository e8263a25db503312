"""QuantSpec's KV cache: old tokens are quantised to 8 bits in two nibbles, recent ones in full precision.

The target reads both nibbles (8 bits); the draft reads the upper one alone (4 bits).

Shapes: L layers, B batch, T new tokens, S prompt tokens, P path, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longtrain.cache.base import Causal, KernelMask, KVCache, Mask
from longtrain.cache.room import check_room, hierarchical_bytes, quantised_blocks
from longtrain.errors import ConfigError, ConflictError, DataError, refusal
from longtrain.kernels.attention.packed import packed_lse
from longtrain.kernels.attention.segments import by_sequence, end_to_end
from longtrain.kernels.fused_layer import Slots, move_entries, write_rows
from longtrain.kernels.hierarchical import (
    LARGEST,
    MAX_ROWS,
    flush_blocks,
    hier_attention,
    quantise_blocks,
    unsound,
)
from longtrain.kernels.hierarchical.layout import BLOCK, RING, Lens, Split, check_shape, new_planes, new_ring

_SLACK = BLOCK
"""Largest drift of the host's bound on lengths before the exact lengths are read from the device."""


class HierarchicalCache(KVCache):
    """Quantised blocks of 128 tokens, then a ring buffer of three blocks in full precision.

    The ring has the 128 to 255 committed tokens after the quantised ones, and the tokens of the step. A
    sequence's oldest full-precision block is quantised as soon as two are full. The ring is addressed by
    position, so neither this nor a rollback moves anything. Lengths are on the device, in tensors that are
    never replaced. A prompt is read in one forward into the empty cache and attends to itself in full
    precision.

    Args:
        n_layers: number of layers.
        n_heads: number of query heads.
        n_kv_heads: number of KV heads.
        head_dim: size of a head: 64, 128 or 256.
        batch: number of sequences.
        max_tokens: most committed positions of a sequence.
        max_nodes: most tokens of a decoding step, up to 128.
        device: device of the buffers.
        dtype: dtype of recent tokens.
        split: the division of an 8-bit code into two nibbles.
        strict: end every step where plain decoding would quantise a block, so that speculative and plain
            decoding on this cache have the same distribution (`commit_limit`).
        numbers: the layers' numbers in messages; None: from 0 on.

    Raises:
        ConfigError: an unsupported size, or too little memory (`NoRoomError`).

    Source: QuantSpec §4.2-4.3.
    Note: in the paper C_F2 moves into C_F1; here the ring's blocks change roles instead. Plain decoding
        quantises a block at length 128 (n + 2); a step that verifies past it would read old keys at full
        precision where plain decoding reads them quantised, which `strict` prevents.
    """

    bits = 8
    """Bits at which the target reads quantised tokens."""

    def __init__(
        self,
        *,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        batch: int,
        max_tokens: int,
        max_nodes: int,
        device: torch.device | str,
        dtype: torch.dtype,
        split: Split = Split.FLOOR,
        strict: bool = True,
        numbers: Sequence[int] | None = None,
    ) -> None:
        check_shape(n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)
        if min(batch, max_tokens) < 1 or not 0 <= max_nodes <= MAX_ROWS:
            raise refusal(
                ConfigError,
                f"hierarchical cache of batch={batch}, max_tokens={max_tokens}, max_nodes={max_nodes}",
                f"at least 1 sequence and 1 token, 0 to {MAX_ROWS} nodes",
            )
        check_room(
            hierarchical_bytes(
                n_layers=n_layers,
                n_kv_heads=n_kv_heads,
                head_dim=head_dim,
                batch=batch,
                max_tokens=max_tokens,
                itemsize=dtype.itemsize,
            ),
            device,
            what="a hierarchical KV cache",
            batch=batch,
            tokens=max_tokens,
        )
        lead = {"n_layers": n_layers, "batch": batch, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
        self.planes = new_planes(**lead, blocks=quantised_blocks(max_tokens), split=split, device=device)
        self.ring = new_ring(**lead, device=device, dtype=dtype)
        self.len_B = torch.zeros(batch, device=device, dtype=torch.int64)
        self.blocks_B = torch.zeros_like(self.len_B)
        self.capacity, self.strict = max_tokens, strict
        self._row_B1 = torch.arange(batch, device=device)[:, None]
        self._prompt_B: Tensor | None = None
        self._own: tuple[Tensor, Tensor] | None = None
        self._masks = KernelMask()
        self._numbers = tuple(range(n_layers) if numbers is None else numbers)
        self.clear()

    def clear(self) -> None:
        """Empty the cache for the next prompts; addresses of the storage do not change."""
        self.len_B.zero_()
        self.blocks_B.zero_()
        self._empty = True
        self._prompt_B = self._own = None
        self._masks.forget()
        self._high = self._synced_high = self._tail = 0

    def serves(self, batch: int, max_tokens: int, device: torch.device, dtype: torch.dtype) -> bool:
        """True if its batch size, capacity, device and dtype fit."""
        like = (self.ring.k.device, self.ring.k.dtype) == (device, dtype)
        return like and len(self.len_B) == batch and self.capacity >= max_tokens

    def expect(self, n_B: Tensor | None) -> None:
        """See `KVCache`; needed because a prompt is quantised as it is read."""
        if self._empty:
            self._prompt_B = n_B

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Store entries of a layer: committed ones of a prompt if the cache is empty, else the tail."""
        if self._empty:
            self._read(layer, k_BGTD, v_BGTD)
        else:
            self._check_room(k_BGTD.shape[2])
            self.put(layer, k_BGTD, v_BGTD, at=0)

    def tail_slots(self, layer: int, rows: int) -> Slots | None:
        """See `KVCache`; a prompt's entries must be stored with `write`."""
        if self._empty:
            return None
        self._check_room(rows)
        return self.tail(layer, rows, at=0)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """The target's attention: quantised tokens at `bits`, but a prompt sees itself in full precision.

        Raises:
            ConflictError: the mask of a prompt is not causal.
        """
        if self._own is None:
            return self.look(layer, q_BHTD, self.len_B, mask=mask, bits=self.bits, scale=scale)
        if not isinstance(mask, Causal):
            raise ConflictError(
                f"a hierarchical cache reads a prompt causally, not under {type(mask).__name__}; commit the "
                "prompt first"
            )
        k, v = self._own
        return scaled_dot_product_attention(
            q_BHTD, k, v, is_causal=q_BHTD.shape[2] > 1, scale=scale, enable_gqa=True
        ), None

    def attend_lse(
        self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float, window: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See `KVCache`; the lse of a prompt is computed by itself."""
        if self._own is None or window:
            return super().attend_lse(layer, q_BHTD, mask=mask, scale=scale, window=window)
        out, _ = self.attend(layer, q_BHTD, mask=mask, scale=scale)
        B, _, T, _ = q_BHTD.shape
        bounds = range(0, (B + 1) * T, T)
        lse_QH = packed_lse(end_to_end(q_BHTD), end_to_end(self._own[0]), bounds, bounds, scale=scale)
        return out, by_sequence(lse_QH, B)

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """Accept tail entries (or the prompt), then quantise the blocks that are due, without a host sync.

        Raises:
            ConflictError: not all entries of a prompt are accepted.
            DataError: a prompt's K or V has NaN or numbers too large to quantise; the cache is then empty.
        """
        if self._empty:
            self._end_prompt(path_BP, n_B)
            return
        if path_BP is not None:
            move_entries(self.ring.k, self.ring.v, self.len_B, path_BP, RING)
        self._high += self._tail if path_BP is None else path_BP.shape[1]
        self._masks.forget()
        # two full blocks after the quantised ones: the older one is due
        due_B = torch.sub(self.len_B, self.blocks_B, alpha=BLOCK) + n_B >= 2 * BLOCK
        flush_blocks(self.ring, self.planes, self.blocks_B, due_B)
        self.blocks_B.add_(due_B)
        self.len_B.add_(n_B)  # last: attention reads the number of blocks early (`kernels.devices`)

    def commit_limit(self) -> Tensor | None:
        """See `KVCache`: if `strict`, up to the point at which plain decoding would quantise a block."""
        return self.blocks_B * BLOCK + 2 * BLOCK - self.len_B if self.strict else None

    def step_limit(self) -> int:
        """See `KVCache`: the kernel's maximum."""
        return MAX_ROWS

    def room_left(self) -> int:
        """See `KVCache`."""
        return self.capacity - self._high

    def bytes(self) -> int:
        """Bytes of quantised planes, ring and lengths."""
        return self.planes.bytes() + self.ring.bytes() + self.len_B.nbytes + self.blocks_B.nbytes

    def tensors(self) -> tuple[Tensor, ...]:
        """Quantised planes, ring, lengths and block counts."""
        planes = (x for x in vars(self.planes).values() if isinstance(x, Tensor))
        return (*planes, self.ring.k, self.ring.v, self.len_B, self.blocks_B)

    def draft_view(self, bits: int = 4) -> DraftView:
        """A view of this cache for a draft, with the draft's own entries after the committed ones."""
        return DraftView(self, bits)

    def put(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor, *, at: int) -> None:
        """Store tail entries from index `at` on."""
        write_rows(k_BGTD, v_BGTD, self.tail(layer, k_BGTD.shape[2], at=at))

    def tail(self, layer: int, rows: int, *, at: int) -> Slots:
        """Ring positions of `rows` tail entries of a layer, from index `at` on."""
        self._tail = rows
        return Slots(self.ring.k[layer], self.ring.v[layer], self.len_B, at=at, wrap=RING)

    def look(
        self, layer: int, q_BHTD: Tensor, len_B: Tensor, *, mask: Mask, bits: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention over the entries before position `len_B`, and over the new tokens after them."""
        planes, ring = self.planes.layer(layer), self.ring.layer(layer)
        lens = Lens(len_B, self.blocks_B)
        return hier_attention(q_BHTD, planes, ring, lens, self._masks.of(mask), bits=bits, scale=scale)

    def _read(self, layer: int, k_BGSD: Tensor, v_BGSD: Tensor) -> None:
        """Store a layer's entries of the prompts: old blocks quantised, the last 128 to 255 in the ring."""
        S = k_BGSD.shape[2]
        if self.capacity < S:
            raise ConfigError(
                f"hierarchical cache is full: {S} prompt tokens, room for {self.capacity}; raise the "
                "engine's limits (tokens) or shorten the prompt"
            )
        n_B = self._prompt_B
        if n_B is None:
            n_B = self._prompt_B = torch.full_like(self.len_B, S)
        count_B = _blocks(n_B)
        quantise_blocks(k_BGSD, v_BGSD, self.planes.layer(layer), count_B)
        position_BR = count_B[:, None] * BLOCK + torch.arange(2 * BLOCK, device=n_B.device)
        from_BR, to_BR = position_BR.clamp(max=S - 1), position_BR % RING
        for buffer, rows in ((self.ring.k, k_BGSD), (self.ring.v, v_BGSD)):
            buffer[layer][self._row_B1, :, to_BR] = rows.transpose(1, 2)[self._row_B1, from_BR].to(
                buffer.dtype
            )
        self._own, self._tail = (k_BGSD, v_BGSD), S

    def _end_prompt(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """Finish reading prompts: checks the quantised values, the only read back to the host."""
        expected_B = self._prompt_B
        if path_BP is not None or expected_B is None or not torch.equal(expected_B, n_B):
            expected = None if expected_B is None else expected_B.tolist()
            raise refusal(
                ConflictError,
                f"a hierarchical cache read prompts of {expected} tokens and is to commit {n_B.tolist()}",
                "all of each prompt (pass the lengths of right-padded ones to `expect`)",
            )
        found_L2 = unsound(self.planes, self.ring, Lens(n_B, _blocks(n_B))).tolist()
        bad = [(layer, which) for layer, which in zip(self._numbers, found_L2, strict=True) if any(which)]
        if bad:
            self.clear()
            layer, (keys, _) = bad[0]
            raise DataError(
                f"{'keys' if keys else 'values'} of layer {layer} hold NaN, an infinite number or one "
                f"beyond {LARGEST:g} ({len(bad)} of {len(found_L2)} layers do); a hierarchical KV cache "
                "takes finite numbers; use the plain cache, or look for NaN in the weights"
            )
        self.blocks_B.copy_(_blocks(n_B))
        self.len_B.add_(n_B)
        self._high = self._synced_high = self._tail
        self._empty, self._own, self._prompt_B = False, None, None

    def _check_room(self, rows: int) -> None:
        """Refuse more tokens than the ring has room for, or a cache that is full."""
        if rows > MAX_ROWS:
            raise refusal(
                ConfigError,
                f"{rows} new tokens for a hierarchical cache that has a prefix",
                f"up to {MAX_ROWS} a step",
            )
        if self.len_B.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # lengths cannot be read while a graph is recorded; on replay this code does not run
        if self._high - self._synced_high > _SLACK or self._high > self.capacity:
            self._high = self._synced_high = int(self.len_B.max())
        if self._high > self.capacity:
            raise ConfigError(
                f"hierarchical cache is full: {self._high} tokens committed, room for {self.capacity}; raise "
                "the engine's limits (tokens) or shorten the prompt"
            )


class DraftView(KVCache):
    """A draft's view of a hierarchical cache: quantised tokens at 4 bits (or 8), and the entries that the
    draft has written since the last `restart`, which the target's own step overwrites.

    Args:
        cache: the cache.
        bits: bits at which quantised tokens are read.
    """

    def __init__(self, cache: HierarchicalCache, bits: int) -> None:
        self.cache, self.bits = cache, bits
        self.restart()

    def restart(self) -> None:
        """Drop the draft's own entries: the next one follows the committed ones."""
        self._drafted = self._tail = 0
        self.len_B = self.cache.len_B

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Store entries after those drafted so far.

        Raises:
            ConfigError: more than the ring's third block has room for.
        """
        self._claim(k_BGTD.shape[2])
        self.cache.put(layer, k_BGTD, v_BGTD, at=self._drafted)

    def tail_slots(self, layer: int, rows: int) -> Slots:
        """See `KVCache`; raises as `write` does."""
        self._claim(rows)
        return self.cache.tail(layer, rows, at=self._drafted)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """See `KVCache`; reads the draft's entries like committed ones."""
        return self.cache.look(layer, q_BHTD, self.len_B, mask=mask, bits=self.bits, scale=scale)

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """Continue a chain after the entries just written, all of them in every sequence."""
        self._drafted += self._tail
        self.len_B = self.cache.len_B + self._drafted

    def bytes(self) -> int:
        """Always 0: the view has no storage of its own."""
        return 0

    def _claim(self, rows: int) -> None:
        """Reserve `rows` more entries, if the ring's third block has room for them."""
        self._tail = rows
        if self._drafted + rows > MAX_ROWS:
            raise ConfigError(
                f"{self._drafted + rows} drafted tokens; a hierarchical cache takes {MAX_ROWS} a cycle"
            )


class UpperHalfCache(HierarchicalCache):
    """A hierarchical cache whose target reads quantised tokens at 4 bits, as its draft does."""

    bits = 4


def _blocks(n_B: Tensor) -> Tensor:
    """Number of quantised blocks of a prompt: all full ones but the last."""
    return (n_B // BLOCK - 1).clamp(min=0)
