"""Run where vLLM's Python files lie: what its own classes of block drafts compute for folders, on a CPU.

python vllm_block_worker.py JOB.json RESULT.safetensors

Real: reading the configuration, choosing the class, `Qwen3DSparkForCausalLM` and `DFlashQwen3ForCausalLM`
with their loaders, layers and context keys and values, the layers that the target gives, the mask token, and
the sequential sampling of `DSparkSpeculator`. Stood in for: attention with its cache, in plain torch after
the rules of vLLM's FlashAttention backend, and operators of its compiled libraries.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention


class Cache:
    """Takes the place of an attention backend: keys and values of a layer by position."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def do_kv_cache_update(self, layer: Any, k: Any, v: Any, kv_cache: Any, slots: torch.Tensor) -> None:
        self.kept.update({int(s): (k[i], v[i]) for i, s in enumerate(slots)})


class Attention(torch.nn.Module):
    """Attention of a block to its cache and itself; `causal` and `places` are set before a forward."""

    def __init__(self, heads: int, dim: int, scale: float, *, num_kv_heads: int, **given: Any) -> None:
        super().__init__()
        self.heads, self.dim, self.scale, self.groups = heads, dim, scale, num_kv_heads
        self.window = given["per_layer_sliding_window"]
        self.layer_name, self.kv_cache, self.impl = given["prefix"], None, Cache()
        assert given["sinks"] is None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kept = self.impl.kept
        before = torch.tensor(sorted(kept), dtype=torch.long)
        old = [torch.stack([kept[int(place)][part] for place in before]) for part in (0, 1)]
        new = [part.view(-1, self.groups, self.dim) for part in (k, v)]
        keys, values = (torch.cat(pair).transpose(0, 1) for pair in zip(old, new, strict=True))
        away = self.places[:, None] - torch.cat((before, self.places))
        sees = away >= 0 if self.causal else torch.ones_like(away, dtype=torch.bool)
        if self.window is not None:
            sees &= away < self.window
            sees &= away > -self.window
        mixed = scaled_dot_product_attention(
            q.view(-1, self.heads, self.dim).transpose(0, 1),
            keys,
            values,
            attn_mask=sees,
            scale=self.scale,
            enable_gqa=True,
        )
        return mixed.transpose(0, 1).flatten(1)


def rotary_embedding(
    places: torch.Tensor, k: torch.Tensor, _none: None, dim: int, table: torch.Tensor, neox: bool
) -> None:
    """Rotate keys in place, by a table of cos and sin."""
    assert neox
    cos, sin = table[places].chunk(2, -1)
    heads = k.view(len(places), -1, dim)
    low, high = heads.clone().chunk(2, -1)
    heads[..., : dim // 2] = low * cos[:, None] - high * sin[:, None]
    heads[..., dim // 2 :] = high * cos[:, None] + low * sin[:, None]


def norm_into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """RMSNorm of the last dim; a weight of two dims has a row for each of the first dim of `x`."""
    scale = weight if weight.ndim == 1 else weight.view(len(weight), *[1] * (x.ndim - 2), -1)
    out.copy_(rms_norm(x, x.shape[-1:], None, eps) * scale)


def build(folder: str, target: Any, method: str) -> tuple[Any, Any, Any]:
    """Return the model with a folder's weights, its configuration, and the speculative one."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.models import qwen3_dflash
    from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.configs.eagle import EAGLEConfig
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    qwen3_dflash.Attention = Attention
    qwen3_dflash.ops = SimpleNamespace(rms_norm=norm_into, rotary_embedding=rotary_embedding)
    hf = get_config(folder, trust_remote_code=False)
    if method == "dflash" and not isinstance(hf, SpeculatorsConfig):
        hf = EAGLEConfig(hf, method="dflash", model_type="eagle")
    file, name = _SPECULATIVE_DECODING_MODELS[hf.architectures[0]]
    draft = SimpleNamespace(hf_config=hf, model=folder, revision=None, quantization=None)
    spec = SimpleNamespace(draft_model_config=draft, num_speculative_tokens=5, quantization=None)
    config = VllmConfig()
    config.speculative_config = spec
    config.model_config = SimpleNamespace(
        get_total_num_hidden_layers=lambda: target.num_hidden_layers,
        get_vocab_size=lambda: target.vocab_size,
        dtype=torch.float32,
        head_dtype=torch.float32,
        quantization=None,
    )
    # what DSpark runs in, on GPUs alone
    VllmConfig.use_v2_model_runner = True
    with set_current_vllm_config(config):
        model = getattr(importlib.import_module(f"vllm.model_executor.models.{file}"), name)(
            vllm_config=config, prefix="draft"
        )
        model.load_weights(load_file(f"{folder}/model.safetensors").items())
    model.model.do_not_compile = True
    for module in model.modules():
        module.cpu_linear = linear
    return model.float().eval(), hf, spec


@torch.no_grad()
def blocks(case: dict[str, Any], job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what the class computes for every anchor, with greedy chains."""
    from transformers import AutoConfig
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    method, drafted = case["method"], case["drafted"]
    model, hf, spec = build(case["folder"], AutoConfig.from_pretrained(job["target"]), method)
    weights = load_file(f"{job['target']}/model.safetensors")
    # vLLM pads vocabularies, and takes both from the target where a folder has none
    for module, name in ((model.model.embed_tokens, "model.embed_tokens"), (model.lm_head, "lm_head")):
        if name == "lm_head" and getattr(model, "has_own_lm_head", False):
            continue
        rows = weights[f"{name}.weight"]
        module.weight.data[: len(rows)].copy_(rows)
    inputs = load_file(case["inputs"])
    # as DSparkSpeculator and DFlashSpeculator count the rows of a block
    anchor = getattr(hf, "sample_from_anchor", True) if method == "dspark" else False
    rows, mask = drafted + (not anchor), get_parallel_drafting_token_id(hf)
    found: dict[str, list[torch.Tensor]] = {}
    for place in inputs["anchors"].tolist():
        at = torch.arange(place, place + rows)
        for layer, causal in zip(model.model.layers, model.get_draft_attn_causal(), strict=True):
            layer.self_attn.attn.impl = Cache()
            layer.self_attn.attn.places, layer.self_attn.attn.causal = at, causal
        context, before = model.combine_hidden_states(inputs["states"][:place]), torch.arange(place)
        model.precompute_and_store_context_kv(context, before, before)
        ids = torch.full((rows,), mask)
        ids[0] = inputs["ids"][place]
        hidden = model(ids, at)[0 if anchor else 1 :]
        found.setdefault("hidden", []).append(hidden)
        if method == "dflash":
            logits = model.compute_logits(hidden)
            found.setdefault("logits", []).append(logits)
            found.setdefault("tokens", []).append(logits.argmax(-1))
            continue
        seen: list[torch.Tensor] = []

        def greedy(logits: torch.Tensor, *_: Any, into: list[torch.Tensor] = seen) -> torch.Tensor:
            into.append(logits)
            return model.map_draft_to_target(logits.argmax(-1))

        confident = model.model.confidence_head is not None
        self = SimpleNamespace(
            model=model,
            num_speculative_steps=drafted,
            sample_indices=torch.arange(drafted),
            sample_idx_mapping=torch.zeros(drafted, dtype=torch.long),
            sample_pos=at[-drafted:] + anchor,
            input_buffers=SimpleNamespace(input_ids=ids),
            draft_tokens=torch.zeros(1, drafted, dtype=torch.long),
            draft_token_confidence_probs=torch.zeros(1, drafted),
            use_confidence_head=confident,
            _anchor_idx=torch.zeros(1, dtype=torch.long),
            _draft_topk=None,
            _sample_logits=greedy,
        )
        DSparkSpeculator._sample_sequential(self, 1, hidden)
        found.setdefault("logits", []).append(torch.cat(seen))
        found.setdefault("tokens", []).append(self.draft_tokens[0])
        if confident:
            found.setdefault("confidence", []).append(self.draft_token_confidence_probs[0])
    made = {name: torch.stack(parts).contiguous() for name, parts in found.items()}
    layers = get_eagle3_aux_layers_from_config(spec)
    assert layers is not None
    return {**made, "layers": torch.tensor(layers), "mask": torch.tensor([mask])}


def main(job_path: str, result_path: str) -> None:
    # its wheel is one for GPUs
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with open(job_path) as stream:  # noqa: PTH123
        job = json.load(stream)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{result_path}.store", 0, backend="gloo")
        initialize_model_parallel(1, 1)
    results = {}
    for name, case in job["cases"].items():
        results |= {f"{name}.{what}": part for what, part in blocks(case, job).items()}
    save_file(results, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
