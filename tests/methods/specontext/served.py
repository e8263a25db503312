"""Requests as SGLang's sparsity framework sees them: slots of a KV cache, prompts in parts, decoding steps.

Imports torch alone: `tests/interop/sglang_worker.py` runs it against SGLang's own files.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

CHUNK = 10
"""Tokens of a prompt that are read at once."""


class Served:
    """Some requests whose tokens are known before.

    The first one is prefilled in chunks; the last has as many of the first one's pages as their texts agree
    in. Pages lie in the cache in no order, and rows of the pool of requests are not those of the batch.

    Args:
        texts: all tokens of each request.
        prompts: tokens of each prompt.
        page: tokens of a page.
        modes: SGLang's `ForwardMode`.
    """

    def __init__(self, texts: list[list[int]], prompts: list[int], page: int, modes: Any) -> None:
        self.texts, self.prompts, self.modes = texts, prompts, modes
        self.layers = 0
        gen = torch.Generator().manual_seed(3)
        longest = max(map(len, texts))
        per = -(-longest // page)
        order = 1 + torch.randperm(len(texts) * per, generator=gen)
        slots = (order[:, None] * page + torch.arange(page)).view(len(texts), -1)
        same = [a == b for a, b in zip(texts[0], texts[-1], strict=False)]
        agreed = min(prompts[0], prompts[-1] - 1, [*same, False].index(False))
        self.shared = agreed // page * page
        slots[-1, : self.shared] = slots[0, : self.shared]
        self.owner = torch.arange(len(texts), 0, -1)
        self.table = torch.zeros(len(texts) + 2, longest + 5, dtype=torch.int32)
        self.table[self.owner, : slots.shape[1]] = slots[:, : longest + 5].int()
        self.position = {int(slot): at for row in slots for at, slot in enumerate(row)}
        self.pool = SimpleNamespace(req_to_token=self.table, max_context_len=longest + 5)
        self.keys = torch.zeros((1 + len(order)) * page, 1, 4)
        self.kv_pool = SimpleNamespace(get_key_buffer=lambda layer: self.keys)

    def prefill(self, end: Callable[[int, Any], None]) -> None:
        """Prompts: the first in chunks, the others with its first chunk, the last one's rest at the end."""
        last = len(self.texts) - 1
        chunks = range(0, self.prompts[0], CHUNK)
        batches = [{0: (at, min(at + CHUNK, self.prompts[0]))} for at in chunks]
        batches[0] |= {b: (0, self.prompts[b]) for b in range(1, last)}
        for parts in (*batches, {last: (self.shared, self.prompts[last])}):
            self._run(parts, self.modes.EXTEND, None, end)

    def decode(
        self, step: int, begin: Callable[[int, Any], Any] | None, end: Callable[[int, Any], None]
    ) -> list[Any]:
        """One token of each request; what `begin(layer, batch)` gave in each layer."""
        parts = {b: (n + step, n + step + 1) for b, n in enumerate(self.prompts)}
        return self._run(parts, self.modes.DECODE, begin, end)

    def _run(self, parts: dict[int, tuple[int, int]], mode: Any, begin: Any, end: Any) -> list[Any]:
        counts = torch.tensor([last - first for first, last in parts.values()])
        at = torch.cat([torch.arange(*part) for part in parts.values()])
        ids = torch.tensor([token for b, part in parts.items() for token in self.texts[b][slice(*part)]])
        extends = mode == self.modes.EXTEND
        batch = SimpleNamespace(
            forward_mode=mode,
            batch_size=len(parts),
            input_ids=ids,
            req_pool_indices=self.owner[[*parts]],
            seq_lens=torch.tensor([last for _, last in parts.values()]),
            positions=at,
            extend_seq_lens=counts if extends else None,
            extend_prefix_lens=torch.tensor([first for first, _ in parts.values()]) if extends else None,
        )
        found = []
        for layer in range(self.layers):
            if begin is not None:
                found.append(begin(layer, batch))
            end(layer, batch)
        return found
