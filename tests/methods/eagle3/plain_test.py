"""The training-time test written out plainly, a document and a depth at a time, with dense masks.

Its keys are [those of all rows | own row at depth 1 | own row at depth 2 | ...], as EAGLE-3 §3.2 draws them.
"""

from __future__ import annotations

import torch

from longtrain.targets.step import OutputRequest


def value(objective, q, p, decay):
    """A row's loss from the draft's law over its vocabulary, and the target's law of the same tokens."""
    known = p / p.sum()
    kl, accept = (known * (known.log() - q.log())).sum(), torch.minimum(p, q).sum()
    mix = torch.exp(-decay * accept.detach())
    return {
        "kl": kl,
        "lk": -accept.log(),
        "tv": 1 - accept,
        "lk_hybrid": mix * kl + (1 - mix) * (1 - accept),
    }[objective]


def seen(n, depth, window, sinks):
    """[n, n + depth * n]: what row i sees at a depth."""
    mask = torch.zeros(n, n + depth * n, dtype=torch.bool)
    for i in range(n):
        for j in range(i + 1):
            mask[i, j] = not window or j >= i + depth - window or j < sinks
        for m in range(depth):
            mask[i, n + m * n + i] = True
    return mask


def attend(q, k, v, mask, scale):
    g = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    score = torch.einsum("ihd,jhd->hij", q, k) * scale
    return torch.einsum("hij,jhd->ihd", score.masked_fill(~mask, -torch.inf).softmax(-1), v)


def training_time_test(module, target, config, ids, pos, labels, rope):
    """Loss sum, and {(row, depth): guess is right} of one document."""
    n = len(ids)
    with torch.no_grad():
        step = target.packed(ids, pos, (0, n), OutputRequest("none", hidden=(*module.layers, -1)))
        children = torch.softmax(step.hidden[-1] @ target.head_weight.t(), -1)
    table = (
        module.embed_tokens.weight
        if module.embed_tokens is not None
        else target.embed(torch.arange(target.info.vocab_size))
    )
    feature = module.feature([step.hidden[layer] for layer in module.layers])
    keys, values = [], []
    total, hits = torch.zeros((), dtype=feature.dtype), {}
    for depth in range(config.depths):
        token = torch.tensor([int(ids[min(i + 1 + depth, n - 1)]) for i in range(n)])
        at = torch.stack([pos[min(i + depth, n - 1)] for i in range(n)])
        entry, residual = module.enter(table[token], feature)
        turn = rope(at)
        k, v = module.self_attn.keys_values(entry, turn)
        keys.append(k)
        values.append(v)
        mixed = attend(
            module.self_attn.query(entry, turn),
            torch.cat(keys),
            torch.cat(values),
            seen(n, depth, config.window, config.sinks),
            module.scale,
        )
        out, feature = module.after_attention(residual, mixed)
        for i in range(n - 2 - depth):
            if not labels[i + 2 + depth]:
                continue
            q = torch.softmax(module.lm_head(out[i]), -1)
            p = children[i + 1 + depth]
            chosen = p[module.draft_ids_K]
            total = total + config.depth_decay**depth * value(config.objective, q, chosen, config.kl_decay)
            hits[i, depth] = bool(module.draft_ids_K[q.argmax()] == p.argmax())
    return total, hits
