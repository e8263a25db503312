"""LookaheadKV as a press of NVIDIA's kvpress: score a prompt with the lookahead tokens of an exported module.

This file stands alone (torch, safetensors, transformers, kvpress): copy it beside your script, or import it.

    from lookaheadkv_kvpress import LookaheadKVPress

    with LookaheadKVPress(artifact="path/or/hub-id", budget=128)(model):
        model.generate(**tokenizer(prompt, return_tensors="pt").to(model.device), max_new_tokens=64)

and in kvpress's pipeline, with the question in the context (see below):

    pipe = pipeline("kv-press-text-generation", model=name)
    pipe(context + question, press=LookaheadKVPress(artifact="path", compression_ratio=0.9))["answer"]

**The context must include the question.** kvpress's pipeline compresses the context before it has seen the
question. A module whose `longtrain_eviction.json` says `query_aware: true` was trained on whole prompts: keep
the question in the context (`--query_aware` in kvpress's evaluation), and compare such results only with
query-aware ones. In `with press(model): model.generate(...)` the press sees the whole prompt anyway.

Nothing is injected into the model, so what it computes for the prompt does not change: the lookahead tokens
are a second stream that advances one layer with every call of `score`.
Tested with kvpress 0.5.5 (transformers 5.2). Families: Llama, Qwen2, Qwen3, Mistral, without sliding windows.
Supported wrappers score each layer of a prompt once: AdaKVPress, CriticalKVPress, CriticalAdaKVPress (call
`press.post_init_from_model(model)` first, it does not), ChunkKVPress, KeyRerotationPress, MergingPress,
DMSPress in prefill. Refused are those that score parts of a prompt, or answers: ChunkPress, BlockPress,
DecodingPress and DMSPress in decoding.
Source: LookaheadKV, arXiv 2603.10899, §3 and Algorithm 2.
Shapes: B batch, S prompt tokens, M lookahead tokens, H query heads, G KV heads, D head dim, E hidden dim,
R LoRA rank, X the lookahead queries of all query heads that share a KV head.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kvpress import ScorerPress
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, max_pool1d
from transformers import PreTrainedModel, QuantizedCache

logger = logging.getLogger(__name__)

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
"""`model_type`s whose decoder layers `_advance` can compute."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types whose angles do not depend on the length, so that a few more positions change no others."""

_FACTS = "longtrain_eviction.json"
_LORA = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight")
_BLOCK = 1 << 26
"""Most attention weights (fp32) in memory at once; beyond it, KV heads are processed one after the other."""

LayerLora = dict[str, tuple[Tensor, Tensor, float]]
"""LoRA of one layer: name of the linear -> (A [R, in], B [out, R], scale)."""


@dataclass
class LookaheadKVPress(ScorerPress):
    """Keeps the prompt tokens that the lookahead tokens of a trained module attend to most.

    Args:
        compression_ratio: share of the prompt's KV entries to evict; ignored if `budget` is given.
        artifact: an exported folder (or its `peft` folder), or a repository of the Hub (ORG/NAME).
        kernel_size: width of the max-pooling over scores, odd; None: the artifact's own (the paper's is 7).
        budget: KV entries kept in each layer and KV head, for any prompt length; None: by compression_ratio.

    Raises:
        ValueError: a value out of range; in use, an artifact that does not fit the model, or a wrapper, cache
            or batch that does not show `score` one whole prompt.
        RuntimeError: in use, layers scored out of order.
    """

    artifact: str | None = None
    kernel_size: int | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.__dict__["compression_ratio"] < 1:
            raise ValueError(f"compression_ratio={self.__dict__['compression_ratio']}; allowed: 0 to below 1")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget={self.budget}; allowed: 1 or more, or None")
        if self.kernel_size is not None and (self.kernel_size < 1 or self.kernel_size % 2 == 0):
            raise ValueError(f"kernel_size={self.kernel_size}; allowed: odd numbers from 1, or None")
        self._module: _Module | None = None
        self._loaded: tuple[str, weakref.ref[PreTrainedModel]] | None = None
        self._stream: _Stream | None = None
        self._length = 0

    def _get_ratio(self) -> float:
        """Return the share of KV entries to evict; with a budget, the share that fits the last prompt to it.

        Wrappers do not score at a ratio of 0, so if the whole prompt fits it is the smallest number above 0.
        """
        if getattr(self, "budget", None) is None:
            return float(self.__dict__["compression_ratio"])
        if self.budget >= self._length:  # type: ignore[operator]
            return sys.float_info.min
        return 1 - (self.budget + 0.5) / self._length  # type: ignore[operator]  # kvpress rounds down

    def _set_ratio(self, value: float) -> None:
        self.__dict__["compression_ratio"] = value

    compression_ratio = property(_get_ratio, _set_ratio)

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        """Load the artifact, once per model, and forget the last prompt; kvpress calls it in `press(model)`.

        Raises:
            ValueError: no artifact, files missing or of another model, or an unsupported model.
        """
        self._stream = None
        if self.artifact is None:
            raise ValueError(
                "artifact=None; give an exported folder or Hub id: LookaheadKVPress(artifact=...)"
            )
        if self._loaded is None or self._loaded[0] != self.artifact or self._loaded[1]() is not model:
            _check_model(model)
            self._module = _load(_folder(str(self.artifact)), model)
            self._loaded = (self.artifact, weakref.ref(model))

    def compress(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: dict
    ) -> tuple[Tensor, Tensor]:
        """Keep the best-scored KV entries of each KV head, in prompt order; of equal ones the earlier."""
        S, ratio = keys.shape[2], self.__dict__["compression_ratio"]  # 10 of 100 at 0.9: 1 - 0.9 is below 0.1
        n_kept = min(self.budget, S) if self.budget is not None else max(1, int(S * (1 - ratio) + 1e-6))
        if n_kept == S:
            return keys, values
        scores_BGS = self.score(module, hidden_states, keys, values, attentions, kwargs)
        best = scores_BGS.sort(dim=-1, descending=True, stable=True).indices[..., :n_kept]
        index = best.sort(-1).values[..., None].expand(-1, -1, -1, keys.shape[3])
        return keys.gather(2, index).contiguous(), values.gather(2, index).contiguous()

    @torch.no_grad()
    def score(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: dict
    ) -> Tensor:
        """Compute a layer on the lookahead tokens; return their pooled attention to the prompt, [B, G, S].

        Every layer is scored once, from layer 0 upwards; called again with the very same keys, it returns the
        same scores (ChunkKVPress does so on short prompts).

        Raises:
            ValueError: the input is not one whole prompt, the batch is padded, or the cache quantised.
            RuntimeError: layers come out of order, or the press is used outside `with press(model)`.
        """
        index, stream = int(module.layer_idx), self._stream
        if stream is not None and index == stream.layer - 1 and stream.keys() is keys:
            return stream.scores.clone()
        self._stream = None  # after an error the next prompt starts anew
        model = self._loaded[1]() if self._loaded is not None else None
        layer = _layers(model)[index] if model is not None else None
        if self._module is None or layer is None or layer.self_attn is not module:
            raise RuntimeError(
                "LookaheadKVPress has not seen this model; use it as `with press(model):`, or call "
                "press.post_init_from_model(model) first (in CriticalAdaKVPress, which does not)"
            )
        _check_whole(hidden_states, keys, kwargs)
        if index == 0:
            _check_padding(kwargs.get("attention_mask"))
            rows_ME = self._module.rows_ME.to(hidden_states.device, hidden_states.dtype)
            stream = _Stream(rows_ME.expand(len(keys), -1, -1), keys.shape[2])
        elif stream is None or stream.layer != index or stream.length != keys.shape[2]:
            due = "0" if stream is None else f"{stream.layer} on {stream.length} tokens"
            raise RuntimeError(
                f"LookaheadKVPress: asked for layer {index} on {keys.shape[2]} tokens, layer {due} was due: "
                f"every layer has to score each prompt once, from layer 0 upwards. {_USE}"
            )
        lora, last = self._module.lora[index], index == len(self._module.lora) - 1
        rows_BME, s_BHS = _advance(layer, lora, stream.rows_BME.to(keys.device), keys, values, last)
        s_BGXS = s_BHS.unflatten(1, (keys.shape[1], -1))  # [B, H, S] -> [B, G, H / G, S]
        s_BGS = s_BGXS.mean(2) if self._module.reduction == "mean" else s_BGXS.amax(2)
        kernel = self.kernel_size or self._module.kernel
        scores_BGS = max_pool1d(s_BGS, kernel, stride=1, padding=kernel // 2)
        stream.rows_BME, stream.layer, stream.keys = rows_BME, index + 1, weakref.ref(keys)
        stream.scores = scores_BGS.clone()  # a copy: wrappers write into the scores they get
        self._stream, self._length = stream, stream.length
        return scores_BGS


@dataclass
class _Module:
    """Contents of an artifact: embeddings of the lookahead tokens, LoRA by layer, and pooling."""

    rows_ME: Tensor
    lora: list[LayerLora]
    kernel: int
    reduction: str


@dataclass
class _Stream:
    """State of the lookahead tokens between layers; `keys` and `scores` are of layer `layer - 1`."""

    rows_BME: Tensor
    length: int
    layer: int = 0
    keys: Any = None
    scores: Any = None


def _advance(
    layer: Any, lora: LayerLora, rows_BME: Tensor, keys_BGSD: Tensor, values_BGSD: Tensor, last: bool
) -> tuple[Tensor, Tensor]:
    """Compute a decoder layer on the lookahead tokens; return hidden states and mean attention s_BHS.

    Of the last layer only the scores are needed, so the hidden states are returned unchanged there.
    """

    def project(block: Any, name: str, x: Tensor) -> Tensor:
        out: Tensor = getattr(block, name)(x)
        if name not in lora:
            return out
        A, B, scale = lora[name]
        return out + linear(linear(x, A.to(x.device)), B.to(x.device)) * scale

    def heads(name: str) -> Tensor:
        x_BMHD = project(attention, f"{name}_proj", x_BME).unflatten(-1, (-1, keys_BGSD.shape[3]))
        norm = getattr(attention, f"{name}_norm", None)  # Qwen3, between projection and rotation
        return (x_BMHD if norm is None else norm(x_BMHD)).transpose(1, 2)

    def rotated(x_BHMD: Tensor) -> Tensor:
        a, b = x_BHMD.chunk(2, -1)
        return x_BHMD * cos + torch.cat((-b, a), -1) * sin

    attention, M, S = layer.self_attn, rows_BME.shape[1], keys_BGSD.shape[2]
    x_BME = layer.input_layernorm(rows_BME)
    positions = torch.arange(S, S + M, device=rows_BME.device)[None]
    cos, sin = (part[:, None] for part in attention.rotary_emb(x_BME, positions))
    q_BHMD, k_BGMD, v_BGMD = rotated(heads("q")), rotated(heads("k")), None if last else heads("v")
    out_BHMD, s_BHS = _attend(q_BHMD, k_BGMD, v_BGMD, keys_BGSD, values_BGSD, attention.scaling)
    if out_BHMD is None:
        return rows_BME, s_BHS
    mixed_BME = out_BHMD.to(rows_BME.dtype).transpose(1, 2).flatten(2)
    rows_BME = rows_BME + project(attention, "o_proj", mixed_BME)
    x_BME = layer.post_attention_layernorm(rows_BME)
    gate = layer.mlp.act_fn(project(layer.mlp, "gate_proj", x_BME))
    inner = gate * project(layer.mlp, "up_proj", x_BME)
    return rows_BME + project(layer.mlp, "down_proj", inner), s_BHS


def _attend(
    q_BHMD: Tensor, k_BGMD: Tensor, v_BGMD: Tensor | None, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor | None, Tensor]:
    """Attend in fp32 to the prompt and earlier lookahead tokens: out_BHMD (None without v), s_BHS."""
    (B, H, M, D), G, S = q_BHMD.shape, keys.shape[1], keys.shape[2]
    # the query heads of a KV head become further queries: X = H / G * M
    q_BGXD = (q_BHMD.float() * scale).reshape(B, G, H // G * M, D)
    later = torch.ones(M, M, dtype=torch.bool, device=q_BHMD.device).triu(1).repeat(H // G, 1)
    step = max(1, _BLOCK // (B * H // G * M * (S + M)))
    outs, means = [], []
    for start in range(0, G, step):
        part = slice(start, start + step)
        q, own_k = q_BGXD[:, part], k_BGMD[:, part].float()
        own = (q @ own_k.mT).masked_fill(later, -torch.inf)
        p_BGXT = torch.cat((q @ keys[:, part].float().mT, own), -1).softmax(-1)
        means.append(p_BGXT[..., :S].unflatten(2, (-1, M)).mean(3).flatten(1, 2))  # mean over M
        if v_BGMD is not None:
            out = p_BGXT[..., :S] @ values[:, part].float() + p_BGXT[..., S:] @ v_BGMD[:, part].float()
            outs.append(out.unflatten(2, (-1, M)).flatten(1, 2))
    return torch.cat(outs, 1) if outs else None, torch.cat(means, 1)


_USE = "Use it alone or in AdaKVPress, CriticalKVPress, CriticalAdaKVPress or ChunkKVPress"


def _layers(model: Any) -> Any:
    return model.model.layers


def _check_model(model: Any) -> None:
    """Refuse a model whose layers `_advance` does not compute correctly."""
    config = model.config
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    rope = getattr(getattr(model.model, "rotary_emb", None), "rope_type", "default")
    reason = ""
    if config.model_type not in FAMILIES:
        reason = f"is of another family than {', '.join(FAMILIES)}"
    elif "sliding_attention" in (kinds or ()) or (window is not None and not kinds):
        reason = f"has sliding-window attention (window {window}); allowed: full attention in every layer"
    elif rope not in ROPE_TYPES:
        reason = f"has rotary embeddings of type '{rope}'; allowed: {', '.join(ROPE_TYPES)}"
    if reason:
        raise ValueError(f"LookaheadKVPress: model {config.name_or_path} ({config.model_type}) {reason}")


def _check_whole(hidden_states: Tensor, keys: Tensor, kwargs: dict) -> None:
    """Refuse everything except one whole prompt that was prefilled at once, with exact keys."""
    if isinstance(kwargs.get("cache", kwargs.get("past_key_values")), QuantizedCache):  # its older name
        raise ValueError("LookaheadKVPress needs exact keys; this cache is quantised: use a DynamicCache")
    seen, shown, S = int(kwargs["cache_position"][-1]) + 1, hidden_states.shape[1], keys.shape[2]
    if not seen == shown == S:
        raise ValueError(
            f"LookaheadKVPress was shown {shown} hidden states and {S} keys after {seen} tokens; it scores "
            "one whole prompt, prefilled at once. ChunkPress, BlockPress (parts of a prompt), DecodingPress, "
            "DMSPress(decoding=True) (answers), presses that evict before it and static caches do not work "
            f"with it. {_USE}"
        )


def _check_padding(mask: object) -> None:
    """Refuse a batch whose last query does not see every position: its prompts differ in length."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"LookaheadKVPress cannot read an attention mask of type {type(mask).__name__}; load the model "
            "with attn_implementation='sdpa', 'flash_attention_2' or 'eager'"
        )
    seen = mask if mask.dim() == 2 else mask[..., -1, :]
    if not bool((seen == 0 if seen.is_floating_point() else seen != 0).all()):
        raise ValueError(
            f"LookaheadKVPress: the batch of {len(mask)} is padded; allowed: prompts of one length. Run "
            "prompts of different lengths one by one"
        )


def _folder(artifact: str) -> Path:
    """Return the PEFT folder of an artifact on this machine or on the Hub."""
    local = Path(artifact).expanduser()
    if not local.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", artifact):
        from huggingface_hub import snapshot_download

        local = Path(snapshot_download(artifact, allow_patterns=["peft/*", "*.safetensors", "*.json"]))
    folder = local / "peft" if (local / "peft").is_dir() else local
    names, facts = [_FACTS, "lookahead_embeddings.safetensors"], folder / _FACTS
    if not facts.is_file() or json.loads(facts.read_text(encoding="utf-8")).get("lora", True):
        names += ["adapter_config.json", "adapter_model.safetensors"]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(
            f"artifact={artifact}: {folder} lacks {', '.join(missing)}; give the folder that `longtrain "
            "export` wrote for method=lookaheadkv, or its Hub id"
        )
    return folder


def _load(folder: Path, model: Any) -> _Module:
    """Read the PEFT folder and compare every shape with the model's."""
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    adapter = {"peft_type": "LORA", "bias": "none", "target_modules": [], "r": 1, "lora_alpha": 1}
    if facts.get("lora", True):
        adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    allowed: dict[str, tuple[Any, ...]] = {"peft_type": ("LORA",), "bias": ("none",)}
    allowed |= {"use_dora": (False, None), "rank_pattern": ({}, None), "alpha_pattern": ({}, None)}
    allowed |= {"pool": ("max",), "reduction": ("mean", "max"), "suffix_window": (0, None)}
    for key, values in allowed.items():
        if (found := {**adapter, **facts}.get(key)) not in values:
            raise ValueError(f"{folder}: LookaheadKVPress cannot use {key}={found}; allowed: {values}")
    rows_ME = load_file(folder / "lookahead_embeddings.safetensors")["lookahead_embeddings"]
    _check_shape(folder, "lookahead_embeddings", rows_ME, (facts["n"], model.config.hidden_size))
    if facts.get("query_aware"):
        logger.info("%s was trained with the question in view: keep it in the context", folder)
    return _Module(rows_ME, _lora(folder, adapter, _layers(model)), int(facts["kernel"]), facts["reduction"])


def _lora(folder: Path, adapter: dict[str, Any], layers: Any) -> list[LayerLora]:
    """Load the LoRA of each layer, on the layer's device and in its dtype."""
    pairs: list[dict[str, dict[str, Tensor]]] = [{} for _ in layers]
    tensors = load_file(folder / "adapter_model.safetensors") if adapter["target_modules"] else {}
    for name, tensor in tensors.items():
        match = _LORA.fullmatch(name)
        if match is None or int(match[1]) >= len(layers):
            raise ValueError(f"{folder}: adapter weights have {name}; the model has {len(layers)} layers")
        pairs[int(match[1])].setdefault(match[2], {})[match[3]] = tensor
    targets, rank, lora = set(adapter["target_modules"]), int(adapter["r"]), []
    scale = float(adapter["lora_alpha"]) / (rank**0.5 if adapter.get("use_rslora") else rank)
    for index, (layer, found) in enumerate(zip(layers, pairs, strict=True)):
        # of the last layer only queries and keys are used
        due = targets & {"q_proj", "k_proj"} if index == len(layers) - 1 else targets
        if missing := sorted(due - set(found)):
            raise ValueError(f"{folder}: adapter weights lack {', '.join(missing)} of layer {index}")
        weight, ready = layer.input_layernorm.weight, {}
        for name, pair in found.items():
            frozen = getattr(layer.self_attn, name, None) or getattr(layer.mlp, name, None)
            if frozen is None:
                raise ValueError(f"{folder}: adapter weights have {name}, which the model lacks")
            for side, shape in (("A", (rank, frozen.in_features)), ("B", (frozen.out_features, rank))):
                _check_shape(folder, f"layer {index} {name} lora_{side}", pair.get(side), shape)
            A, B = (pair[side].to("cpu" if weight.is_meta else weight.device, weight.dtype) for side in "AB")
            ready[name] = (A, B, scale)
        lora.append(ready)
    return lora


def _check_shape(folder: Path, what: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is None or tuple(tensor.shape) != shape:
        found = "nothing" if tensor is None else f"shape {list(tensor.shape)}"
        raise ValueError(
            f"{folder}: {what} has {found}, this model needs {list(shape)}: it was trained for another model"
        )
