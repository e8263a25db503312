"""Tests a draft on a text with its target: measures agreement, also with other interpretations of its config.

The target runs once over a few hundred tokens and the draft recursively, so no engine is needed.

Shapes: T tokens, R chains, E hidden dim, V the target's vocabulary, K the draft's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.methods.draft_checks import draft_of, heldout_tokens, judged, moved_layers
from longtrain.methods.eagle3.config import Config, layers_of
from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.methods.eagle3.recursion import recursion, rows_back
from longtrain.methods.rope import rotary_of
from longtrain.targets.info import draft_rope
from longtrain.targets.step import OutputRequest

if TYPE_CHECKING:
    from longtrain.methods.spec import Imported
    from longtrain.targets.model import Target

TOKENS, CHAINS, DEPTHS = 400, 256, 2


@torch.no_grad()
def smoke(found: Imported, target: Target) -> tuple[list[str], list[str]]:
    """Measure how well the draft predicts its target on a text, with its config and with variants of it.

    Args:
        found: the draft, as read from its folder.
        target: the frozen target.

    Returns:
        Lines on what was measured, and lines on what is wrong.
    """
    config = Config(**found.config)
    layers = layers_of(config, target.info.n_layers)
    config = dataclasses.replace(
        config, layers=list(layers), rope=config.rope or draft_rope(target.info.rope)
    )
    ids_T = heldout_tokens(target, TOKENS)
    near = {layer + shift for layer in layers for shift in (-1, 0, 1)}
    wanted = tuple(sorted(layer for layer in near if 0 <= layer < target.info.n_layers))
    pos_T = torch.arange(len(ids_T), device=target.device)
    step = target.packed(ids_T, pos_T, (0, len(ids_T)), OutputRequest("none", hidden=(*wanted, -1)))
    states = {layer: part.cpu().float() for layer, part in step.hidden.items() if layer != -1}
    probs_TV = target.head(step.hidden[-1]).float().softmax(-1).cpu()
    embed_TE = target.embed(ids_T).cpu().float()
    shares = {
        what: _shares(found, target, reading, states, embed_TE, probs_TV)
        for what, reading in _readings(config, target.info.n_layers).items()
    }
    asis_KR, hits_KR, common = shares.pop("as it is")
    agree = [float(part) for part in hits_KR.double().mean(-1)]
    lines = [
        "on a text: predicts the target's likeliest token in "
        + ", ".join(f"{share:.1%} at step {depth + 1}" for depth, share in enumerate(agree))
        + f"; accepted share {float(asis_KR.mean()):.3f}"
    ]
    return lines, judged(hits_KR, {what: hits for what, (_, hits, _) in shares.items()}, common)


def _readings(config: Config, n_layers: int) -> dict[str, Config]:
    """Return the configuration, and variants of the keys that folders often state wrongly."""
    found = {"as it is": config}
    for what, moved in moved_layers(config.layers or [], n_layers - 1).items():
        found[what] = dataclasses.replace(config, layers=moved)
    for key in ("norm_output", "norm_before_residual"):
        other: dict[str, Any] = {key: not getattr(config, key)}
        found[f"{key}={str(other[key]).lower()}"] = dataclasses.replace(config, **other)
    return found


def _shares(
    found: Imported,
    target: Target,
    config: Config,
    states: dict[int, Tensor],
    embed_TE: Tensor,
    probs_TV: Tensor,
) -> tuple[Tensor, Tensor, float]:
    """Return accepted share and hits per step [DEPTHS, R], and the share of the most common target token."""
    module = draft_of(Eagle3Draft, found.tensors, config, target.info)
    n_rows = len(embed_TE) - DEPTHS - 1
    feature_TE = module.feature([states[layer][:n_rows] for layer in module.layers])
    start = n_rows - CHAINS
    later_KRE = torch.stack([embed_TE[start + 1 + depth : n_rows + 1 + depth] for depth in range(1, DEPTHS)])
    made = recursion(
        module,
        feature_TE,
        (embed_TE[1 : n_rows + 1], later_KRE),
        rope=rotary_of(config, target.info),
        pos_T=torch.arange(n_rows),
        back_K=rows_back(config, DEPTHS),
        sinks=config.sinks,
    )
    shares, hits = [], []
    for depth in range(DEPTHS):
        probs_RV = probs_TV[start + 1 + depth : n_rows + 1 + depth]
        q_RK = made.logits_KRV[depth].softmax(-1)
        shares.append(torch.minimum(q_RK, probs_RV[:, module.draft_ids_K]).sum(-1))
        hits.append(module.draft_ids_K[q_RK.argmax(-1)] == probs_RV.argmax(-1))
    best_R = probs_TV[start + 1 : n_rows + 1].argmax(-1)
    common = float(best_R.bincount().max()) / len(best_R)
    return torch.stack(shares), torch.stack(hits), common
