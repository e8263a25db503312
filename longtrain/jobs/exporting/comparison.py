"""Compares a written artifact with the module that was trained: both must behave identically."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from longtrain.errors import LongtrainError, first_line

if TYPE_CHECKING:
    from torch import nn

    from longtrain.artifact import Artifact
    from longtrain.decoding.roles import Draft, Parts, TokenTree
    from longtrain.methods.spec import MethodSpec
    from longtrain.targets.model import Target

COMPARED_TOKENS = 16


def compare(spec: MethodSpec, config: Any, module: nn.Module, *, target: Target, artifact: Artifact) -> None:
    """Record in the artifact if golden outputs, tokens, drafted trees or kept entries differ from the trained
    module's; without the target's layers, golden outputs alone are compared.
    """
    if spec.attach is None:
        return
    keys, faults = dict(spec.golden_keys), artifact.verification.faults
    try:
        if not target.runs:
            artifact.attach(target, **keys)
            return
        mine = _done(spec.attach(module, target, config, keys), target)
        theirs = _done(artifact.attach(target, **keys), target)
    except (LongtrainError, RuntimeError) as error:  # also torch's errors, as when memory runs out
        faults.append(first_line(error))
        return
    if mine != theirs:
        faults.append(
            f"it does not do what the trained module does over {COMPARED_TOKENS} greedy tokens; report this "
            "with the run's config.yaml"
        )


def _done(parts: Parts, target: Target) -> tuple[list[list[int]], list[Any]]:
    """New tokens, the token of every drafted node, and the prompt's kept entries."""
    import torch

    from longtrain.decoding.engine import Engine
    from longtrain.decoding.evict import Budget
    from longtrain.methods.policies.base import Scorer

    seen: list[Any] = []
    if parts.draft is not None:
        parts = dataclasses.replace(parts, draft=_Recorder(parts.draft, seen))
    if isinstance(parts.evictor, Scorer):
        parts = dataclasses.replace(parts, evictor=parts.evictor.with_budget(Budget(COMPARED_TOKENS)))
    gen = torch.Generator().manual_seed(1)
    prompt = torch.randint(target.info.vocab_size, (64,), generator=gen).tolist()
    engine = Engine(target, parts)
    made = engine.generate([prompt], max_new_tokens=COMPARED_TOKENS, ignore_eos=True)
    if made.kept is not None:
        seen.append((made.kept.idx_LBGK.tolist(), made.kept.n_LBG.tolist()))
    return made.tokens, seen


class _Recorder:
    """A draft that records the trees it proposes."""

    def __init__(self, draft: Draft, seen: list[Any]) -> None:
        self.draft, self.outputs, self.seen = draft, draft.outputs, seen
        self.start, self.observe, self.bytes = draft.start, draft.observe, draft.bytes
        self.tensors = draft.tensors

    def propose(self, *args: Any) -> TokenTree:
        """Propose with the wrapped draft."""
        tree = self.draft.propose(*args)
        self.seen.append(tree.tokens_BN.tolist())
        return tree
