"""Golden outputs of a selector: the scores that it gives the rows of a fixed prompt.

Shapes: T prompt tokens and a root, S = T - 1 rows, X sets, E hidden dim, B batch (1), L layers, G KV heads,
K tokens of a set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from longtrain.artifact.golden import PERIOD, Attach, Golden, dtype_name, fixed_prompt
from longtrain.artifact.wide import WideTarget
from longtrain.cache.row_sets import RowSets
from longtrain.cache.selected import SelectedCache
from longtrain.decoding.retrieval.selector import Selector
from longtrain.decoding.roles import Parts
from longtrain.errors import ArtifactError
from longtrain.targets.step import Rows, TargetStep, Want

if TYPE_CHECKING:
    from longtrain.targets.model import Target

FLOOR = -25.0
"""Scores below this are compared as this: they are natural logs of weights."""


@dataclass(frozen=True)
class RowGolden(Golden):
    """A prompt, what a selector reads of it, and the scores that its last token gives the rows before.

    One that scores before the forward reads hidden states of the rows; one that is asked in each layer the
    rows' keys and the last token's queries.

    Args:
        ids_T: the prompt, int64; the last token is the root of a step.
        scores_XS: from the selector in fp32.
        read_LGK: the tokens that each KV head of each layer reads, chosen by `scores_XS`, int64.
    """

    ids_T: Tensor
    scores_XS: Tensor
    read_LGK: Tensor
    who: ClassVar[str] = "selector"
    outputs: ClassVar[str] = "scores"
    own: ClassVar[tuple[str, ...]] = ("ids_T", "scores_XS", "read_LGK")
    choice: ClassVar[str] = "read_LGK"
    pattern: ClassVar[str] = r"hidden_-?\d+|[kq]_\d+"

    @classmethod
    def _prompt(cls, target: Target, tokens: int) -> Self:
        gen = torch.Generator().manual_seed(0)
        tokens = min(max(PERIOD, tokens), target.info.max_positions // 2)
        ids_T = fixed_prompt(target.info.vocab_size, tokens + 1, gen)
        return cls({}, dtype_name(target.dtype), {}, ids_T, torch.zeros(0), torch.zeros(0))

    def _filled(self, on_stored: Tensor, on_target: Tensor) -> Self:
        return replace(self, scores_XS=on_stored)

    @classmethod
    def _made_of(
        cls, own: dict[str, Tensor], inputs: dict[str, Tensor], dtype: str, noise: dict[str, float]
    ) -> Self:
        ids_T, scores_XS, read_LGK = own.values()
        rows = {len(tensor) for name, tensor in inputs.items() if name[0] != "q"}
        lengths = rows | {scores_XS.shape[-1]}
        if ids_T.dim() != 1 or lengths != {len(ids_T) - 1} or scores_XS.dim() != 2:
            raise cls._unfitting(prompt=tuple(ids_T.shape), scores=tuple(scores_XS.shape))
        return cls(inputs, dtype, noise, ids_T, scores_XS, read_LGK)

    def _own(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.own}

    def _expected(self) -> tuple[Tensor, Tensor]:
        return self.scores_XS, self.scores_XS

    def _on_stored(self, attach: Attach, target: Target) -> Tensor:
        return _scores(_selector(attach, WideTarget(target)), target, self.ids_T, self.inputs)

    def _on_target(self, attach: Attach, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        return _native(_selector(attach, target), target, self.ids_T)

    def _chosen(self, parts: Parts, target: Target) -> Tensor:
        selector, (X, S), info = parts.selector, self.scores_XS.shape, target.info
        assert selector is not None
        table_LG = selector.table_LG
        if table_LG is None:  # each KV head of each layer has a set of its own
            table_LG = torch.arange(info.n_layers * info.n_kv_heads).view(info.n_layers, -1)
        sets = RowSets(selector.budget, 1, X, torch.device("cpu"))
        sets.open(torch.tensor([S]))
        sets.put(self.scores_XS[None])
        return sets.idx_BXK[0, table_LG.cpu()]

    @staticmethod
    def _distance(got: Tensor, want: Tensor) -> Tensor:
        """Relative distance of centred scores, for each set."""
        got_XS, want_XS = (one.double() - one.double().mean(-1, keepdim=True) for one in (got, want))
        return (got_XS - want_XS).norm(dim=-1) / want_XS.norm(dim=-1).clamp_min(1e-6)


def _selector(attach: Attach, target: Any) -> Selector:
    selector = attach(target).selector
    if selector is None:
        raise ArtifactError("golden scores of rows need a method that brings a selector; this one does not")
    return selector


@torch.no_grad()
def _native(selector: Selector, target: Target, ids_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores with the target at hand, and what it gave for them, on the CPU."""
    S, inputs = len(ids_T) - 1, {}

    def look(layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        if selector.table_LG is None:
            inputs[f"k_{layer}"] = k_BGTD[0, :, :S].transpose(0, 1)
            inputs[f"q_{layer}"] = q_BHTD[0, :, S:].transpose(0, 1)

    want = Want("none", hidden=selector.want.hidden)
    ids_BT = ids_T[None].to(target.device)
    pos_BT = torch.arange(S + 1, device=target.device)[None]
    step = target.forward(Rows(pos_BT, ids_BT), target.new_cache(1, S + 1, 0), want=want, watch=look)
    inputs |= {f"hidden_{layer}": state[0, :S] for layer, state in step.hidden.items()}
    inputs = {name: tensor.cpu().contiguous() for name, tensor in inputs.items()}
    return _scores(selector, target, ids_T, inputs), inputs


@torch.no_grad()
def _scores(selector: Selector, target: Target, ids_T: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Scores of the prompt's rows in fp32, on the CPU, on what the target gave."""
    device, S = target.device, len(ids_T) - 1
    store = target.new_cache(1, S, 1)
    store.rewind([S])
    ahead, dtype = selector.table_LG is not None, getattr(selector, "dtype", target.dtype)
    layers = [] if ahead else [*range(target.info.n_layers)]
    wanted = [f"hidden_{layer}" for layer in selector.want.hidden]
    wanted += [f"{kind}_{layer}" for layer in layers for kind in "kq"]
    if missing := [name for name in wanted if name not in inputs]:
        raise ArtifactError(f"the selector reads {missing[0]}, which it was not exported with; export again")
    given = {name: inputs[name].to(device, dtype) for name in wanted}
    for layer in layers:
        store.k_LBGSD[layer, 0, :, :S] = given[f"k_{layer}"].transpose(0, 1)
    hidden = {layer: given[f"hidden_{layer}"][None] for layer in selector.want.hidden}
    ids_BT, cache = ids_T[None].to(device), SelectedCache(store)
    n_B = torch.tensor([S], device=device)
    selector.start(ids_BT[:, :-1], n_B, TargetStep(None, hidden), cache)
    if ahead:
        scores_BXS = selector.ahead(ids_BT[:, -1])
    else:
        roots = [given[f"q_{layer}"].transpose(0, 1)[None] for layer in layers]
        found = [selector.at_layer(n, q_BHTD, cache.keys(n), cache.len_B) for n, q_BHTD in enumerate(roots)]
        scores_BXS = torch.cat(found, 1)
    return scores_BXS[0, :, :S].float().clamp_min(FLOOR).cpu()
