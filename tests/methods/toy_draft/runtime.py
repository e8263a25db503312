"""The toy draft at work: it tells the logits of a level's nodes, and `TreeExpansion` does the rest.

Shapes: B batch, S prompt tokens, N tree nodes, M nodes of a level, E hidden dim, X = E times the layers read.
"""

from __future__ import annotations

import torch
from longtrain.methods.toy_draft.modules import ToyDraft
from torch import Tensor

from longtrain.cache.base import KVCache
from longtrain.decoding.expansion import Level, TreeExpansion, check_tree
from longtrain.decoding.roles import TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Rng, Sampling
from longtrain.targets.model import Target
from longtrain.targets.step import OutputRequest, TargetStep


class ToyRuntime:
    """Proposes chains and trees (`decoding.roles.Draft`)."""

    offers = ((1, 1), (2, 2))

    def __init__(self, module: ToyDraft, target: Target) -> None:
        self.module, self.target = module, target
        self.outputs = OutputRequest(hidden=module.layers)
        self._expansion = TreeExpansion()
        self._context_BX = torch.empty(0)

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Keep the hidden states of each prompt's last token."""
        self.cache = cache
        self._keep(step, n_B - 1)

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, rng: Rng) -> TokenTree:
        """Draft below the root."""
        path_embeds: list[Tensor] = []

        def logits_of(level: Level) -> Tensor:
            path_embeds.append(self.target.embed(level.tokens_BM))
            sees_BMN = level.sees_BMN.to(self.target.dtype)
            mean_BME = sees_BMN @ torch.cat(path_embeds, 1) / sees_BMN.sum(-1, keepdim=True)
            context_BMX = self._context_BX[:, None].expand(-1, level.tokens_BM.shape[1], -1)
            return self.target.head(self.module(context_BMX, mean_BME).to(self.target.dtype))

        return self._expansion.grow(logits_of, root_B, self.cache.len_B, shape, sampling, rng)

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Keep the hidden states of the last accepted node."""
        last_B1 = (verdict.n_B - 1).clamp(min=0)[:, None]
        self._keep(step, verdict.path_BP.gather(1, last_B1)[:, 0])

    def check_shape(self, shape: TreeShape) -> None:
        """Refuse what `TreeExpansion` cannot grow."""
        check_tree(shape, self.target.info.vocab_size, "the toy draft")

    def bytes(self) -> int:
        """Bytes of the hidden states kept."""
        return self._context_BX.nbytes

    def tensors(self) -> None:
        """Its state is made anew each cycle, so cycles are not captured."""

    def _keep(self, step: TargetStep, row_B: Tensor) -> None:
        all_BSX = torch.cat([step.hidden[layer] for layer in self.module.layers], -1)
        self._context_BX = all_BSX[torch.arange(len(row_B), device=row_B.device), row_B]
