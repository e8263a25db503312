"""A block written out plainly: one query at a time, one softmax each, over one document's own states."""

from __future__ import annotations

import torch

from longtrain.methods.rope import ModuleRope
from longtrain.targets.step import OutputRequest


def context_states(draft, target, ids_T, pos_T):
    """The target's states of one document, and its input of the head."""
    request = OutputRequest("none", hidden=(*draft.read, -1))
    with torch.no_grad():
        hidden = target.packed(ids_T, pos_T, (0, len(ids_T)), request).hidden
    return [hidden[layer] for layer in draft.read], hidden[-1]


def last_kv(target, ids_T, pos_T):
    """Keys and values of one document in the target's last layer."""
    layer = target.info.n_layers - 1
    with torch.no_grad():
        return target.packed(ids_T, pos_T, (0, len(ids_T)), OutputRequest("none", kv=(layer,))).kv[layer]


def convolved(x_RE, kernels_RXG, base_OE):
    """Each row plus those before it, channel by channel, by kernels written out."""
    out, group = torch.zeros_like(x_RE), x_RE.shape[1] // kernels_RXG.shape[2]
    for row in range(len(x_RE)):
        for tap in range(min(len(base_OE), row + 1)):
            out[row] += (base_OE[tap] + kernels_RXG[row, tap].repeat_interleave(group)) * x_RE[row - tap]
    return out


def between(conv, x_RE, sublayer):
    """A sublayer between its two convolutions, if it has any."""
    if conv is None:
        return sublayer(x_RE)
    taps = conv.base_kernel.shape[1]
    kernels = (x_RE @ conv.kernel_projection.weight.T).view(len(x_RE), 2, taps, -1)
    inner = convolved(x_RE, kernels[:, 0], conv.base_kernel[0])
    return convolved(sublayer(inner), kernels[:, 1], conv.base_kernel[1])


def block_hidden(draft, target, config, states, pos_T, anchor, token, kv=None):
    """The head's input of every slot of the block at `anchor`, whose token is `token`: [K, E].

    `kv` is from `last_kv`, for layers that read the target's.
    """
    rope = ModuleRope(config, target)
    context = draft.context([state[:anchor] for state in states])
    ids = draft.mask_id.repeat(config.rows)
    ids[0] = token
    at = torch.arange(config.rows)
    begin = pos_T[anchor - 1] + 1 if len(pos_T) == anchor else pos_T[anchor]
    z = target.embed(ids).detach()
    for layer, window, own in zip(draft.layers, config.layer_windows, config.own_layers, strict=True):
        attention = layer.self_attn
        low = 0 if window is None else max(0, anchor - window)
        if own:
            k_c, v_c = attention.keys_values(context[low:], rope(pos_T[low:anchor]))
        else:
            k_c, v_c = (x[:anchor] for x in kv)

        def mixing(x, attention=attention, k_c=k_c, v_c=v_c):
            k_b, v_b = attention.keys_values(x, rope(begin + at))
            q = attention.query(x, rope(begin + at))
            groups = q.shape[1] // k_b.shape[1]
            k, v = (torch.cat(pair).repeat_interleave(groups, 1) for pair in ((k_c, k_b), (v_c, v_b)))
            share = (torch.einsum("rhd,chd->hrc", q, k) * draft.scale).softmax(-1)
            return attention.output(torch.einsum("hrc,chd->rhd", share, v))

        z = z + between(layer.attention_conv, layer.input_layernorm(z), mixing)
        z = z + between(layer.mlp_conv, layer.post_attention_layernorm(z), layer.mlp)
    return draft.norm(z)[0 if config.sample_from_anchor else 1 :]


def selector_score(selector, unary_V, hidden_E, before, token):
    """The score of one candidate after one token."""
    context_F = selector.predecessor_codebook[before] * (selector.hidden_projection.weight @ hidden_E)
    return unary_V[token] + (context_F * selector.successor_codebook[token]).sum()


def slot_logits(draft, target, hidden_KE, before_K):
    """Logits of slots after the tokens `before_K`, over the target's vocabulary: -inf for others' tokens."""
    ids, head, selector = draft.draft_ids_K, draft.markov_head, draft.candidate_selector
    logits = hidden_KE @ (target.head_weight if ids is None else draft.lm_head.weight).T
    if head is not None:
        logits = logits + head.markov_w1.weight[before_K] @ head.markov_w2.weight.T
    if selector is not None:
        scores = torch.full_like(logits, float("-inf"))
        for row, before in enumerate(before_K.tolist()):
            for token in logits[row].sort(descending=True).indices[: selector.top].tolist():
                scores[row, token] = selector_score(selector, logits[row], hidden_KE[row], before, token)
        return scores
    if ids is None:
        return logits
    whole = logits.new_full((len(logits), target.info.vocab_size), float("-inf"))
    return whole.index_copy(1, ids, logits)
