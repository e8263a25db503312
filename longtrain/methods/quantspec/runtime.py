"""The QuantSpec draft: plain decoding with the target's own layers, reading its cache in fewer bits.

Shapes: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.hierarchical import DraftView, HierarchicalCache
from longtrain.cache.layered import LayeredCache
from longtrain.cache.quantised import LayeredDraftView
from longtrain.costs.hardware import gpu_called
from longtrain.costs.model import Sizes
from longtrain.decoding.expansion import Level, TreeExpansion, check_chain
from longtrain.decoding.roles import TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Rng, Sampling
from longtrain.errors import ConflictError
from longtrain.methods.quantspec.gain import Gain, quantised_tokens
from longtrain.targets.int4 import Int4Target
from longtrain.targets.step import OutputRequest, TargetStep, TokenBatch

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.targets.model import Target

WORTH = 0.9
"""Most bytes of a draft's step, as a share of the target's, with which drafting can pay: at this share a
chain of 4 that is accepted whole takes as long as 4.6 plain steps and gives 5 tokens."""


class QuantSpecRuntime:
    """Proposes chains (`decoding.roles.Draft`).

    Its KV entries follow the committed ones in the cache's buffer until the target's step overwrites them, so
    it has no state of its own and nothing to roll back.

    Args:
        model: the target, or the target with 4-bit weights.
        kv_bits: the bits in which quantised tokens are read.

    Source: QuantSpec §4.1 and Algorithm 1.
    """

    outputs = OutputRequest()

    def __init__(self, model: Target, *, kv_bits: int) -> None:
        self.model, self.kv_bits = model, kv_bits
        self.view: DraftView | LayeredDraftView | None = None
        self._expansion = TreeExpansion()
        self.gain = Gain(
            size=Sizes.of(model.info),
            windows=tuple(model.info.windows),
            itemsize=model.dtype.itemsize,
            weight_bits=4 if isinstance(model, Int4Target) else 8 * model.dtype.itemsize,
            kv_bits=kv_bits,
            bytes_per_s=_bytes_per_s(model.device),
        )

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Create the draft's view of the target's cache.

        Raises:
            ConflictError: the cache is not a hierarchical one.
        """
        if isinstance(cache, LayeredCache) and isinstance(cache.full, HierarchicalCache):
            self.view = LayeredDraftView(cache, self.model.info.windows, self.kv_bits)
            return
        if not isinstance(cache, HierarchicalCache):
            raise ConflictError(
                f"QuantSpec drafts on a hierarchical KV cache, not on a {type(cache).__name__}; give the "
                "engine the cache that comes with it"
            )
        self.view = cache.draft_view(self.kv_bits)

    def check_shape(self, shape: TreeShape) -> None:
        """Refuse a shape that is no chain (`decoding.roles.Draft`)."""
        check_chain(shape, "QuantSpec")

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, rng: Rng) -> TokenTree:
        """Draft a chain below the root: each step's argmax, or a token sampled from its distribution."""
        view = self.view
        assert view is not None
        self.check_shape(shape)
        view.restart()
        pos_JB = view.len_B + self._expansion.depths(shape, root_B.device)[:, None]

        def logits_of(level: Level) -> Tensor:
            pos_B = pos_JB[level.depth]
            out = self.model.forward(
                TokenBatch(pos_B[:, None], level.tokens_BM), view, outputs=OutputRequest("last")
            )
            view.commit(None, pos_B)  # commits all new entries; the view needs no count
            assert out.logits_BTV is not None
            return out.logits_BTV

        return self._expansion.grow(logits_of, root_B, view.len_B, shape, sampling, rng)

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Do nothing: the accepted tokens are already in the cache."""

    def cannot_gain(self, batch: int, tokens: int) -> str:
        """Say why drafting cannot be faster (`decoding.roles.Draft`): the draft reads as many bytes.

        A step of the draft has to read fewer bytes than the target's, in its weights or in quantised tokens
        of the cache, of which short texts have none.
        """
        share = self.gain.share(batch, tokens)
        if share <= WORTH:
            return ""
        return (
            f"quantspec: {quantised_tokens(tokens)} of {tokens} tokens are in fewer bits, so a draft's step "
            f"reads {share:.0%} of what the target's reads and cannot pay"
        )

    def slower(self, batch: int, tokens: int) -> str:
        """Say what speed is expected (`decoding.roles.Draft`), by `Gain`."""
        speed = self.gain.speed(batch, tokens)
        if speed >= 1:
            return ""
        return (
            f"quantspec: expected at {speed:.2f} times plain decoding's speed with {batch} x {tokens} "
            f"tokens, {quantised_tokens(tokens)} of each in fewer bits; decode without method=quantspec"
        )

    def bytes(self) -> int:
        """Return the bytes of the 4-bit weights."""
        return self.model.int4_bytes() if isinstance(self.model, Int4Target) else 0

    def tensors(self) -> tuple[Tensor, ...]:
        """Return an empty tuple: all tensors of the draft belong to the target's cache."""
        return ()


def _bytes_per_s(device: torch.device) -> float | None:
    """Return the device's read bandwidth by its data sheet; None if it has no entry there."""
    gpu = gpu_called(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return gpu.bytes_per_s if gpu else None
