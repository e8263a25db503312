"""Outputs of an exported draft on fixed inputs, recorded beside its files and compared by `verify`.

The target's states are random: only the draft runs, in fp32 on a CPU, so that neither the target nor a GPU is
needed. Prompt tokens are on both sides of the window's edge and far apart, so that an edge off by one, a
missing window or another rotary base changes the attention's output.

The files are in a separate folder, because engines load every safetensors file beside `config.json`.

Shapes: T prompt tokens, R of them with chains, K depths, E hidden dim, n target layers read, V draft tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from longtrain.layers import exact_products
from longtrain.methods.draft_checks import Recorded, distance, draft_of
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.methods.eagle3.recursion import Chains, recursion, rows_back
from longtrain.methods.rope import rotary_of
from longtrain.targets.info import TargetInfo

CHAINS, DEPTHS = 4, 4
FAR = 256
"""Largest position of the prompt's tokens, unless twice the window is larger."""
LIMIT = 1e-4
"""Largest relative distance of a token's logits and of its attention output, on any machine."""


@dataclass(frozen=True)
class Proposals(Recorded):
    """Fixed inputs and the draft's outputs for them.

    Args:
        rows_T: positions of the prompt's tokens, ascending, int64.
        states_TN: the target's states of all read layers, concatenated, fp32, N = n E.
        ids_T: token ids of the input embeddings, int64.
        first_TE: those embeddings, fp32.
        later_ids_KR: forced tokens of the chains at later depths.
        later_KRE: their embeddings.
        logits_KRV: the draft's logits.
        mixed_KRHD: outputs of the draft's attention.
        tokens_KR: the most likely token at each step, in the target's vocabulary.
    """

    rows_T: Tensor
    states_TN: Tensor
    ids_T: Tensor
    first_TE: Tensor
    later_ids_KR: Tensor
    later_KRE: Tensor
    logits_KRV: Tensor
    mixed_KRHD: Tensor
    tokens_KR: Tensor

    @classmethod
    def record(
        cls, tensors: Mapping[str, Tensor], config: Config, info: TargetInfo, embed_VE: Tensor
    ) -> Proposals:
        """Run a module on the fixed inputs and record its outputs.

        Args:
            tensors: the module's state, by name.
            config: hyperparameters.
            info: the target.
            embed_VE: input embeddings of the draft.
        """
        gen = torch.Generator().manual_seed(0)
        rows_T = golden_rows(config, info)
        width = tensors["fc.weight"].shape[1]
        ids_T = torch.randint(info.vocab_size, rows_T.shape, generator=gen)
        later_ids_KR = torch.randint(info.vocab_size, (DEPTHS - 1, CHAINS), generator=gen)
        states_TN = torch.randn(len(rows_T), width, generator=gen)
        embeds = [embed_VE[ids.to(embed_VE.device)].detach().cpu().float() for ids in (ids_T, later_ids_KR)]
        first_TE, later_KRE = embeds
        inputs = (rows_T, states_TN, ids_T, first_TE, later_ids_KR, later_KRE)
        made = _ask(tensors, config, info, states_TN, (first_TE, later_KRE), rows_T)
        tokens_KR = tensors["draft_ids_K"].cpu()[made.logits_KRV.argmax(-1)]
        return cls(*inputs, made.logits_KRV, made.mixed_KRHD, tokens_KR)

    def replay(self, tensors: Mapping[str, Tensor], config: Config, info: TargetInfo) -> list[str]:
        """Compute the outputs again, and return a message for each difference.

        Args:
            tensors: the module's state, as read from the folder.
            config: hyperparameters, as read from the folder.
            info: the target, as far as known from the folder.

        Raises:
            RuntimeError: tensors have other shapes or dtypes than the recorded ones.
        """
        made = _ask(tensors, config, info, self.states_TN, (self.first_TE, self.later_KRE), self.rows_T)
        wrong = []
        pairs = (
            ("the attention gathers", made.mixed_KRHD.flatten(2), self.mixed_KRHD.flatten(2)),
            ("logits are", made.logits_KRV, self.logits_KRV),
        )
        for what, got, expected in pairs:
            far = distance(got, expected)
            if not far <= LIMIT:
                wrong.append(f"{what} something else at a relative distance of {far:.2g} (allowed {LIMIT:g})")
        found_KR = tensors["draft_ids_K"].cpu()[made.logits_KRV.argmax(-1)]
        if not torch.equal(found_KR, self.tokens_KR):
            same, total = int((found_KR == self.tokens_KR).sum()), found_KR.numel()
            wrong.append(f"{same} of {total} drafted tokens are the recorded ones")
        return wrong


def golden_rows(config: Config, info: TargetInfo) -> Tensor:
    """Return the positions of the golden prompt's tokens: start, both sides of each window's edge, end."""
    last = min(max(FAR, 2 * config.window), info.max_positions - DEPTHS) - 1
    first_chain = last - CHAINS + 1
    edge = first_chain - config.window if config.window else first_chain // 2
    places = [
        *range(6),
        *range(edge - DEPTHS - 2, edge + CHAINS + 2),
        *range(last - 2 * CHAINS + 1, last + 1),
    ]
    return torch.tensor(sorted({place for place in places if 0 <= place <= last}))


@torch.no_grad()
def _ask(
    tensors: Mapping[str, Tensor],
    config: Config,
    info: TargetInfo,
    states_TN: Tensor,
    embeds: tuple[Tensor, Tensor],
    rows_T: Tensor,
) -> Chains:
    with exact_products():
        module = draft_of(Eagle3Draft, tensors, config, info)
        feature_TE = module.feature(states_TN.chunk(len(module.layers), dim=-1))
        return recursion(
            module,
            feature_TE,
            embeds,
            rope=rotary_of(config, info),
            pos_T=rows_T,
            back_K=rows_back(config, DEPTHS),
            sinks=config.sinks,
        )
