"""Of the best nodes of a tree none is kept without its parent, whatever the draft's logits are.

These tests also run with triton's interpreter (`tests/kernels/test_interpreted.py`).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longtrain.decoding.engine import Engine
from longtrain.decoding.expansion import Level, TreeExpansion
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import Parts, TokenTree, TreeShape
from longtrain.decoding.sampling import HashRng, Rng, Sampling
from longtrain.kernels import beam, devices
from longtrain.targets.step import OutputRequest

from .toys import OracleDraft, ToyTarget

VOCAB = 12
LOGITS = ("sure", "even", "nan", "inf", "all -inf")
INTERPRETED = devices.interpreted()


@pytest.fixture(autouse=True)
def _only_the_beam(monkeypatch):
    """Only the kernels of `kernels.beam` are interpreted: with all of the engine's a text takes minutes."""
    if INTERPRETED:
        monkeypatch.setattr(beam, "kernels_serve", lambda x: True)
        monkeypatch.setattr(devices, "interpreted", lambda: False)


class TableDraft(OracleDraft):
    """A draft whose logits depend on depth and token alone.

    Below the first level: "sure", one token has probability 1, by logits of many sizes, so that the score of
    a child is its parent's but for rounding; "even", exactly so, and the parent's first; else logits that are
    not finite.
    """

    def __init__(self, logits: str) -> None:
        self.outputs = OutputRequest()
        self.expansion = TreeExpansion()
        gen = torch.Generator().manual_seed(5)
        self.table_DVV = torch.randn(3, VOCAB, VOCAB, generator=gen)
        token_V = torch.arange(VOCAB)
        if logits == "sure":
            self.table_DVV[1:, token_V, (token_V * 5 + 3) % VOCAB] = 30 + 70 * torch.rand(
                2, VOCAB, generator=gen
            )
        elif logits == "even":
            self.table_DVV[1:] = -torch.inf
            self.table_DVV[1:, token_V, (token_V * 5 + 3) % VOCAB] = 0
        elif logits == "all -inf":
            self.table_DVV[1:] = -torch.inf
        else:
            self.table_DVV[1:, ::2, 4] = float(logits)

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, rng: Rng) -> TokenTree:
        return self.expansion.grow(self._logits, root_B, torch.zeros_like(root_B), shape, sampling, rng)

    def _logits(self, level: Level) -> Tensor:
        return self.table_DVV[level.depth, level.tokens_BM]

    def bytes(self) -> int:
        return self.table_DVV.nbytes


@pytest.mark.parametrize("keep", [1, 2, 5])
@pytest.mark.parametrize("logits", LOGITS)
def test_a_node_is_one_deeper_than_its_parent_and_no_more_probable(logits, keep):
    root_B = torch.arange(3 if INTERPRETED else VOCAB)
    shape, rng = TreeShape((4, 4, 4), keep=keep), HashRng(0, torch.zeros(len(root_B)))
    tree = TableDraft(logits).propose(root_B, shape, Sampling(), rng)
    above_BK, depth_BN = tree.parents_BN[:, 1:], tree.depth_N
    assert torch.equal(depth_BN[:, 1:], depth_BN.gather(1, above_BK) + 1)
    assert (tree.score_BN[:, 1:] <= tree.score_BN.gather(1, above_BK)).all()
    if logits == "even":  # of equally probable nodes the parents come first
        expected = {1: [1], 2: [1, 2], 5: [1, 1, 2, 2, 3]}[keep]
        assert depth_BN[:, 1:].tolist() == [expected] * len(root_B)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("logits", LOGITS[:1] if INTERPRETED else LOGITS)
def test_the_text_is_the_plain_one(logits, sampling):
    target = ToyTarget(VOCAB)
    prompts = [[1, 2, 3], [5], [0, 4, 4, 4, 2, 9, 11, 3], [7, 7]][2 if INTERPRETED else 0 :]
    new = 8 if INTERPRETED else 60
    plain = Engine(target).generate(prompts, max_new_tokens=new, sampling=sampling)
    drafted = Engine(target, Parts(draft=TableDraft(logits)), limits=Limits(batch=100_000))
    for keep in (1,) if INTERPRETED else (1, 3):
        shape = TreeShape((4, 4, 4), keep=keep)
        out = drafted.generate(prompts, max_new_tokens=new, sampling=sampling, shape=shape)
        assert out.tokens == plain.tokens
        assert any(cycle.accepted for row in out.stats.rows for cycle in row)
