"""LookaheadKV as its equations say it, one document at a time: everything concatenated, autograd through all.

Nothing of the code under test is used, only the target's weights and rotary angles. Norms run in the
tensors' own dtype (transformers' run in fp32 whatever comes in), so that fp64 is fp64.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from longtrain.targets.rotary import layer_rope


class Norm(torch.nn.Module):
    """RMSNorm in the dtype of its input."""

    def __init__(self, weight, eps, offset=0):
        super().__init__()
        self.offset = offset
        self.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x):
        return (
            (self.weight + self.offset)
            * x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        )


def exact(target):
    """Give a target norms that compute in its own dtype."""
    for layer in target.model.model.layers:
        exact_layer(layer, target.info.rms_norm_eps, target.family.norm_offset)
    return target


def exact_layer(layer, eps, offset=0):
    """The same of one decoder layer."""
    for owner in (layer, layer.self_attn):
        for name, module in list(owner.named_children()):
            if name.endswith("norm"):
                setattr(owner, name, Norm(module.weight, eps, offset))


def weights(module, layer, name, scale, suffix):
    """The LoRA of a linear as a full matrix applied to the suffix rows: a function x -> delta."""
    state = dict(module.named_parameters())
    a = state.get(f"layers.{layer}.{name}.lora_A.weight")
    b = state.get(f"layers.{layer}.{name}.lora_B.weight")

    def delta(x):
        if a is None or b is None:
            return 0
        return (x * suffix[:, None]) @ (scale * b @ a).T

    return delta


def attention_of(target, x_SE, suffix, module=None, scale=0.0):
    """Attention of every layer that sees the whole text, [H, S, S]; a sequence's suffix rows have LoRA."""
    info, S = target.info, len(x_SE)
    apart = torch.arange(S)[:, None] - torch.arange(S)

    def rotate(x):
        low, high = x.chunk(2, -1)
        return x * cos[0][:, None] + torch.cat((-high, low), -1) * sin[0][:, None]

    found = []
    for index, layer in enumerate(target.model.model.layers):
        cos, sin = layer_rope(target, index, torch.arange(S)[None], x_SE.dtype)
        window = info.windows[index]
        norms = [getattr(layer, name) for name in target.family.norms]
        after = [getattr(layer, name) for name in target.family.after or ()] or [lambda x: x] * 2

        def project(name, x, layer=layer, index=index):
            part, leaf = name.split(".")
            out = getattr(getattr(layer, part), leaf)(x)
            return out if module is None else out + weights(module, index, name, scale, suffix)(x)

        h = norms[0](x_SE)
        q = project("self_attn.q_proj", h).view(S, info.n_heads, info.head_dim)
        k = project("self_attn.k_proj", h).view(S, info.n_kv_heads, info.head_dim)
        v = project("self_attn.v_proj", h).view(S, info.n_kv_heads, info.head_dim)
        if info.qk_norm:
            q, k = layer.self_attn.q_norm(q), layer.self_attn.k_norm(k)
        group = info.n_heads // info.n_kv_heads
        q, k = rotate(q), rotate(k).repeat_interleave(group, 1)
        scores = torch.einsum("shd,thd->hst", q, k) * target.scaling(index)
        hidden = (apart < 0) | (apart >= (window or S))
        p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        if not window:
            found.append(p)
        out = torch.einsum("hst,thd->shd", p, v.repeat_interleave(group, 1)).reshape(S, -1)
        x_SE = x_SE + after[0](project("self_attn.o_proj", out))
        h = norms[1](x_SE)
        act = functional.silu if info.hidden_act == "silu" else partial(functional.gelu, approximate="tanh")
        inner = act(project("mlp.gate_proj", h)) * project("mlp.up_proj", h)
        x_SE = x_SE + after[1](project("mlp.down_proj", inner))
    return found


def truth(target, ids, length):
    """True scores of each layer, [H, length]."""
    p = attention_of(target, target.embed(ids), torch.zeros(len(ids)))
    return [one[:, length:, :length].mean(1) for one in p]


def predicted(target, ids, length, module, config):
    """Predicted scores of each layer, [H, length]."""
    n = config.n_lookahead
    x = torch.cat((target.embed(ids[:length]), module.lookahead_embeddings))
    suffix = torch.cat((torch.zeros(length), torch.ones(n))).to(x.dtype)
    p = attention_of(target, x, suffix, module, config.lora_alpha / config.lora_rank)
    found = []
    for one in p:
        s = one[:, length:, :length].mean(1)
        if 0 < config.suffix_window < length:
            s = (s + one[:, length - config.suffix_window : length, :length].mean(1)) / 2
        found.append(s)
    return found


def kl(pred, true):
    """Mean over heads of the KL of one layer."""
    pred, true = pred / pred.sum(-1, keepdim=True), true / true.sum(-1, keepdim=True)
    return (true * (true.log() - pred.clamp_min(1e-12).log())).sum(-1).mean()


def document_loss(target, ids, length, module, config):
    """The loss of one document, with a gradient."""
    with torch.no_grad():
        true = truth(target, ids, length)
    pred = predicted(target, ids, length, module, config)
    total = 0
    for p, t in zip(pred, true, strict=True):
        total = total + kl(p, t)
        for budget in config.budgets:
            best = t.topk(min(budget, length), -1).indices
            narrow = kl(p.gather(1, best), t.gather(1, best))
            total = total + config.budget_weight * narrow / len(config.budgets)
    return total / len(true)
