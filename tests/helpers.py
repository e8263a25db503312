"""Shapes, drafts and checks that tests of several folders share."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from longtrain import cli, methods
from longtrain.cache.base import KVCache
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.roles import ChildChoice, Parts, TokenTree, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.decoding.stats import Stats
from longtrain.decoding.tree import depths
from longtrain.kernels.tree_attention.reference import masked_attention, visible_slots
from longtrain.methods.longspec.config import Config as LongSpecConfig
from longtrain.methods.longspec.runtime import LongSpecRuntime
from longtrain.targets.attention import NAME
from longtrain.targets.config_file import eos_ids_of
from longtrain.targets.info import check_supported
from longtrain.targets.loading import describe
from longtrain.targets.model import Target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest

PROCESSES = multiprocessing.get_context("forkserver")
"""Starts processes that need not import torch and transformers anew, which takes each 6 seconds."""
PROCESSES.set_forkserver_preload(
    ["longtrain.targets.loading", "lightning.pytorch", "rich.progress", "tests.helpers", "tests.training.toy"]
)
ONE_LAYER = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""The smallest target with the head size that a quantised cache takes."""
HEADS_OF_64 = {**SHAPES["llama_micro"], "hidden_size": 128, "intermediate_size": 128, "head_dim": 64}
"""Two layers of such heads."""


def token_ids(*lengths: int, vocab: int = 97, seed: int = 1, least: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(least, vocab, (length,), generator=gen).tolist() for length in lengths]


def attached(name: str, target: Any, keys: Mapping[str, Any] | None = None, **settings: Any) -> Parts:
    """The parts of a method with these settings and fresh weights, in the target's dtype.

    Args:
        name: of the method.
        target: what it is attached to.
        keys: inference keys, such as `budget_tokens`.
        settings: of its configuration.
    """
    spec = methods.get(name)
    config = spec.config(**settings)
    module = spec.build(config, target.info).to(target.device, target.dtype)
    return spec.attach(module, target, config, dict(keys or {}))


def noisy(module: nn.Module, *, seed: int = 5) -> Any:
    """The module with random weights so large that every part of it matters."""
    gen = torch.Generator().manual_seed(seed)
    for name, param in module.named_parameters():
        noise = torch.randn(param.shape, generator=gen, dtype=torch.float64)
        param.data = (1 + 0.2 * noise if "norm" in name else noise * 0.25).to(param.device, param.dtype)
    return module


def noisy_longspec(target: Any, *, window: int = 16) -> LongSpecRuntime:
    """A LongSpec draft at work, whose random weights all matter."""
    config = LongSpecConfig(window=window)
    module = methods.get("longspec").build(config, target.info)
    return LongSpecRuntime(noisy(module.to(target.device, target.dtype)), target, config)


class Recall:
    """A draft that knows the texts and proposes them with some wrong tokens; its state is two tensors.

    Each level's tokens hang below the right token of the level before, which stands at any of its places.
    """

    outputs = OutputRequest()

    def __init__(self, texts: list[list[int]], room: int = 8, device: str = "cpu") -> None:
        longest = max(map(len, texts)) + room
        self.text_BS = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
        self.first_B = torch.zeros(len(texts), dtype=torch.int64, device=device)

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: object, cache: KVCache) -> None:
        self.cache = cache
        self.first_B.copy_(n_B)

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: object, rng: object) -> TokenTree:
        tokens, parents, first, parent_B = [root_B[:, None]], [torch.full_like(root_B, -1)[:, None]], 1, 0
        for depth, width in enumerate(shape.widths, 1):
            at_B = self.cache.len_B - self.first_B + depth
            right_B1 = self.text_BS.gather(1, at_B.clamp(max=self.text_BS.shape[1] - 1)[:, None])
            wrong_B1 = ((at_B * 7 + self.first_B) % 11 < 3)[:, None]
            slot_BW = torch.arange(width, device=root_B.device).expand(len(root_B), width)
            on_B1 = (at_B % width)[:, None]
            token_BW = torch.where(slot_BW == on_B1, right_B1 + wrong_B1, right_B1 + 2 + slot_BW)
            tokens.append(token_BW % 97)
            parents.append(torch.zeros_like(token_BW) + parent_B)
            parent_B, first = first + on_B1, first + width
        depth_N = _depths(shape, root_B.device)
        return TokenTree(torch.cat(tokens, 1), torch.cat(parents, 1), depth_N, ChildChoice.POINT)

    def observe(self, tree: TokenTree, verdict: object, step: object) -> None:
        pass

    def bytes(self) -> int:
        return self.text_BS.nbytes

    def tensors(self) -> tuple[Tensor, ...]:
        return self.text_BS, self.first_B


@cache
def _depths(shape: TreeShape, device: torch.device) -> Tensor:
    """Kept for a shape: a captured cycle must find the tensor where it was."""
    return depths(shape, device)


def everywhere(q_BHTD, k_BGSD, v_BGSD, len_B, mask, *, scale, base=0, nodes=None, splits=None, first_BG=None):
    """Tree attention's reference as kernels run: over all cache positions, without a look at the lengths.

    `splits` is for kernels: how many parts of the cache are read side by side. With `first_BG` each head
    reads the whole buffer, and sees its own part of it.
    """
    rows, slots = q_BHTD.shape[2], k_BGSD.shape[2]
    if first_BG is not None:
        parts = []
        queries_G = q_BHTD.chunk(k_BGSD.shape[1], 1)
        for g, (first_B, own_B) in enumerate(zip(first_BG.T, len_B.T, strict=True)):
            visible = visible_slots(first_B + own_B, mask, rows=rows, slots=slots, base=base, nodes=nodes)
            visible = visible & (torch.arange(slots) >= first_B[:, None])[:, None]
            k, v = k_BGSD[:, g : g + 1], v_BGSD[:, g : g + 1]
            parts.append(masked_attention(queries_G[g], k, v, visible, scale=scale))
        return tuple(torch.cat(some, 1) for some in zip(*parts, strict=True))
    visible = visible_slots(len_B, mask, rows=rows, slots=slots, base=base, nodes=nodes)
    return masked_attention(q_BHTD, k_BGSD, v_BGSD, visible, scale=scale)


def chi_square(
    engine: Engine,
    prompt: list[int],
    shape: TreeShape,
    sampling: Sampling,
    *,
    tokens: int,
    runs: int,
    bins: int = 7,
) -> tuple[float, Stats]:
    """Two-sample chi-square of plain and drafted tokens behind the first one, and the drafted runs' counts.

    Tokens are counted modulo `bins`; there are `(tokens - 1) * (bins - 1)` degrees of freedom.

    Args:
        engine: with a draft, and room for a batch of `runs`.
        prompt: of every run.
        shape: of the drafts.
        sampling: at a temperature.
        tokens: of each text.
        runs: texts by either way.
        bins: see above.
    """
    counts = []
    for way, first in ((PLAIN, 0), (shape, 1000)):
        out = engine.generate(
            [prompt] * runs, max_new_tokens=tokens, sampling=sampling, shape=way, ignore_eos=True,
            sequence_ids=range(first, first + runs),
        )  # fmt: skip
        ids = torch.tensor(out.tokens)[:, 1:] % bins
        counts.append(torch.stack([torch.bincount(column, minlength=bins) for column in ids.T]).double())
    one, two = counts
    return float(((one - two).square() / (one + two).clamp(min=1)).sum()), out.stats


def target_from_model(model: Any, name: str = "in memory") -> Target:
    """Route the attention of a CausalLM in memory through the hook; the model itself is changed."""
    check_supported(model.config, name)
    model.set_attn_implementation(NAME)
    info = describe(model, tokenizer=None, name=name, eos_ids=eos_ids_of(model.config, None))
    return Target(model, info)


def in_a_process(words: Sequence[str], folder: Path) -> BaseProcess:
    """Start `longtrain` with these words in a process of its own, in a folder."""
    process = PROCESSES.Process(target=_longtrain, args=(list(words), folder))
    process.start()
    return process


def _longtrain(words: list[str], folder: Path) -> None:
    os.chdir(folder)
    sys.argv = ["longtrain", *words]
    cli.main()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, whatever makes the host wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gradient_distance(got: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> float:
    """Relative distance of two gradients, over all parameters together."""
    assert got.keys() == outputs.keys()
    one, other = (
        torch.cat([some[name].double().flatten() for name in sorted(outputs)]) for some in (got, outputs)
    )
    return float((one - other).norm() / other.norm())


def without_layers(folder: Path, to: Path) -> Path:
    """Copy a target's folder without the weight file of its layers, which the index of the copy names."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(folder / "model.safetensors")
    places = {name: "layers.safetensors" if ".layers." in name else "ends.safetensors" for name in tensors}
    save_file({name: tensors[name] for name in tensors if ".layers." not in name}, to / "ends.safetensors")
    (to / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return to
