"""Run where SGLang's Python files lie: what its own classes compute for flat folders, on a CPU.

python sglang_block_worker.py JOB.json RESULT.safetensors

Real: `Qwen3DSparkModel` and `DFlashDraftModel` with their loaders, layers, context keys and values, heads and
the reading of `config.json`. Stood in for, in plain torch: attention with its cache, linear layers, norms and
RoPE, which need a GPU's libraries, and the rest of SGLang, of which these files take names alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

ROOT = Path(str(importlib.util.find_spec("sglang").origin)).parent  # type: ignore[union-attr]
REAL = ("models.dflash", "models.dspark", "speculative.dflash_utils")
REAL += ("speculative.dspark_components.dspark_config",)


class Names(ModuleType):
    """A module in which every name is found."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Finder:
    """Finds the files of `REAL` in SGLang, and nothing behind all its other names."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] != "sglang":
            return None
        file = ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py")
        if name.removeprefix("sglang.srt.") in REAL:
            return importlib.util.spec_from_file_location(name, file)
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


class Norm(nn.Module):
    """RMSNorm, with a sum before it."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        whole = x if residual is None else x + residual
        made = rms_norm(whole, self.weight.shape, self.weight, self.variance_epsilon)
        return made if residual is None else (made, whole)


class Unquantized:
    """The kind of linear layers whose weights may be cut."""


class Joined(nn.Module):
    """A linear layer whose weight is loaded in parts."""

    def __init__(self, inputs: int, outputs: dict[Any, int]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(sum(outputs.values()), inputs)), None
        self.quant_method = Unquantized()
        sizes = list(outputs.values())
        starts = {part: sum(sizes[:i]) for i, part in enumerate(outputs)}

        def load(param: nn.Parameter, loaded: torch.Tensor, part: Any = None) -> None:
            first = starts[part]
            param.data[first : first + outputs[part]] = loaded

        self.weight.weight_loader = load  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> Any:
        return linear(x, self.weight), None


def qkv(
    *, hidden_size: int, head_size: int, total_num_heads: int, total_num_kv_heads: int, **_: Any
) -> Joined:
    kv = total_num_kv_heads * head_size
    return Joined(hidden_size, {"q": total_num_heads * head_size, "k": kv, "v": kv})


def merged(inputs: int, sizes: list[int], **_: Any) -> Joined:
    return Joined(inputs, dict(enumerate(sizes)))


def single(inputs: int, outputs: int, **_: Any) -> Joined:
    return Joined(inputs, {None: outputs})


class Gated(nn.Module):
    """SiLU of the first half times the second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return silu(gate) * up


class Rope(nn.Module):
    """RoPE of heads that lie side by side."""

    def __init__(
        self, dim: int, *, rotary_dim: int, max_position: int, rope_scaling: Any, **given: Any
    ) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        assert given["is_neox_style"] and given["partial_rotary_factor"] == 1 and rotary_dim == dim
        shape = {"hidden_size": dim, "num_attention_heads": 1, "head_dim": dim}
        config = LlamaConfig(
            **shape, max_position_embeddings=max_position, rope_parameters=dict(rope_scaling)
        )
        self.dim, self.angles = dim, LlamaRotaryEmbedding(config)

    def forward(self, places: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
        cos, sin = (part[0, :, None] for part in self.angles(q, places[None]))

        def turned(x: torch.Tensor) -> torch.Tensor:
            heads = x.view(len(places), -1, self.dim)
            low, high = heads.chunk(2, -1)
            return (heads * cos + torch.cat((-high, low), -1) * sin).view_as(x)

        return turned(q), turned(k)


class Radix(nn.Module):
    """Attention of a block to its cache and itself, by the windows and kinds of its backends."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given, self.layer_id = given, given["layer_id"]
        self.k_scale = self.v_scale = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any) -> torch.Tensor:
        dim, groups = self.given["head_dim"], self.given["num_kv_heads"]
        old = batch.pool.kept[self.layer_id]
        new = [part.view(-1, groups, dim) for part in (k, v)]
        keys, values = (torch.cat(pair).transpose(0, 1) for pair in zip(old, new, strict=True))
        away = batch.places[:, None] - torch.cat((torch.arange(len(old[0])), batch.places))
        causal, left = self.given["attn_type"] == "decoder", self.given["sliding_window_size"]
        sees = away >= 0 if causal else torch.ones_like(away, dtype=torch.bool)
        if left >= 0:
            sees &= (away <= left) & (away >= -left)
        query = q.view(len(batch.places), -1, dim).transpose(0, 1)
        scale = self.given["scaling"]
        mixed = scaled_dot_product_attention(
            query, keys, values, attn_mask=sees, scale=scale, enable_gqa=True
        )
        return mixed.transpose(0, 1).flatten(1)


class Pool:
    """Keys and values of every layer."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def set_kv_buffer(self, layer: Any, loc: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any) -> None:
        dim = layer.given["head_dim"]
        self.kept[layer.layer_id] = (k.reshape(len(k), -1, dim), v.reshape(len(v), -1, dim))


def head_norms(q: Any, k: Any, q_norm: Norm, k_norm: Norm, dim: int, **_: Any) -> Any:
    return tuple(norm(x.view(*x.shape[:-1], -1, dim)).view_as(x) for x, norm in ((q, q_norm), (k, k_norm)))


def theirs() -> tuple[Any, Any]:
    """Their modules of DFlash and DSpark, with what stands in for layers."""
    sys.modules.pop("sglang", None)
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    first: dict[str, Any] = {"get_compiler_backend": lambda: "eager"}
    sys.modules["sglang.srt.utils.common"] = importlib.import_module("sglang.srt.utils.common")
    vars(sys.modules["sglang.srt.utils.common"]).update(first)
    vars(importlib.import_module("sglang.srt.utils")).update(
        is_npu=lambda: False, is_gfx95_supported=lambda: False
    )
    unquant = importlib.import_module("sglang.srt.layers.quantization.unquant")
    vars(unquant).update(UnquantizedLinearMethod=Unquantized)
    kinds = SimpleNamespace(DECODER="decoder", ENCODER_ONLY="encoder_only")
    dflash = importlib.import_module("sglang.srt.models.dflash")
    vars(dflash).update(
        RMSNorm=Norm,
        QKVParallelLinear=qkv,
        RowParallelLinear=single,
        MergedColumnParallelLinear=merged,
        SiluAndMul=Gated,
        get_rope=Rope,
        RadixAttention=Radix,
        AttentionType=kinds,
        apply_qk_norm=head_norms,
        get_parallel=lambda: SimpleNamespace(tp_size=1),
        get_rope_config=lambda config: (config.rope_parameters["rope_theta"], config.rope_parameters),
        default_weight_loader=lambda param, loaded: param.data.copy_(loaded),
        LogitsProcessorOutput=SimpleNamespace,
    )
    dspark = importlib.import_module("sglang.srt.models.dspark")
    vars(dspark).update(
        should_apply_lm_head_quant_method=lambda *_: False,
        tensor_model_parallel_all_gather=lambda x, dim: x,
        default_weight_loader=vars(dflash)["default_weight_loader"],
    )
    return dflash, dspark


@torch.no_grad()
def blocks(case: dict[str, Any], job: dict[str, Any], dflash: Any, dspark: Any) -> dict[str, torch.Tensor]:
    """Return what the class computes for every anchor, with greedy chains."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(case["folder"])
    is_dspark = case["method"] == "dspark"
    # other modes ask for a confidence head, whatever the configuration says
    mode = dspark.RaggedVerifyMode.COMPACT if config.to_dict().get("enable_confidence_head") else None
    dspark.read_ragged_verify_mode = lambda: mode or dspark.RaggedVerifyMode.STATIC
    model = getattr(dspark if is_dspark else dflash, config.architectures[0])(config).float().eval()
    model.load_weights(load_file(f"{case['folder']}/model.safetensors").items())
    weights, inputs = load_file(f"{job['target']}/model.safetensors"), load_file(case["inputs"])
    embed, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    read = model.draft_config if not is_dspark else dspark.parse_dspark_draft_config(draft_hf_config=config)
    anchor = is_dspark and model.sample_from_anchor
    # as `dspark_draft` and DFLASH's `speculative_num_draft_tokens` count the rows of a block
    rows = (model.gamma + (not anchor)) if is_dspark else model.block_size
    found: dict[str, list[torch.Tensor]] = {}
    for place in inputs["anchors"].tolist():
        pool, at = Pool(), torch.arange(place, place + rows)
        context, before = model.project_target_hidden(inputs["states"][:place]), torch.arange(place)
        for layer in model.layers:
            attn = layer.self_attn
            k, v = attn.kv_proj_only(context)
            pool.set_kv_buffer(attn.attn, before, attn.apply_k_rope(before, attn.apply_k_norm(k)), v)
        ids = torch.full((rows,), read.mask_token_id)
        ids[0] = inputs["ids"][place]
        out = model(ids, at, SimpleNamespace(pool=pool, places=at), input_embeds=embed[ids])
        hidden = out.hidden_states[0 if anchor else 1 :]
        found.setdefault("hidden", []).append(hidden)
        if not is_dspark:
            found.setdefault("tokens", []).append((hidden @ head.T).argmax(-1))
            continue
        lm_head = SimpleNamespace(weight=head, quant_method=None, org_vocab_size=len(head), tp_size=1)
        model.attach_shared_modules(embed_tokens=nn.Embedding.from_pretrained(embed), lm_head=lm_head)
        base, features = model.compute_base_logits(hidden)
        tokens, last = [], ids[:1]
        for slot in range(len(hidden)):
            bias, _ = model.markov_head.step_bias(last, hidden_states=None, state=None)
            last = (base[slot : slot + 1] + bias).argmax(-1)
            tokens.append(last)
        chain = torch.cat(tokens)
        found.setdefault("tokens", []).append(chain)
        if config.enable_confidence_head:
            given = {"anchor_tokens": ids[:1], "draft_tokens": chain[None], "confidence_features": features}
            found.setdefault("confidence", []).append(model.compute_confidence(**given)[0][0])
    made = {name: torch.stack(parts).contiguous() for name, parts in found.items()}
    numbers = {"layers": read.target_layer_ids, "mask": [read.mask_token_id]}
    return made | {name: torch.tensor(part) for name, part in numbers.items()}


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    torch.set_num_threads(1)
    modules, results = theirs(), {}
    for name, case in job["cases"].items():
        results |= {f"{name}.{what}": part for what, part in blocks(case, job, *modules).items()}
    save_file(results, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
