"""The DSpark training objective: blocks of drafted tokens against the target, in chunks.

Keys and values of the tokens before blocks are functions of the target's states alone, token by token and in
every layer. So they are computed in chunks of tokens and shared by chunks of blocks, which do not see each
other, and the gradient is that of the whole sequence (`longtrain.chunked`).

Shapes: T tokens of a packed sequence, A blocks (of a chunk), R rows of a block, K slots of a block, N slots
that learn, E hidden dim, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from longtrain.chunked import SharedRows, chunked_sum
from longtrain.data.packing import packed_sequences
from longtrain.kernels.anchored import anchored_attention
from longtrain.layers import cast_to
from longtrain.methods.dspark.anchors import Anchors, anchors_of
from longtrain.methods.dspark.loss import Learned, SlotLoss, Weighing, slot_loss
from longtrain.methods.offsets import check_offsets, offsets_of
from longtrain.methods.rope import ModuleRope
from longtrain.methods.spec import Loss, Objective
from longtrain.targets.step import OutputRequest

if TYPE_CHECKING:
    from longtrain.data.packing.batch import Batch
    from longtrain.methods.dspark.config import Config
    from longtrain.methods.dspark.modules import DSparkDraft
    from longtrain.targets.model import Target


@dataclass(frozen=True)
class _BlockRow:
    """A batch with its blocks, positions and the target's hidden states; blocks see tokens of `low..high`.

    `target_kv` has K and V of the target's last full layer at those tokens, if a layer reads them.
    """

    batch: Batch
    pos_T: Tensor
    blocks: Anchors
    hidden: Mapping[int, Tensor]
    low: int
    high: int
    target_kv: Sequence[tuple[Tensor, ...]] = ()


@dataclass(frozen=True)
class _SlotSums:
    """Sums over all blocks, by slot, each fp64 [K].

    Args:
        total_7K: all of the following, which are its rows.
        hits: slots whose most likely token is the target's, after such slots only.
        cases: slots after such slots only.
        accept: accepted shares.
        reach: products of the accepted shares up to each slot.
        error: distances of the confidence from the accepted share.
        valid: slots that learn.
        known: slots of which the target's likeliest token is a candidate.
    """

    total_7K: Tensor
    hits: Tensor
    cases: Tensor
    accept: Tensor
    reach: Tensor
    error: Tensor
    valid: Tensor
    known: Tensor

    @classmethod
    def zero(cls, slots: int, device: torch.device) -> _SlotSums:
        """Return sums over no blocks."""
        total_7K = torch.zeros(7, slots, dtype=torch.float64, device=device)
        return cls(total_7K, *total_7K)

    def add(self, valid_AK: Tensor, at_N: Tensor, found: SlotLoss, confidence_N: Tensor | None) -> None:
        """Add a chunk's blocks.

        Args:
            valid_AK: the slots that learn.
            at_N: index of each of them among all A * K.
            found: their loss, in the same order.
            confidence_N: likewise; None: no confidence head.
        """
        accept_N = found.accept_N
        error_N = torch.zeros_like(accept_N) if confidence_N is None else (confidence_N - accept_N).abs()
        each_4S = accept_N.new_zeros(4, valid_AK.numel(), dtype=torch.float64)
        hit_N, known_N = (one.to(accept_N.dtype) for one in (found.hit_N, found.known_N))
        each_4S[:, at_N] = torch.stack((hit_N, accept_N, error_N, known_N)).double()
        each_4AK = each_4S.view(4, *valid_AK.shape)
        right_AK, reach_AK = each_4AK[:2].cumprod(2)
        alive_AK = valid_AK * pad(right_AK[:, :-1], (1, 0), value=1.0)
        parts = (right_AK, alive_AK, each_4AK[1], reach_AK, each_4AK[2], valid_AK, each_4AK[3])
        self.total_7K.add_(torch.stack([part.double() for part in parts]).sum(1))


class DSparkObjective(Objective):
    """The slots' distance to the target and to the data, and the confidence's loss, over blocks.

    Slot k of a block at position p predicts token p + k + 1, after the data's own token p + k, and weighs
    exp(-k / block_decay). The weights of a block's slots are divided by the sum of all K, and a block stands
    for the positions that it was chosen from (`anchors_of`). So away from the ends of labelled spans every
    label counts once, and the sum over a batch is divided by its labels, as with other drafts.

    Args:
        module: the draft.
        target: the frozen target.
        config: hyperparameters.

    Raises:
        ConfigError: offsets beyond the target's context.

    Source: DSpark eq. 9-12 and the authors' code; speculators 0.9.0 for the selector's part.
    Note: the authors divide by the sum of weights of an optimiser step. Here the divisor is the number of its
        labels, which differs by a factor that is close to 1 and constant where labelled spans are long; it is
        known before a step begins, whatever its micro-batches and ranks are.
    """

    module: DSparkDraft
    target: Target
    outputs: OutputRequest

    def __init__(self, module: DSparkDraft, target: Target, config: Config) -> None:
        super().__init__()
        self.module, self.target, self.config = module, target, config
        self.rope = ModuleRope(config, target)
        check_offsets(config, target.info)
        layers = target.info.readable_layers[-1:] if len(module.own) < config.n_layers else ()
        self.outputs = OutputRequest("none", hidden=(*module.read, -1), kv=layers)

    def forward(self, batch: Batch) -> Loss:
        """Return the loss summed over labels; metrics by slot and of whole blocks.

        `loss`; `acc/depth_k`, the share of correct predictions of slot k among blocks that were correct in
        all slots before; `accept/depth_k`, the share of samples of slot k that the target accepts, with the
        data's tokens before it; `tau`, the mean over blocks of 1 (the target's own token) plus the number of
        slots before the first wrong one; `tau_sampled`, the same by the accepted shares; `confidence_error`,
        the mean distance of the confidence from the accepted share; `candidate_recall`, the share of slots
        whose likeliest token by the target the selector can choose. Slots without a label add nothing to the
        two `tau`, which are a little low for it.
        """
        row = self._read(batch)
        device, slots, chunk = batch.ids_T.device, self.config.block_size, self.config.chunk_tokens
        sums = _SlotSums.zero(slots, device)
        size = max(1, chunk // self.config.rows) if chunk else max(len(row.blocks), 1)
        edges = [*range(0, len(row.blocks), size), len(row.blocks)]

        def step(i: int, *shared: Tensor) -> Tensor:
            return self._blocks(row, slice(*edges[i : i + 2]), shared, sums)

        # Edges of the chunks of tokens whose keys and values are computed at once.
        cuts = [*range(row.low, row.high, chunk or max(row.high, 1)), row.high]
        shared = SharedRows(lambda b: self._keys_values(row, *cuts[b : b + 2]), len(cuts) - 1)
        if chunk or not len(row.blocks):
            total = chunked_sum(step, len(edges) - 1, self.module.parameters(), shared=shared)
        else:
            total = step(0, *shared.joined())
        tokens = int(batch.host_labels.sum())
        metrics = {"loss": (total.detach(), torch.full((), tokens, device=device))}
        metrics |= {f"acc/depth_{k}": (sums.hits[k], sums.cases[k]) for k in range(slots)}
        metrics |= {f"accept/depth_{k}": (sums.accept[k], sums.valid[k]) for k in range(slots)}
        blocks = torch.full((), len(row.blocks), dtype=torch.float64, device=device)
        metrics["tau"] = (sums.hits.sum() + blocks, blocks)
        metrics["tau_sampled"] = (sums.reach.sum() + blocks, blocks)
        if self.module.confidence_head is not None:
            metrics["confidence_error"] = (sums.error.sum(), sums.valid.sum())
        if self.config.candidates:
            metrics["candidate_recall"] = (sums.known.sum(), sums.valid.sum())
        return Loss(total, tokens, metrics)

    @torch.no_grad()
    def _read(self, batch: Batch) -> _BlockRow:
        """Draw offsets, choose the blocks and run the target over the packed sequence."""
        c, device = self.config, batch.ids_T.device
        offsets = offsets_of(c, self.target.info, batch)
        pos_T = packed_sequences.positions(batch.bounds, offsets=offsets, anchors=c.anchors)
        every = c.anchor_every if self.training else 1
        blocks = anchors_of(batch.host_labels, batch.bounds, slots=c.block_size, every=every, seed=batch.seed)
        low, high = (int(blocks.start_A[0]), int(blocks.place_A[-1])) if len(blocks) else (0, 0)
        pos_T = packed_sequences.to_device(pos_T, device)
        step = self.target.packed(batch.ids_T, pos_T, batch.bounds, self.outputs)
        target_kv = [tuple(x[low:high] for x in step.kv[layer]) for layer in self.outputs.kv]
        return _BlockRow(batch, pos_T, blocks, step.hidden, low, high, target_kv)

    def _keys_values(self, row: _BlockRow, start: int, stop: int) -> list[Tensor]:
        """Return the draft's keys and values of tokens start..stop, each [stop - start, G, D]."""
        weight = self.module.fc.weight
        states = [cast_to(weight, row.hidden[layer][start:stop]) for layer in self.module.read]
        return self.module.keys_values(self.module.context(states), self.rope(row.pos_T[start:stop]))

    def _blocks(self, row: _BlockRow, part: slice, shared: tuple[Tensor, ...], sums: _SlotSums) -> Tensor:
        """Return the summed loss of some blocks; add to `sums`."""
        module, device, ids_T = self.module, row.pos_T.device, row.batch.ids_T
        place_A, valid_AK = row.blocks.place_A[part], row.blocks.valid_AK[part]
        slots = valid_AK.shape[1]
        hidden_AKE = self._draft(row, part, shared)
        # the slots that learn, in order: position p + k of each
        of_A, slot_N = valid_AK.nonzero().unbind(1)
        share_N = row.blocks.share_A[part][of_A]
        weight_K = torch.exp(-torch.arange(slots, dtype=torch.float64) / self.config.block_decay)
        weight_N = share_N * (weight_K / weight_K.sum())[slot_N]
        # slots of several blocks predict the same token, whose distribution is computed once
        token_W, number_N = (place_A[of_A] + slot_N).unique(return_inverse=True)
        token_W, at_N, weight_N, flat_N = (
            packed_sequences.to_device(x, device)
            for x in (token_W, place_A[of_A] + slot_N, weight_N, of_A * slots + slot_N)
        )
        if row.batch.weights_T is not None:
            weight_N = weight_N * row.batch.weights_T[at_N + 1]
        hidden_NE = hidden_AKE.flatten(0, 1)[flat_N]
        path, confidence = module.path_head, module.confidence_head
        before_NF = None if path is None else path.context(hidden_NE, ids_T[at_N])
        head = module.lm_head
        learned = Learned(
            row.hidden[-1][token_W],
            self.target.head_weight,
            ids_T[at_N + 1],
            weight_N,
            token_N=number_N,
            draft_ids_K=module.draft_ids_K,
        )
        matrix_KF = None if path is None else path.matrix
        c = self.config
        factors = (c.ce_weight, c.l1_weight, c.kl_decay, c.selector_weight)
        weighing = Weighing(c.objective, *factors, candidates=c.candidates)
        own_KE = None if head is None else head.weight
        found = slot_loss(hidden_NE, before_NF, matrix_KF, learned, weighing, head_KE=own_KE)
        total, confident_N = found.total, None
        if confidence is not None and before_NF is not None:
            logit_N = confidence(hidden_NE, before_NF).to(found.accept_N.dtype)
            each_N = binary_cross_entropy_with_logits(logit_N, found.accept_N, reduction="none")
            total = total + self.config.confidence_weight * (each_N * weight_N.to(each_N.dtype)).sum()
            confident_N = logit_N.detach().sigmoid()
        sums.add(packed_sequences.to_device(valid_AK, device), flat_N, found, confident_N)
        return total

    def _draft(self, row: _BlockRow, part: slice, shared: tuple[Tensor, ...]) -> Tensor:
        """Return the head's input of all slots of some blocks, [A, K, E]."""
        blocks, rows, device, module = row.blocks, self.config.rows, row.pos_T.device, self.module
        place_A = packed_sequences.to_device(blocks.place_A[part], device)
        ids_AR = self.module.mask_id.to(device).expand(len(place_A), rows).clone()
        ids_AR[:, 0] = row.batch.ids_T[place_A]
        embed_ARE = cast_to(self.module.fc.weight, self.target.embed(ids_AR).detach())
        rope = self.rope(row.pos_T[place_A, None] + torch.arange(rows, device=device))
        starts, anchors = blocks.start_A[part] - row.low, blocks.place_A[part] - row.low

        def attend(layer: int, q_ARHD: Tensor, k_ARGD: Tensor, v_ARGD: Tensor) -> Tensor:
            if layer in module.own:
                at = 2 * module.own.index(layer)
                k_SGD, v_SGD = shared[at : at + 2]
            else:
                k_SGD, v_SGD = (x.to(q_ARHD.dtype) for x in row.target_kv[0])
            window, own, keys = self.config.layer_windows[layer], (k_ARGD, v_ARGD), (k_SGD, v_SGD)
            return anchored_attention(q_ARHD, own, keys, starts, anchors, scale=module.scale, window=window)

        return module.block(embed_ARE, rope, attend)
