"""Tests a draft on a text with its target: accepted shares, also with other interpretations of its
config and of its Markov tables.

Shapes: T tokens, A blocks, K slots, E hidden dim, V vocabulary, X tokens that the draft can propose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import linear

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
FIRST, SECOND = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"

Tables: TypeAlias = tuple[Tensor, Tensor]
"""`markov_w1` and `markov_w2`: a row for each token before a slot, and one for each drafted token."""
NO_TABLES: Mapping[str, Tables] = {}


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

    def guesses(
        reading: Config, served: int | None = None, tables: Mapping[str, Tables] = NO_TABLES
    ) -> list[tuple[Tensor, Tensor]]:
        own = tables.values()
        return _guesses(found, target, reading, states, last_TE, ids_T.cpu(), served, [None, *own])

    tables = _tables(found.tensors)
    (share_KA, hit_KA), *by_tables = guesses(config, tables=tables)
    listed = ", ".join(f"{float(share):.3f}" for share in share_KA.mean(1))
    agree = float(hit_KA[0].double().mean())
    lines = [
        f"on a text: predicts the target's likeliest token in {agree:.1%} at slot 1; accepted shares of "
        f"slots 1 to {SLOTS}: {listed}"
    ]
    readings = _readings(config, target.info.n_layers)
    others = {what: guesses(reading)[0][1] for what, reading in readings.items()}
    others |= {what: one[1] for what, one in zip(tables, by_tables, strict=True)}
    wrong = judged(hit_KA, others, _commonest(target, last_TE))
    if config.windows is not None:
        served_KA = guesses(config, less)[0][1]
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


def _tables(tensors: Mapping[str, Tensor]) -> dict[str, Tables]:
    """Return Markov tables to try in place of a folder's: exchanged, and with the rows of one moved."""
    if FIRST not in tensors:
        return {}
    first, second = tensors[FIRST].float(), tensors[SECOND].float()
    found = {"exchanged Markov tables": (second, first)} if first.shape == second.shape else {}
    for shift, what in ((1, "one lower"), (-1, "one higher")):
        found[f"rows of markov_w1 {what}"] = first.roll(shift, 0), second
        found[f"rows of markov_w2 {what}"] = first, second.roll(shift, 0)
    return found


def _guesses(
    found: Imported,
    target: Target,
    config: Config,
    states: dict[int, Tensor],
    last_TE: Tensor,
    ids_T: Tensor,
    served: int | None,
    tables: Sequence[Tables | None],
) -> list[tuple[Tensor, Tensor]]:
    """Return the share of samples that the target accepts after the text's own tokens, and whether the most
    likely token is the target's, each [K, A]: for each of some Markov tables (None: the draft's own).
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
    found_KA: list[list[tuple[Tensor, Tensor]]] = [[] for _ in tables]
    for slot in range(SLOTS):
        if module.lm_head is None:
            rows_AE = hidden_AKE[:, slot].to(last_TE.device, last_TE.dtype)
            base_AX = target.head(rows_AE).float().cpu()
        else:
            base_AX = module.lm_head(hidden_AKE[:, slot])
        p_AV = target.head(last_TE[place_A + slot]).float().softmax(-1).cpu()
        p_AX = p_AV if module.draft_ids_K is None else p_AV[:, module.draft_ids_K]
        before_A = ids_T[place_A + slot]
        for pair, own in zip(tables, found_KA, strict=True):
            logits_AX = base_AX
            if pair is not None:
                logits_AX = base_AX + linear(pair[0][before_A], pair[1])
            elif module.path_head is not None:
                logits_AX = module.path_head(base_AX, hidden_AKE[:, slot], before_A)
            best_A = logits_AX.argmax(-1)
            if module.draft_ids_K is not None:
                best_A = module.draft_ids_K[best_A]
            share_A = torch.minimum(logits_AX.softmax(-1), p_AX).sum(-1)
            own.append((share_A, best_A == p_AV.argmax(-1)))
    return [
        (torch.stack([share for share, _ in own]), torch.stack([hit for _, hit in own])) for own in found_KA
    ]
