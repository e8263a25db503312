"""Tests a draft on a text with its target: accepted shares, also with other interpretations of its config.

Shapes: T tokens, A blocks, K slots, E hidden dim, V vocabulary, X tokens that the draft can propose.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.methods.draft_checks import better, draft_of, heldout_tokens, judged, moved_layers
from longtrain.methods.dspark.config import MOST_ROWS, Config
from longtrain.methods.dspark.formats.blocks import block_states
from longtrain.methods.dspark.modules import DSparkDraft
from longtrain.targets.step import OutputRequest

if TYPE_CHECKING:
    from longtrain.methods.spec import Imported
    from longtrain.targets.model import Target

TOKENS, BLOCKS, SLOTS = 400, 192, 4
SERVED = "windows that move with the slot, as engines serve them"


@torch.no_grad()
def smoke(found: Imported, target: Target, less: int) -> tuple[list[str], list[str]]:
    """Measure how well the draft predicts its target on a text, with its config and with variants of it.

    Args:
        found: the draft, as read from its folder.
        target: the frozen target.
        less: see `block_states`.

    Returns:
        Lines on what was measured, and lines on what is wrong.
    """
    config = Config(**found.config)
    assert config.layers is not None
    ids_T = heldout_tokens(target, TOKENS)
    near = {layer + shift for layer in config.layers for shift in (-1, 0, 1)}
    wanted = tuple(sorted(layer for layer in near if 0 <= layer < target.info.n_layers - 1))
    pos_T = torch.arange(len(ids_T), device=target.device)
    step = target.packed(ids_T, pos_T, (0, len(ids_T)), OutputRequest("none", hidden=(*wanted, -1)))
    states = {layer: part.cpu().float() for layer, part in step.hidden.items() if layer != -1}
    last_TE = step.hidden[-1]

    def guesses(reading: Config, served: int | None = None) -> tuple[Tensor, Tensor]:
        return _guesses(found, target, reading, states, last_TE, ids_T.cpu(), served)

    share_KA, hit_KA = guesses(config)
    listed = ", ".join(f"{float(share):.3f}" for share in share_KA.mean(1))
    agree = float(hit_KA[0].double().mean())
    lines = [
        f"on a text: predicts the target's likeliest token in {agree:.1%} at slot 1; accepted shares of "
        f"slots 1 to {SLOTS}: {listed}"
    ]
    others = {what: guesses(reading)[1] for what, reading in _readings(config, target.info.n_layers).items()}
    wrong = judged(hit_KA, others, _commonest(target, last_TE))
    if config.windows is not None:
        served_KA = guesses(config, less)[1]
        served, trained = (float(hits.double().mean()) for hits in (served_KA, hit_KA))
        lines.append(f"{served:.1%} instead of {trained:.1%} with {SERVED}")
        if better(hit_KA, served_KA):
            wrong.append(f"{lines.pop()}; train with larger method.windows")
    return lines, wrong


def _commonest(target: Target, last_TE: Tensor) -> float:
    """Return the share of the target's commonest prediction."""
    best_T = torch.cat([target.head(part_TE).argmax(-1).cpu() for part_TE in last_TE.split(64)])
    return float(best_T.bincount().max()) / len(best_T)


def _readings(config: Config, n_layers: int) -> dict[str, Config]:
    """Return variants of the keys that folders often state wrongly."""
    moved = moved_layers(config.layers or [], n_layers - 2)
    found = {what: dataclasses.replace(config, layers=layers) for what, layers in moved.items()}
    other = not config.sample_from_anchor
    word = f"sample_from_anchor={str(other).lower()}"
    if other or config.block_size < MOST_ROWS:
        found[word] = dataclasses.replace(config, sample_from_anchor=other)
    return found


def _guesses(
    found: Imported,
    target: Target,
    config: Config,
    states: dict[int, Tensor],
    last_TE: Tensor,
    ids_T: Tensor,
    served: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the share of samples that the target accepts after the text's own tokens, and whether the most
    likely token is the target's, each [K, A].
    """
    module = draft_of(DSparkDraft, found.tensors, config, target.info)
    stop = len(ids_T) - SLOTS
    place_A = torch.arange(stop - BLOCKS, stop)
    ids_AR = module.mask_id.expand(BLOCKS, config.rows).clone()
    ids_AR[:, 0] = ids_T[place_A]
    embed_ARE = target.embed(ids_AR.to(target.device)).detach().cpu().float()
    states_TN = torch.cat([states[layer] for layer in module.read], -1)
    given = (states_TN, torch.arange(len(ids_T)), place_A, embed_ARE)
    hidden_AKE = block_states(module, config, target.info, *given, less=served)
    shares, hits = [], []
    for slot in range(SLOTS):
        if module.lm_head is None:
            rows_AE = hidden_AKE[:, slot].to(last_TE.device, last_TE.dtype)
            logits_AX = target.head(rows_AE).float().cpu()
        else:
            logits_AX = module.lm_head(hidden_AKE[:, slot])
        if module.markov_head is not None:
            logits_AX = logits_AX + module.markov_head(ids_T[place_A + slot])
        p_AV = target.head(last_TE[place_A + slot]).float().softmax(-1).cpu()
        best_A, p_AX = logits_AX.argmax(-1), p_AV
        if module.draft_ids_K is not None:
            best_A, p_AX = module.draft_ids_K[best_A], p_AV[:, module.draft_ids_K]
        shares.append(torch.minimum(logits_AX.softmax(-1), p_AX).sum(-1))
        hits.append(best_A == p_AV.argmax(-1))
    return torch.stack(shares), torch.stack(hits)
