"""Outputs of an exported draft on fixed inputs, recorded beside its files and compared by `verify`.

The target's states are random: only the draft runs, in fp32 on a CPU. Tokens before a block are on both sides
of each window's edge and far apart, so that an edge off by one, a missing window or another rotary base
changes the block. Embeddings, and the LM head unless the draft has one of its own, are the target's and not
in the folder: the rows of the embeddings that were used are recorded, and compared where a target is given.

Shapes: T tokens before blocks, A blocks, R rows of a block, K slots, E hidden dim, V tokens that the draft
can propose, N the target's states of all read layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from longtrain.layers import exact_products
from longtrain.methods.draft_checks import Recorded, distance, draft_of
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.formats.blocks import block_states
from longtrain.methods.dspark.modules import DSparkDraft
from longtrain.methods.vocabulary import IDS
from longtrain.targets.info import TargetInfo

if TYPE_CHECKING:
    from longtrain.targets.model import Target

FAR = 256
"""Position of the last anchor, unless twice the window is larger."""
LIMIT = 1e-4
"""Largest relative distance of a slot's outputs, on any machine."""


@dataclass(frozen=True)
class Blocks(Recorded):
    """Fixed inputs and the draft's outputs for them.

    Args:
        pos_T: positions of the tokens before blocks, ascending, int64.
        states_TN: the target's states there, fp32.
        place_A: positions of the anchors.
        before_AK: token before the one that each slot predicts: the anchor, then forced tokens.
        embed_AE: embeddings of the anchors, fp32.
        mask_E: embedding of the mask token.
        mask_id: id of the mask token, [1].
        hidden_AKE: the head's input.
        markov_AKV: what the Markov head or the selector adds to the logits, of all tokens; without one
            [A, K, 0].
        confidence_AK: the logit of the confidence; without such a head [A, 0].
        tokens_AK: the most likely token of each slot, in the target's vocabulary.
        logits_AKV: logits by the draft's own LM head, without the Markov head; [0] if it is the target's.
        draft_ids_V: the vocabulary of such a head, int64; else [0].
    """

    pos_T: Tensor
    states_TN: Tensor
    place_A: Tensor
    before_AK: Tensor
    embed_AE: Tensor
    mask_E: Tensor
    mask_id: Tensor
    hidden_AKE: Tensor
    markov_AKV: Tensor
    confidence_AK: Tensor
    tokens_AK: Tensor
    logits_AKV: Tensor
    draft_ids_V: Tensor

    @classmethod
    def record(cls, tensors: Mapping[str, Tensor], config: Config, target: Target) -> Blocks:
        """Run a module on the fixed inputs and record its outputs."""
        gen, info = torch.Generator().manual_seed(0), target.info
        pos_T, place_A = golden_places(config, info)
        states_TN = torch.randn(len(pos_T), tensors["fc.weight"].shape[1], generator=gen)
        shape = (len(place_A), config.block_size)
        before_AK = torch.randint(info.vocab_size, shape, generator=gen)
        embed_AE, mask_E = _rows(target, before_AK[:, 0]), _rows(target, tensors["mask_id"])[0]
        inputs = (pos_T, states_TN, place_A, before_AK, embed_AE, mask_E)
        made = _ask(tensors, config, info, *inputs)
        mask, outputs = tensors["mask_id"].cpu(), (made.hidden_AKE, made.markov_AKV, made.confidence_AK)
        if IDS not in tensors:
            tokens_AK = _tokens(target, made.hidden_AKE, made.markov_AKV, config.candidates)
            return cls(*inputs, mask, *outputs, tokens_AK, made.logits_AKV, torch.zeros(0, dtype=torch.long))
        ids_V, best_AK = tensors[IDS].cpu(), _likeliest(made.logits_AKV, made.markov_AKV)
        return cls(*inputs, mask, *outputs, ids_V[best_AK], made.logits_AKV, ids_V)

    def replay(self, tensors: Mapping[str, Tensor], config: Config, info: TargetInfo) -> list[str]:
        """Compute the outputs again, and return a message for each difference.

        Args:
            tensors: the module's state, as read from the folder.
            config: hyperparameters, as read from the folder.
            info: the target, as far as known from the folder.

        Raises:
            RuntimeError: tensors have other shapes or dtypes than the recorded ones.
        """
        inputs = (self.pos_T, self.states_TN, self.place_A, self.before_AK, self.embed_AE, self.mask_E)
        made = _ask(tensors, config, info, *inputs)
        mask, exported = int(tensors["mask_id"]), int(self.mask_id)
        wrong = [] if mask == exported else [f"the mask token is {mask} (exported: {exported})"]
        expected = (self.hidden_AKE, self.markov_AKV, self.confidence_AK, self.logits_AKV)
        names = (
            *(
                "the states of a block's slots are",
                "the Markov head or selector adds",
                "the confidence is",
            ),
            "the logits of the draft's own LM head are",
        )
        for what, got, then in zip(names, made, expected, strict=True):
            if got.shape != then.shape:
                shapes = f"{list(got.shape)} (recorded: {list(then.shape)})"
                wrong.append(f"{what} something else: shape {shapes}")
            elif (
                got.numel()
                and not (far := distance(got, then) if got.ndim == 3 else _apart(got, then)) <= LIMIT
            ):
                wrong.append(f"{what} something else at a relative distance of {far:.2g} (allowed {LIMIT:g})")
        if IDS not in tensors:
            return wrong
        ids_V = tensors[IDS].cpu()
        same_V = torch.isin(ids_V, self.draft_ids_V)
        if not bool(same_V.all()):
            wrong.append(
                f"{int(same_V.sum())} of {len(ids_V)} tokens of the draft's vocabulary are the recorded ones"
            )
        same_AK = ids_V[_likeliest(made.logits_AKV, made.markov_AKV)] == self.tokens_AK
        if not bool(same_AK.all()):
            wrong.append(f"{int(same_AK.sum())} of {same_AK.numel()} drafted tokens are the recorded ones")
        return wrong

    def compare(self, target: Target, mask: int, top: int) -> list[str]:
        """Compare what was taken from the target, and return a message for each difference.

        Args:
            target: the target at hand.
            mask: id of the mask token, as read from the folder.
            top: tokens of a slot that are chosen among; 0: all.
        """
        wrong = []
        rows_NE = _rows(target, torch.cat((self.before_AK[:, 0], torch.tensor([mask]))))
        if not _apart(rows_NE[:-1], self.embed_AE) <= 1e-2:
            wrong.append("the target's embeddings are not those that the draft was exported with")
        elif not _apart(rows_NE[-1], self.mask_E) <= 1e-2:
            wrong.append(
                f"the embedding of mask token {mask} is not the one that the draft was exported with"
            )
        if self.logits_AKV.numel():
            return wrong
        same = _tokens(target, self.hidden_AKE, self.markov_AKV, top) == self.tokens_AK
        if float(same.double().mean()) < 0.9:
            wrong.append(
                f"with the target's LM head {int(same.sum())} of {same.numel()} drafted tokens are as then"
            )
        return wrong


def golden_places(config: Config, info: TargetInfo) -> tuple[Tensor, Tensor]:
    """Return positions of tokens before blocks, around each window's edge, and of the anchors."""
    windows = {one for one in config.layer_windows if one is not None}
    last = min(max(FAR, *(2 * one for one in windows), 0), info.max_positions - config.rows)
    anchors = [max(2, last - 2 * config.rows - 3), last]
    near = range(-config.rows - 2, config.rows + 2)
    edges = [anchor - window + step for anchor in anchors for window in windows for step in near]
    places = {*range(6), *edges, *(anchor - 1 - step for anchor in anchors for step in range(8))}
    pos_T = torch.tensor(sorted(place for place in places if 0 <= place < last))
    return pos_T, torch.tensor(anchors)


class _Outputs(NamedTuple):
    """Outputs of blocks, as `Blocks` has them."""

    hidden_AKE: Tensor
    markov_AKV: Tensor
    confidence_AK: Tensor
    logits_AKV: Tensor


@torch.no_grad()
def _ask(
    tensors: Mapping[str, Tensor],
    config: Config,
    info: TargetInfo,
    pos_T: Tensor,
    states_TN: Tensor,
    place_A: Tensor,
    before_AK: Tensor,
    embed_AE: Tensor,
    mask_E: Tensor,
) -> _Outputs:
    """Compute the blocks."""
    with exact_products():
        module = draft_of(DSparkDraft, tensors, config, info)
        masks_AME = mask_E.expand(len(place_A), config.rows - 1, -1)
        embed_ARE = torch.cat((embed_AE[:, None], masks_AME), 1)
        hidden_AKE = block_states(module, config, info, states_TN, pos_T, place_A, embed_ARE)
        A, K = before_AK.shape
        head, confidence = module.path_head, module.confidence_head
        markov_AKV = hidden_AKE.new_zeros(A, K, 0) if head is None else head.added(hidden_AKE, before_AK)
        confidence_AK = hidden_AKE.new_zeros(A, 0)
        if head is not None and confidence is not None:
            confidence_AK = confidence(hidden_AKE, head.context(hidden_AKE, before_AK))
        logits_AKV = hidden_AKE.new_zeros(0) if module.lm_head is None else module.lm_head(hidden_AKE)
        return _Outputs(hidden_AKE, markov_AKV, confidence_AK, logits_AKV)


@torch.no_grad()
def _tokens(target: Target, hidden_AKE: Tensor, markov_AKV: Tensor, top: int) -> Tensor:
    """Return the most likely token of each slot by the target's LM head, [A, K]."""
    like = target.head_weight
    logits_AKV = target.head(hidden_AKE.to(like.device, like.dtype)).float().cpu()
    if not top:
        return _likeliest(logits_AKV, markov_AKV)
    at_AKC = logits_AKV.topk(min(top, logits_AKV.shape[-1])).indices
    best_AK1 = (logits_AKV + markov_AKV).gather(-1, at_AKC).argmax(-1, keepdim=True)
    return at_AKC.gather(-1, best_AK1)[..., 0]


def _likeliest(logits_AKV: Tensor, markov_AKV: Tensor) -> Tensor:
    """Return the place of each slot's most likely token, [A, K], with what the token before adds."""
    return (logits_AKV if not markov_AKV.numel() else logits_AKV + markov_AKV).argmax(-1)


def _rows(target: Target, ids_N: Tensor) -> Tensor:
    """Return rows of the target's embeddings, fp32 on the CPU, [N, E]."""
    return target.embed(ids_N.to(target.device)).detach().cpu().float()


def _apart(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest magnitude; NaN is infinite."""
    far = (got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-9)
    return float(torch.nan_to_num(far, nan=torch.inf))
