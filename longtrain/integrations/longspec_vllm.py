"""A LongSpec draft in vLLM: drafts chains with an exported artifact, beside vLLM's own target.

This file stands alone (torch, safetensors, vLLM): put it where Python finds it, or name it inside longtrain.

    LLM(
        model=TARGET,
        speculative_config={
            "method": "custom_class",
            "model": "longtrain.integrations.longspec_vllm.LongSpecProposer",
            "num_speculative_tokens": 4,
        },
        additional_config={"longspec": "path/of/the/artifact"},
        enforce_eager=True,
    )

The draft reads the target's embeddings, LM head and rotary table, and the K and V that vLLM caches for one of
the target's layers. It has no state between cycles: its own K and V of a window of tokens depend on the
tokens alone. So prefix caching, preemption and requests that change their place in the batch need no special
handling. Drafts are greedy; vLLM accepts or rejects them, at any temperature.

vLLM does not pass the block table to a custom class, so it is taken from the caller, the V1 model runner. The
target itself comes through `load_model`; each layer has its own cache.
Tested with vLLM 0.32 on a CPU in fp32. Refused: tensor or pipeline parallelism, quantised caches, cascades of
blocks of another size, and bf16 on CPUs with AMX, whose packing of keys is internal to vLLM.

Note: keys and values are gathered for every cycle (4 KB a token for an 8B model), where a paged kernel would
    read them in place.

Source: LongSpec, arXiv 2502.17421, §3.1.

Shapes: R requests, W window, S cached tokens, N positions of a block, H query heads, G KV heads, D head dim,
E hidden dim, V vocabulary.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

KEY = "longspec"
"""Key of vLLM's `additional_config` that holds the artifact's folder."""


class LongSpecProposer:
    """The class that vLLM calls for drafts (`method: custom_class`).

    Args:
        vllm_config: vLLM's configuration, with the artifact's folder in `additional_config`.

    Raises:
        ValueError: no folder, a folder of another method, or an unsupported setting.
    """

    def __init__(self, vllm_config: Any) -> None:
        folder = (vllm_config.additional_config or {}).get(KEY)
        if not folder:
            raise ValueError(f"additional_config has no '{KEY}'; pass the folder of a LongSpec artifact")
        manifest = json.loads((Path(folder) / "longtrain.json").read_text(encoding="utf-8"))
        if manifest["method"] != "longspec":
            raise ValueError(f"{folder} holds an artifact of method '{manifest['method']}', not 'longspec'")
        if manifest["target"].get("layers"):
            raise ValueError(
                "the draft is for a target with sliding windows, which this plugin does not read"
            )
        rope = manifest["target"].get("rope") or {}
        if parts := [key for key in ("partial_rotary_factor", "neighbours") if rope.get(key)]:
            raise ValueError(
                f"the draft rotates heads as its target does ({parts[0]}={rope[parts[0]]}), and this plugin "
                "rotates whole heads, halves paired"
            )
        parallel = vllm_config.parallel_config
        if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
            raise ValueError("a LongSpec draft reads all heads of a layer; no tensor or pipeline parallelism")
        self.config, self.info = manifest["config"], manifest["target"]
        self.drafted = vllm_config.speculative_config.num_speculative_tokens
        self.max_tokens = vllm_config.model_config.max_model_len
        self.window = self.config["window"]
        if self.drafted > self.window:
            raise ValueError(f"num_speculative_tokens={self.drafted}; the draft's window is {self.window}")
        self._weights = load_file(Path(folder) / "model.safetensors")

    def load_model(self, target: Any) -> None:
        """Take the modules that the draft shares with the target, which vLLM has just loaded.

        Raises:
            ValueError: a target of another shape than the draft was trained for.
        """
        info, layers = self.info, target.model.layers
        layer = layers[self.config["kv_source_layer"] % info["n_layers"]].self_attn
        self.attention, self._target = layer.attn, target
        found = (len(layers), layer.attn.num_heads, layer.attn.num_kv_heads, layer.attn.head_size)
        wanted = (info["n_layers"], info["n_heads"], info["n_kv_heads"], info["head_dim"])
        if found != wanted:
            raise ValueError(f"the draft is for (layers, heads, KV heads, head dim) {wanted}, not {found}")
        table = layer.rotary_emb.cos_sin_cache
        embeddings = target.model.embed_tokens.weight
        self.device, self.dtype = embeddings.device, embeddings.dtype
        self._cos, self._sin = table.to(self.device).chunk(2, dim=-1)
        self._weights = {name: x.to(self.device, self.dtype) for name, x in self._weights.items()}

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft a chain for each request.

        Args:
            sampled_token_ids: the new tokens of each request; empty while its prompt is still being
                prefilled.
            num_tokens_no_spec: tokens of each request, the new ones included.
            token_ids_cpu: all tokens of each request.
            slot_mappings: not used.

        Returns:
            The drafted tokens of each request; empty if it is in prefill or near the maximum length.

        Raises:
            RuntimeError: the caller is not vLLM's V1 model runner.
        """
        runner = sys._getframe(1).f_locals.get("self")
        if not hasattr(runner, "input_batch") or not hasattr(runner, "kv_cache_config"):
            raise RuntimeError("LongSpecProposer.propose is called by vLLM's V1 model runner alone")
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = [
            row
            for row, new in enumerate(sampled_token_ids)
            if new and num_tokens_no_spec[row] + self.drafted < self.max_tokens
        ]
        if not rows:
            return drafts
        n_R = torch.as_tensor(num_tokens_no_spec[rows].astype(np.int64), device=self.device)
        keys, values = self._cached(runner, rows, int(n_R.max()) - 1)
        tokens_RK = self._chains(self._last_tokens(token_ids_cpu, rows, n_R), n_R, keys, values)
        for row, chain in zip(rows, tokens_RK.tolist(), strict=True):
            drafts[row] = chain
        return drafts

    def _last_tokens(self, token_ids: np.ndarray, rows: list[int], n_R: Tensor) -> Tensor:
        """Return the last W + 1 tokens of each request; shorter requests repeat their first token."""
        at = (n_R[:, None].cpu() - self.window - 1 + torch.arange(self.window + 1)).clamp(min=0)
        last = np.take_along_axis(token_ids[rows], at.numpy(), axis=1)
        return torch.as_tensor(last.astype(np.int64), device=self.device)

    def _chains(self, last_RW: Tensor, n_R: Tensor, k_RGSD: Tensor, v_RGSD: Tensor) -> Tensor:
        """Draft greedy chains below the last token of each request, int64_RK.

        Args:
            last_RW: the last W + 1 tokens.
            n_R: number of tokens of each request.
            k_RGSD: the target's keys of all tokens but the last.
            v_RGSD: the target's values of the same tokens.
        """
        place_RW = n_R[:, None] - 1 - self.window + torch.arange(self.window, device=self.device)
        before_RWE = self._normed(self._embed(last_RW[:, :-1]), "input_layernorm")
        own_k, own_v = self._keys_values(before_RWE, place_RW)  # [R, G, W, D]
        seen_RS = torch.arange(k_RGSD.shape[2], device=self.device) < n_R[:, None] - 1
        token_R, drafted = last_RW[:, -1], []
        for depth in range(self.drafted):
            pos_R1 = n_R[:, None] - 1 + depth
            x_R1E = self._embed(token_R[:, None])
            normed = self._normed(x_R1E, "input_layernorm")
            k_new, v_new = self._keys_values(normed, pos_R1)
            # grows to [R, G, W + depth + 1, D]
            own_k, own_v = torch.cat((own_k, k_new), 2), torch.cat((own_v, v_new), 2)
            place_RW = torch.cat((place_RW, pos_R1), 1)
            near_RW = (place_RW >= 0) & (place_RW >= pos_R1 - self.window)  # its sliding window
            q_RH1D = self._query("self_attn", normed, pos_R1)
            x_R1E = x_R1E + self._output("self_attn", _attend(q_RH1D, own_k, own_v, near_RW))
            if self.config["cross_attention"]:
                normed = self._normed(x_R1E, "post_self_attention_layernorm")
                q_RH1D = self._query("cross_attn", normed, pos_R1)
                x_R1E = x_R1E + self._output("cross_attn", _attend(q_RH1D, k_RGSD, v_RGSD, seen_RS))
            normed = self._normed(x_R1E, "post_cross_attention_layernorm")
            gate, up = (linear(normed, self._weights[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            x_R1E = x_R1E + linear(silu(gate) * up, self._weights["mlp.down_proj.weight"])
            if self.config["final_norm"]:
                x_R1E = self._normed(x_R1E, "norm")
            token_R = self._target.compute_logits(x_R1E[:, 0]).argmax(-1)
            drafted.append(token_R)
        return torch.stack(drafted, 1)

    def _embed(self, ids: Tensor) -> Tensor:
        return self._target.model.embed_tokens(ids)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[f"{name}.weight"]
        return rms_norm(x, weight.shape, weight, self.info["rms_norm_eps"])

    def _query(self, part: str, x_RTE: Tensor, pos_RT: Tensor) -> Tensor:
        """Return rotated queries, q_RHTD."""
        return self._rotated(self._heads(f"{part}.q", x_RTE, self.info["n_heads"]), pos_RT)

    def _keys_values(self, x_RTE: Tensor, pos_RT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the draft's own keys and values of tokens, each [R, G, T, D]."""
        heads = self.info["n_kv_heads"]
        key = self._rotated(self._heads("self_attn.k", x_RTE, heads), pos_RT)
        return key, self._heads("self_attn.v", x_RTE, heads)

    def _heads(self, name: str, x_RTE: Tensor, heads: int) -> Tensor:
        """Project to heads [R, heads, T, D], with a norm per head if the model has one."""
        bias = self._weights.get(f"{name}_proj.bias")
        out = linear(x_RTE, self._weights[f"{name}_proj.weight"], bias).unflatten(-1, (heads, -1))
        if f"{name}_norm.weight" in self._weights:
            out = self._normed(out, f"{name}_norm")
        return out.transpose(1, 2)

    def _rotated(self, x_RHTD: Tensor, pos_RT: Tensor) -> Tensor:
        """Apply RoPE from vLLM's own table, in fp32; the mask hides tokens at positions below 0."""
        at = pos_RT.clamp(min=0)
        cos, sin = (part[at][:, None].float() for part in (self._cos, self._sin))
        low, high = x_RHTD.float().chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x_RHTD.dtype)

    def _output(self, part: str, mixed_RHTD: Tensor) -> Tensor:
        return linear(mixed_RHTD.transpose(1, 2).flatten(2), self._weights[f"{part}.o_proj.weight"])

    def _cached(self, runner: Any, rows: list[int], tokens: int) -> tuple[Tensor, Tensor]:
        """Gather the target's keys and values of the first tokens of some requests, each [R, G, S, D].

        Raises:
            RuntimeError: a cache layout that this file does not read.
        """
        name, cache = self.attention.layer_name, self.attention.kv_cache
        groups = runner.kv_cache_config.kv_cache_groups
        group = next(index for index, one in enumerate(groups) if name in one.layer_names)
        table = runner.input_batch.block_table[group]
        heads, slots, wide = cache.shape[1:]
        dim = self.info["head_dim"]
        good = (heads, slots, wide) == (self.info["n_kv_heads"], table.block_size, 2 * dim)
        if not good or cache.dtype != self.dtype:
            raise RuntimeError(
                f"a KV cache of shape {tuple(cache.shape)} and {cache.dtype}; a LongSpec draft reads "
                f"[blocks, {self.info['n_kv_heads']}, {table.block_size}, {2 * dim}] in {self.dtype}"
            )
        count = -(-max(tokens, 1) // slots)
        index = torch.as_tensor(table.block_table.np[rows, :count].astype(np.int64), device=self.device)
        held = cache[index]  # [R, blocks, G, slots, 2 D]
        parts = _of_cpu(held, dim) if cache.device.type == "cpu" else held.split(dim, dim=-1)
        keys, values = (part.transpose(1, 2).flatten(2, 3) for part in parts)
        return keys, values


def _of_cpu(held: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Unpack keys and values of blocks from the layout of vLLM's CPU kernels, where keys are channel-major.

    Raises:
        RuntimeError: another packing.
    """
    if held.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        raise RuntimeError("vLLM packs bf16 keys for AMX on this CPU; pass dtype='float32'")
    *lead, slots, _ = held.shape
    keys, values = held.reshape(*lead, 2, slots * dim).unbind(-2)
    return keys.reshape(*lead, dim, slots).transpose(-1, -2), values.reshape(*lead, slots, dim)


def _attend(q_RHTD: Tensor, k_RGSD: Tensor, v_RGSD: Tensor, seen_RS: Tensor) -> Tensor:
    """Attend to the tokens that a request sees; zeros if it sees none."""
    mask = seen_RS[:, None, None]
    out = scaled_dot_product_attention(q_RHTD, k_RGSD, v_RGSD, attn_mask=mask, enable_gqa=True)
    return torch.where(seen_RS.any(1)[:, None, None, None], out, 0.0)
