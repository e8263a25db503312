"""A retrieval head in SGLang's sparsity framework, which chooses the tokens that each decoding step reads.

This file stands alone (torch, safetensors, SGLang) and lies beside the weights that were written with it by
`longtrain export format=sglang`. In the serving process, before the coordinator is made:

    import specontext_sglang
    specontext_sglang.register()

The configuration then names it, in JSON:

    {"algorithm": "specontext", "backend": "fa3", "page_size": 1, "top_k": 2048,
    "min_sparse_prompt_len": 4096, "sinks": 4, "window": 64}

`top_k` tokens are read at each step, the first `sinks` and the last `window` among them, and in addition the
token of the step itself. Larger pages are chosen by their best token. `head` names the folder of the weights
if they are elsewhere.

Queries and keys of the head are computed from the embeddings of a few tokens, and its whole state is indexed
by the positions of SGLang's own KV cache. So shared prefixes, chunked prompts, retracted requests and reused
cache positions need no special handling. Every rank of tensor parallelism computes the same sets. Tested with
the files of SGLang 0.5.23 on a CPU (factory, coordinator, adaptor of FlashAttention's metadata). No attention
backend of that release calls the coordinator, so it was not run in a server. Refused: speculative decoding
(`TARGET_VERIFY`). Not supported: CUDA graphs (each step reads the longest length on the host), images in
prompts.

Note: the head's keys of a sequence are gathered once a step, where a paged kernel would read them in place.

Source: SpeContext, arXiv 2512.00722, §4.3.

Shapes: R tokens, B requests, S tokens of the longest, W embeddings mixed, E hidden dim, X sets,
H query heads, G KV heads, D head dim, P pages, J pages that are read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

NAME = "specontext"
"""Name of the algorithm in SGLang's configuration."""
ABOUT, WEIGHTS = "specontext.json", "model.safetensors"
EMBEDDINGS, FREQUENCIES = "embed_tokens.weight", "inv_freq"
KEYS = ("head", "sinks", "window")
"""Keys of the configuration beyond SGLang's own."""
CHUNK = 4096
"""Prompt tokens whose keys are computed at once."""
_SIGN = 0x7FFFFFFF


def register() -> None:
    """Register the algorithm with SGLang under its name."""
    from sglang.srt.mem_cache.sparsity import factory
    from sglang.srt.mem_cache.sparsity.algorithms.base_algorithm import BaseSparseAlgorithm

    BaseSparseAlgorithm.register(SpeContextAlgorithm)
    factory._ALGORITHM_REGISTRY[NAME] = SpeContextAlgorithm


class SpeContextAlgorithm:
    """The class that SGLang asks which tokens a decoding step reads (`BaseSparseAlgorithm`).

    Args:
        config: SGLang's `SparseConfig`.
        device: device of the caches.
        kwargs: not used.

    Raises:
        ValueError: an unknown key, or a `top_k` that sinks and window use up.
    """

    def __init__(self, config: Any, device: torch.device, **kwargs: Any) -> None:
        extra = config.sparse_extra_config
        if unknown := sorted({*extra} - {*KEYS}):
            raise ValueError(f"{NAME} has no key '{unknown[0]}'; its own keys: {', '.join(KEYS)}")
        self.config, self.device, self.page = config, device, config.page_size or 1
        self.rows, self.sinks, self.window = config.top_k, extra.get("sinks", 4), extra.get("window", 64)
        needed = -(-self.sinks // self.page) + -(-self.window // self.page)
        if min(self.sinks, self.window) < 0 or -(-self.rows // self.page) <= needed:
            raise ValueError(
                f"top_k={self.rows} with sinks={self.sinks}, window={self.window} and page_size={self.page} "
                f"leaves nothing to choose; allowed: more than {needed * self.page}"
            )
        self.head = RetrievalWeights(Path(extra.get("head") or Path(__file__).parent), device)

    def initialize_representation_pool(
        self, start_layer: int, end_layer: int, token_to_kv_pool: Any, req_to_token_pool: Any, states: Any
    ) -> None:
        """Allocate a token id and a key of the head for every position of the KV cache.

        Raises:
            ValueError: the head was trained for fewer layers than the coordinator has.
        """
        if end_layer > len(self.head.set_of_layer):
            raise ValueError(f"the head is for {len(self.head.set_of_layer)} layers, not {end_layer}")
        slots = token_to_kv_pool.get_key_buffer(start_layer).shape[0]
        self.start_layer, self._pool = start_layer, req_to_token_pool
        self._tokens = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self._keys = self.head.empty(slots)

    def construct_representations(
        self,
        layer_id: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        k_buffer: Tensor,
        forward_batch: Any,
    ) -> None:
        """Store the tokens and keys of prompts, or parts of them, once a step.

        Raises:
            ValueError: a step that verifies drafted tokens.
        """
        mode = forward_batch.forward_mode
        if layer_id != self.start_layer or not mode.is_extend():
            return
        if mode.is_target_verify():
            raise ValueError(f"{NAME} serves no speculative decoding; leave --speculative-algorithm out")
        counts_B = forward_batch.extend_seq_lens
        owner_R = req_pool_indices.repeat_interleave(counts_B)
        rows = len(owner_R)
        self._take(owner_R, forward_batch.positions[:rows], forward_batch.input_ids[:rows])

    def update_representations(
        self,
        layer_id: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        k_buffer: Tensor,
        forward_batch: Any,
    ) -> None:
        """Store the token and the key of a decoding step, once a step."""
        if layer_id == self.start_layer and forward_batch.forward_mode.is_decode():
            self._take(req_pool_indices, seq_lens - 1, forward_batch.input_ids[: len(seq_lens)])

    def retrieve_topk(
        self, queries: Tensor, layer_id: int, req_pool_indices: Tensor, sparse_mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the pages that a layer reads at a decoding step, the last of them that of the new token.

        Args:
            queries: not used; the head has its own queries.
            layer_id: number of the layer.
            req_pool_indices: requests of the batch.
            sparse_mask: requests that read selected tokens, bool [B].
            kwargs: `forward_batch`.

        Returns:
            Pages int32 [B, J], ascending, padded with -1; the number of pages of each request, int32 [B], 0
                for
            requests that are not in `sparse_mask`.

        Raises:
            ValueError: no decoding step.
        """
        batch = kwargs.get("forward_batch")
        if batch is None or not batch.forward_mode.is_decode_or_idle():
            raise ValueError(f"{NAME} chooses tokens at decoding steps alone, from their forward_batch")
        if not len(req_pool_indices):
            return queries.new_full((0, 1), -1, dtype=torch.int32), queries.new_zeros(0, dtype=torch.int32)
        if layer_id == self.start_layer:
            self._sets = self._choose(req_pool_indices, batch)
        pages_BXJ, count_B = self._sets
        count_B = count_B.where(sparse_mask, 0)
        pages_BJ = pages_BXJ[:, self.head.set_of_layer[layer_id]]
        beyond_BJ = torch.arange(pages_BJ.shape[1], device=pages_BJ.device) >= count_B[:, None]
        return pages_BJ.masked_fill(beyond_BJ, -1).int(), count_B.int()

    def _slots(self, owner_R: Tensor, at_R: Tensor) -> Tensor:
        """Return the cache positions of tokens; positions before the first token give arbitrary ones."""
        table = self._pool.req_to_token
        return table[owner_R, at_R.clamp(0, table.shape[1] - 1)].long()

    def _windows(self, owner_R: Tensor, at_R: Tensor) -> Tensor:
        """Return the W tokens that end with each position, int64 [R, W]; -1 before the start."""
        place_RW = at_R[:, None] - torch.arange(self.head.mixed - 1, -1, -1, device=at_R.device)
        ids_RW = self._tokens[self._slots(owner_R[:, None], place_RW)]
        return ids_RW.masked_fill(place_RW < 0, -1)

    def _take(self, owner_R: Tensor, at_R: Tensor, ids_R: Tensor) -> None:
        """Store tokens and their keys."""
        slots_R = self._slots(owner_R, at_R)
        self._tokens[slots_R] = ids_R.long()
        for first in range(0, len(at_R), CHUNK):
            part = slice(first, first + CHUNK)
            windows_RW = self._windows(owner_R[part], at_R[part])
            self._keys[slots_R[part]] = self.head.key(windows_RW, at_R[part])

    def _choose(self, owner_B: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the pages of every set, int64 [B, X, J], and their number, [B]."""
        len_B, page = batch.seq_lens - 1, self.page  # committed tokens; the step's own follows
        self._tokens[self._slots(owner_B, len_B)] = batch.input_ids[: len(len_B)].long()
        q_BHD = self.head.query(self._windows(owner_B, len_B), len_B)
        at_S = torch.arange(-(-int(batch.seq_lens.max()) // page) * page, device=len_B.device)
        keys = self._keys[self._slots(owner_B[:, None], (at_S + self.head.shift)[None])]
        scores_BXS = self.head.scores(q_BHD, keys, at_S < len_B[:, None] - self.head.shift)
        # a page scores as its best token
        scores_BXP = scores_BXS.unflatten(-1, (-1, page)).amax(-1)
        start_P = at_S[::page]
        forced_BP = (start_P < self.sinks) | (start_P + page > len_B[:, None] - self.window)
        pages_B = len_B // page + 1
        most = -(-self.rows // page) + 1
        return best(scores_BXP, forced_BP, pages_B, most), pages_B.clamp(max=most)


class RetrievalWeights:
    """Queries and keys of a head that reads only embeddings.

    Args:
        folder: folder of `specontext.json` and the weights.
        device: device of the weights.
    """

    def __init__(self, folder: Path, device: torch.device | str) -> None:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        self.set_of_layer: list[int] = about["set_of_layer"]
        self.heads, self.groups = about["heads"], about["kv_heads"]
        self.sets, self.key_sets, self.dim = about["groups_of_layers"], about["key_groups"], about["head_dim"]
        self.eps, self.shift, self.scaling = about["rms_norm_eps"], about["shift"], about["rope_scaling"]
        self._weights = {name: x.to(device) for name, x in load_file(folder / WEIGHTS).items()}
        self.mixed = len(self._weights["mix"])

    def empty(self, slots: int) -> Tensor:
        """Allocate keys, [cache positions, groups of keys * G, D]."""
        return self._weights["mix"].new_zeros(slots, self.key_sets * self.groups, self.dim)

    def query(self, ids_RW: Tensor, at_R: Tensor) -> Tensor:
        """Return rotated queries, [R, groups of layers * H, D], of the windows that end with each token."""
        return self._turned("q", ids_RW, at_R)

    def key(self, ids_RW: Tensor, at_R: Tensor) -> Tensor:
        """Return rotated keys, [R, groups of keys * G, D]."""
        return self._turned("k", ids_RW, at_R)

    def scores(self, q_BHD: Tensor, k_BSGD: Tensor, visible_BS: Tensor) -> Tensor:
        """Return log attention weights, maximal over a set's query heads, [B, X, S]; -inf if invisible."""
        per, shared = self.heads // self.groups, self.sets // self.key_sets
        q = q_BHD.unflatten(1, (self.key_sets, shared, self.groups, per)).transpose(2, 3)
        k = k_BSGD.unflatten(2, (self.key_sets, self.groups)).permute(0, 2, 3, 4, 1)
        score = (q.flatten(3, 4) @ k).unflatten(3, (shared, per))  # [B, keys, G, shared, per, S]
        score = score.to(torch.promote_types(score.dtype, torch.float32)) * self.dim**-0.5
        score = score.masked_fill(~visible_BS[:, None, None, None, None], -torch.inf)
        weight = score - score.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)
        return weight.amax(4).transpose(2, 3).flatten(1, 3)

    def _turned(self, name: str, ids_RW: Tensor, at_R: Tensor) -> Tensor:
        w = self._weights
        embed = w[EMBEDDINGS][ids_RW.clamp(min=0)] * (ids_RW >= 0)[..., None]
        normed = rms_norm(embed, embed.shape[-1:], w["input_layernorm.weight"], self.eps)
        entry = (normed * w["mix"]).sum(-2)
        if "mlp.up_proj.weight" in w:
            gate, up, down = (w[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            entry = entry + linear(silu(linear(entry, gate)) * linear(entry, up), down)
        x = linear(entry, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias")).unflatten(-1, (-1, self.dim))
        if f"{name}_norm.weight" in w:
            x = rms_norm(x, x.shape[-1:], w[f"{name}_norm.weight"], self.eps)
        angle = at_R[:, None].float() * w[FREQUENCIES].float()
        angle = torch.cat((angle, angle), -1)[:, None]
        cos, sin = ((part * self.scaling).to(x.dtype) for part in (angle.cos(), angle.sin()))
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), -1) * sin


def best(scores_BXP: Tensor, forced_BP: Tensor, pages_B: Tensor, most: int) -> Tensor:
    """Return the pages with the highest scores; the forced pages are always among them.

    Of equal scores the later page is taken, so that the choice does not depend on the padding.

    Args:
        scores_BXP: scores of the pages of the longest sequence.
        forced_BP: True for pages that are read in any case.
        pages_B: number of pages of each sequence.
        most: number of pages to read.

    Returns:
        Pages [B, X, J], ascending; values after the first `pages_B` are 0.
    """
    P = scores_BXP.shape[-1]
    at_P = torch.arange(P, device=scores_BXP.device)
    high = torch.finfo(torch.float32).max
    score = scores_BXP.float().nan_to_num(-high).clamp(-high, high) + 0.0  # + 0.0 turns -0.0 into 0.0
    score = score.masked_fill(forced_BP[:, None], torch.inf)
    beyond_B1P = at_P >= pages_B[:, None, None]
    bits = score.masked_fill(beyond_B1P, -torch.inf).view(torch.int32)
    # int64 keys that sort by score, then by page: float bits as an ordered int32, the page below
    order = (bits ^ ((bits >> 31) & _SIGN)).long() << 32 | at_P
    top = order.topk(min(most, P), -1).indices
    found = top.masked_fill(top >= pages_B[:, None, None], P).sort(-1).values
    return found.masked_fill(found == P, 0)
