"""Golden outputs of a draft: its laws along a script of forced tokens.

The same route serves every draft: prefill, one proposal, two drafted tokens accepted, another proposal. All
tokens are forced, so that no tie can lead two runs apart, and the draft's whole laws are compared.

Shapes: T prompt tokens, C cycles, D drafted tokens a cycle, S committed tokens, H query heads, G KV heads,
K head dim, E hidden dim, V vocabulary, B batch (1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from longtrain.artifact.golden import PERIOD, Attach, Golden, dtype_name, fixed_prompt
from longtrain.artifact.wide import WideTarget
from longtrain.cache.base import Causal, KVCache, Mask, PrefixOnly
from longtrain.decoding.roles import Draft, Law, TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ArtifactError
from longtrain.targets.step import Rows, TargetStep

if TYPE_CHECKING:
    from longtrain.targets.model import Target

CYCLES = 2
DEPTH = 4
ACCEPTED = 2
"""Drafted tokens that are accepted in every cycle."""

FLOOR = -25.0
"""Log-probabilities below this are compared as this (nats)."""

Step = Callable[[TokenTree, int], TargetStep]
"""(chain, position of its root) -> the target's step over it."""


@dataclass(frozen=True)
class Script:
    """Every token of a run, decided beforehand.

    Args:
        ids_T: the prompt, int64.
        roots_C: last chosen token of each cycle, int64.
        drafts_CD: drafted tokens of each cycle, int64; the first `ACCEPTED` of them are accepted.
    """

    ids_T: Tensor
    roots_C: Tensor
    drafts_CD: Tensor

    def committed(self) -> Tensor:
        """The prompt and everything accepted after it."""
        parts = [self.ids_T]
        for root, drafts_D in zip(self.roots_C, self.drafts_CD, strict=True):
            parts += [root[None], drafts_D[:ACCEPTED]]
        return torch.cat(parts)


@dataclass(frozen=True)
class DraftGolden(Golden):
    """A script, what the target gave for it, and the draft's laws.

    Args:
        script: all tokens.
        logq_CDV: natural log of the law of each drafted token at temperature 1, from the draft in fp32.
    """

    script: Script
    logq_CDV: Tensor
    who: ClassVar[str] = "draft"
    outputs: ClassVar[str] = "laws"
    own: ClassVar[tuple[str, ...]] = ("ids_T", "roots_C", "drafts_CD", "logq_CDV")
    ids: ClassVar[tuple[str, ...]] = ("ids_T", "roots_C", "drafts_CD")
    pattern: ClassVar[str] = r"(k|v|hidden)_-?\d+"

    @classmethod
    def _prompt(cls, target: Target, tokens: int) -> Self:
        gen = torch.Generator().manual_seed(0)
        vocab = target.info.vocab_size
        room = target.info.max_positions - CYCLES * (ACCEPTED + 1) - DEPTH
        script = Script(
            fixed_prompt(vocab, min(max(PERIOD, tokens), room), gen),
            torch.randint(vocab, (CYCLES,), generator=gen),
            torch.randint(vocab, (CYCLES, DEPTH), generator=gen),
        )
        return cls({}, dtype_name(target.dtype), {}, script, torch.zeros(0))

    def _filled(self, on_stored: Tensor, on_target: Tensor) -> Self:
        return replace(self, logq_CDV=on_stored.float())

    @classmethod
    def _made_of(
        cls, own: dict[str, Tensor], inputs: dict[str, Tensor], dtype: str, noise: dict[str, float]
    ) -> Self:
        *tokens, logq_CDV = own.values()
        script = Script(*tokens)
        shape = script.drafts_CD.shape
        lengths = {len(tensor) for tensor in inputs.values()}
        good = script.ids_T.dim() == 1 and script.roots_C.shape == shape[:1] and logq_CDV.shape[:-1] == shape
        good = good and len(shape) == 2 and shape[1] >= ACCEPTED
        if not good or not lengths <= {len(script.committed())}:
            raise cls._unfitting(drafts=tuple(shape), laws=tuple(logq_CDV.shape), inputs=sorted(lengths))
        return cls(inputs, dtype, noise, script, logq_CDV)

    def _own(self) -> dict[str, Tensor]:
        return {**vars(self.script), "logq_CDV": self.logq_CDV}

    def _expected(self) -> tuple[Tensor, Tensor]:
        return self.logq_CDV, self.logq_CDV

    def _on_stored(self, attach: Attach, target: Target) -> Tensor:
        return _replay(_draft(attach, WideTarget(target)), target, self.script, self.inputs)

    def _on_target(self, attach: Attach, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        return _decode(_draft(attach, target), target, self.script)

    @staticmethod
    def _distance(got: Tensor, want: Tensor) -> Tensor:
        """Relative distance of centred log-probabilities, for each law."""
        want_CDV = (want - want.mean(-1, keepdim=True)).double()
        got_CDV = (got - got.mean(-1, keepdim=True)).double()
        return (got_CDV - want_CDV).norm(dim=-1) / want_CDV.norm(dim=-1).clamp_min(1e-6)


class _StoredCache(KVCache):
    """The committed keys and values of some layers, grown by `commit` alone; attends in plain arithmetic."""

    def __init__(self, layers: dict[int, tuple[Tensor, Tensor]], len_B: Tensor) -> None:
        self.layers = layers
        self.len_B = len_B

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Nothing is written: what will be committed is stored already."""

    def rows_left(self) -> int:
        """See `KVCache`: what a script goes on by."""
        return CYCLES * (ACCEPTED + 1) + DEPTH

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """Every row sees the committed prefix."""
        if not isinstance(mask, PrefixOnly) or layer not in self.layers:
            raise ArtifactError(
                f"the draft reads layer {layer} of the target, which the artifact does not hold"
            )
        length, groups = int(self.len_B[0]), q_BHTD.shape[1] // self.layers[layer][0].shape[1]
        k_HSD, v_HSD = (
            part[:length].to(q_BHTD.dtype).repeat_interleave(groups, dim=1).transpose(0, 1)
            for part in self.layers[layer]
        )
        scores_HTS = q_BHTD[0] @ k_HSD.transpose(1, 2) * scale
        return (scores_HTS.softmax(-1) @ v_HSD)[None], scores_HTS.logsumexp(-1)[None]

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """The next rows count as committed."""
        self.len_B = self.len_B + n_B

    def bytes(self) -> int:
        """Bytes of the stored layers."""
        return sum(part.nbytes for pair in self.layers.values() for part in pair)


class _ReadLayers:
    """A cache that notes which layers a draft reads."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.layers: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """Note the layer, and hand the rows on."""
        self.layers.add(layer)
        return self.cache.attend(layer, q_BHTD, mask=mask, scale=scale)


class _ForcedCoins:
    """Draws the tokens it was given, by absolute position."""

    def __init__(self, tokens_D: Tensor, first: int) -> None:
        self._tokens_D, self._first = tokens_D, first

    def below(self, prob_B: Tensor, pos_B: Tensor, role: str) -> Tensor:
        return prob_B >= 0.5

    def draw(self, weight_BV: Tensor, pos_B: Tensor, role: str) -> Tensor:
        index_B = (pos_B - self._first).clamp(0, len(self._tokens_D) - 1)
        return self._tokens_D.to(weight_BV.device)[index_B.to(weight_BV.device)]


@torch.no_grad()
def _follow(draft: Draft, script: Script, cache: KVCache, *, first: TargetStep, step: Step) -> Tensor:
    """Lead a draft along a script and ask for its law at every drafted token.

    Args:
        draft: fresh.
        script: all tokens.
        cache: holds the prompt, committed.
        first: the target's step over the prompt.
        step: the target's step over a chain.

    Returns:
        probabilities `q_CDV`, at temperature 1, on the CPU.

    Raises:
        ArtifactError: the draft does not take its tokens from the coins.
    """
    device, depth = cache.len_B.device, script.drafts_CD.shape[1]
    draft.start(script.ids_T.to(device)[None], cache.len_B.clone(), first, cache)
    shape, sampling = TreeShape((1,) * depth, Law.IID), Sampling(temperature=1.0)
    nexts_C = torch.cat([script.roots_C[1:], script.roots_C[:1]])
    laws = []
    for root, follower, drafts_D in zip(script.roots_C, nexts_C, script.drafts_CD, strict=True):
        position = int(cache.len_B[0])
        tree = draft.propose(root.to(device)[None], shape, sampling, _ForcedCoins(drafts_D, position + 1))
        if tree.q_BNV is None or tree.tokens_BN[0, 1:].tolist() != drafts_D.tolist():
            raise ArtifactError("the draft does not sample its chain with the coins it is given")
        laws.append(tree.q_BNV[0, :depth].cpu())
        target_step = step(tree, position)
        path_BP = torch.arange(depth + 1, device=device)[None]
        path_BP = torch.where(path_BP <= ACCEPTED, path_BP, 0)
        n_B = torch.tensor([ACCEPTED + 1], device=device)
        cache.commit(path_BP, n_B)
        draft.observe(tree, Verdict(path_BP, n_B, follower.to(device)[None]), target_step)
    return torch.stack(laws)


def _chain_rows(tree: TokenTree, position: int) -> Rows:
    """The rows of a chain whose root is at `position`."""
    return Rows(pos_BT=position + tree.depth_N[None], ids_BT=tree.tokens_BN, mask=Causal())


def _draft(attach: Attach, target: Any) -> Draft:
    draft = attach(target).draft
    if draft is None:
        raise ArtifactError("golden outputs need a method that drafts; this one brings no draft")
    return draft


@torch.no_grad()
def _decode(draft: Draft, target: Target, script: Script) -> tuple[Tensor, dict[str, Tensor]]:
    """Laws with the target at hand, and what the draft reads of it, on the CPU."""
    ids_BT = script.ids_T.to(target.device)[None]
    n_tokens, depth = ids_BT.shape[1], script.drafts_CD.shape[1]
    total = len(script.committed())
    cache = target.new_cache(1, total, depth + 1)
    pos_BT = torch.arange(n_tokens, device=target.device)[None]
    first = target.forward(Rows(pos_BT, ids_BT), cache, want=replace(draft.want, logits="last"))
    cache.commit(None, torch.tensor([n_tokens], device=target.device))
    hidden = {layer: [part[0]] for layer, part in first.hidden.items()}
    read: Any = _ReadLayers(cache)

    def step(tree: TokenTree, position: int) -> TargetStep:
        made = target.forward(_chain_rows(tree, position), cache, want=replace(draft.want, logits="none"))
        for layer, part in made.hidden.items():
            hidden[layer].append(part[0, : ACCEPTED + 1])
        return made

    laws = _follow(draft, script, read, first=first, step=step)
    inputs = {f"hidden_{layer}": torch.cat(parts).cpu() for layer, parts in hidden.items()}
    for layer in sorted(read.layers):
        for name, rows in (("k", cache.k_LBGSD), ("v", cache.v_LBGSD)):
            inputs[f"{name}_{layer}"] = rows[layer, 0, :, :total].transpose(0, 1).cpu().contiguous()
    return _log(laws), inputs


def _replay(draft: Draft, target: Target, script: Script, inputs: dict[str, Tensor]) -> Tensor:
    """Laws in fp32 on stored inputs."""
    wide = torch.promote_types(target.dtype, torch.float32)
    moved = {name: tensor.to(target.device, wide) for name, tensor in inputs.items()}
    layers = {int(name[2:]): (moved[name], moved[f"v_{name[2:]}"]) for name in moved if name.startswith("k_")}
    hidden = {int(name[7:]): rows for name, rows in moved.items() if name.startswith("hidden_")}
    n_tokens, depth = len(script.ids_T), script.drafts_CD.shape[1]
    cache = _StoredCache(layers, torch.tensor([n_tokens], device=target.device))

    def rows(start: int, stop: int, length: int) -> TargetStep:
        """Hidden states of committed tokens; those of rejected ones are zero, no draft may use them."""
        parts = {layer: part.new_zeros(1, length, part.shape[1]) for layer, part in hidden.items()}
        for layer, part in parts.items():
            part[0, : stop - start] = hidden[layer][start:stop]
        return TargetStep(None, parts)

    return _log(
        _follow(
            draft,
            script,
            cache,
            first=rows(0, n_tokens, n_tokens),
            step=lambda tree, position: rows(position, position + ACCEPTED + 1, depth + 1),
        )
    )


def _log(laws_CDV: Tensor) -> Tensor:
    return laws_CDV.log().clamp_min(FLOOR)
