"""The modules that KVzap trains: a linear layer, or an MLP of two, for each layer of the target with scores.

Shapes: B batch, T tokens, E hidden dim, G KV heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from longtrain.layers import Startable

if TYPE_CHECKING:
    from longtrain.methods.kvzap.config import Config
    from longtrain.targets.info import TargetInfo


class KVzap(Startable):
    """Trainable tensors only, under the names of kvpress's `KVzapModel`.

    Layers of the target with a sliding window have none: their entries are not scored.

    Args:
        config: hyperparameters.
        info: the target's shapes.

    Source: KVzap (arXiv 2601.07891); `kvpress/presses/kvzap_press.py` of kvpress 0.5.5.
    """

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__()
        if not info.full_layers:
            info.require_full_layers("KVzap")
        E, G, inner = info.hidden_size, info.n_kv_heads, config.hidden_dim

        def made() -> nn.Module:
            if not inner:
                return nn.Linear(E, G)
            return nn.Sequential(nn.Linear(E, inner), nn.GELU(), nn.Linear(inner, G))

        self.layers = nn.ModuleList([nn.Identity() if window else made() for window in info.windows])

    @torch.no_grad()
    def centre(self, mean_LG: Tensor) -> None:
        """Set the biases so that the initial scores of each scored layer and KV head are these means."""
        scored = [one for one in self.layers if not isinstance(one, nn.Identity)]
        for one, mean_G in zip(scored, mean_LG, strict=True):
            last = one[-1] if isinstance(one, nn.Sequential) else one
            assert isinstance(last, nn.Linear)
            last.bias.copy_(mean_G)

    def score(self, layer: int, x_BTE: Tensor) -> Tensor:
        """Predict the logarithm of each token's KVzip score, s_BGT in fp32 (fp64 for fp64).

        Args:
            layer: number of the target's layer, one without a window.
            x_BTE: input of its attention, after the norm.

        Note: the wide product runs in the dtype of `x_BTE`, as in kvpress; the narrow one in fp32, since
            scores in bf16 would tie.
        """
        one = self.layers[layer]
        if isinstance(one, nn.Sequential):
            first, last = one[0], one[2]
            assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
            inner = linear(x_BTE, first.weight.to(x_BTE.dtype), first.bias.to(x_BTE.dtype))
            inner = gelu(_wide(inner))
        else:
            assert isinstance(one, nn.Linear)
            inner, last = _wide(x_BTE), one
        s_BTG = linear(inner, last.weight.to(inner.dtype), last.bias.to(inner.dtype))
        return s_BTG.transpose(1, 2)


class PredictedScores:
    """Predicts scores during a forward of the target (`targets.attention.AttentionHook`).

    Args:
        module: predicts the scores.
        train: True if gradients reach it; the target's forward itself needs none.
    """

    def __init__(self, module: KVzap, *, train: bool = False) -> None:
        self._module, self._train = module, train
        self.scores: list[Tensor] = []
        """s_BGT of the scored layers so far."""

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Ignore queries, keys and values."""

    def see_inputs(self, layer: int, x_BTE: Tensor) -> None:
        """Score the tokens of one layer, unless it has a window."""
        if isinstance(self._module.layers[layer], nn.Identity):
            return
        with torch.set_grad_enabled(self._train):
            self.scores.append(self._module.score(layer, x_BTE))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
