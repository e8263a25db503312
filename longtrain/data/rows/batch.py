"""One micro-batch, as the data gives it and every method takes it.

Shapes: T tokens of one packed row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One packed row of documents: a micro-batch.

    Args:
        ids_T: token ids, int64.
        bounds: document bounds on the host, from 0 to T; document d is `bounds[d]:bounds[d + 1]`. The last
            one may be padding (its loss mask is all False).
        loss_mask_T: bool; token t is a label to be learned (predicted from the tokens before it in its
            document). Never True at a document's first token.
        seed: for all randomness of this micro-batch (shifts, offsets); a function of run seed and data
            position.
        tokens_in_step: supervised labels in the whole optimizer step, over all ranks and accumulated
            micro-batches.
        names: one name a document, for error messages.
        kinds: one text kind a document (book, code, chat, ...).
        weights_T: optional fp32 weight of each label; None: all 1.
        host_mask_T: `loss_mask_T` on the host, kept by `to`, so that nobody waits for a device to learn which
            rows count; None: `loss_mask_T` never left the host.
        documents_in_step: documents with at least one label in the whole optimizer step, over all ranks and
            accumulated micro-batches.
    """

    ids_T: Tensor
    bounds: tuple[int, ...]
    loss_mask_T: Tensor
    seed: int
    tokens_in_step: int
    names: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    weights_T: Tensor | None = None
    host_mask_T: Tensor | None = None
    documents_in_step: int = 0

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch with its tensors on `device`; bounds, names and a copy of the mask stay on the host."""
        on_host = self.host_mask_T is None and self.loss_mask_T.device.type == "cpu"
        return replace(
            self,
            host_mask_T=self.loss_mask_T if on_host else self.host_mask_T,
            ids_T=self.ids_T.to(device, non_blocking=non_blocking),
            loss_mask_T=self.loss_mask_T.to(device, non_blocking=non_blocking),
            weights_T=None
            if self.weights_T is None
            else self.weights_T.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """The batch with its tensors in page-locked memory, so that copies to a GPU do not wait."""
        return replace(
            self,
            ids_T=self.ids_T.pin_memory(),
            loss_mask_T=self.loss_mask_T.pin_memory(),
            weights_T=None if self.weights_T is None else self.weights_T.pin_memory(),
        )
