"""What an exported draft makes of fixed inputs, recorded beside its files and asked again by `verify`.

The states of the target are made up: the draft alone is asked, in fp32 on a CPU, so that neither the target
nor a GPU is needed. Prompt rows stand on both sides of the window's edge and far apart, so that an edge off
by one, a lost window or another rotary base changes what the attention gathers.

The files lie in a folder of their own, because engines load every safetensors file beside `config.json`.

Shapes: T prompt rows, R of them with chains, K depths, E hidden dim, n levels of the target, V draft tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longtrain.errors import ArtifactError
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.methods.eagle3.recursion import Chains, recursion, rows_back
from longtrain.targets.info import TargetInfo
from longtrain.targets.rotary import Rotary

FOLDER = "longtrain"
RECORD, GOLDEN = f"{FOLDER}/record.json", f"{FOLDER}/golden.safetensors"
CHAINS, DEPTHS = 4, 4
FAR = 256
"""Rows stand at positions up to this, or twice the window."""
LIMIT = 1e-4
"""Largest relative distance of a row's logits, and of what its attention gathered, on any machine."""


@dataclass(frozen=True)
class Proposals:
    """Fixed inputs and what the draft made of them.

    Args:
        rows_T: positions of the prompt's rows, ascending, int64.
        states_TN: the target's states of all levels side by side, fp32, N = n E.
        ids_T: tokens whose embeddings the rows have, int64.
        first_TE: those embeddings, fp32.
        later_ids_KR: tokens forced on the chains at later depths.
        later_KRE: their embeddings.
        logits_KRV: the draft's logits.
        mixed_KRHD: what its attention gathered.
        tokens_KR: the likeliest token at each step, in the target's vocabulary.
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
        """Ask a module.

        Args:
            tensors: its state, by name.
            config: hyperparameters.
            info: the target.
            embed_VE: the embeddings that the draft reads.
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

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Proposals:
        """Rebuild from `vars`.

        Raises:
            ArtifactError: a tensor is missing.
        """
        names = tuple(cls.__dataclass_fields__)
        if missing := [name for name in names if name not in tensors]:
            raise ArtifactError(f"{GOLDEN} lacks {', '.join(missing)}; export the folder again")
        return cls(**{name: tensors[name] for name in names})

    def misshapen(self, tensors: Mapping[str, Tensor], config: Config, info: TargetInfo) -> list[str]:
        """What cannot be replayed: tensors of other shapes than this draft's, or ids that are no tokens.

        Args:
            tensors: the module's state, as it was read from the folder.
            config: as it was read from the folder.
            info: the target, as far as it is known.
        """
        T, E, V = self.rows_T.numel(), info.hidden_size, info.vocab_size
        heads, dim = config.n_heads or info.n_heads, config.head_dim or info.head_dim
        want = {
            "rows_T": (T,),
            "states_TN": (T, tensors["fc.weight"].shape[1]),
            "ids_T": (T,),
            "first_TE": (T, E),
            "later_ids_KR": (DEPTHS - 1, CHAINS),
            "later_KRE": (DEPTHS - 1, CHAINS, E),
            "logits_KRV": (DEPTHS, CHAINS, len(tensors["draft_ids_K"])),
            "mixed_KRHD": (DEPTHS, CHAINS, heads, dim),
            "tokens_KR": (DEPTHS, CHAINS),
        }
        whole = ("rows_T", "ids_T", "later_ids_KR", "tokens_KR")
        wrong = []
        for name, shape in want.items():
            found, kind = getattr(self, name), torch.int64 if name in whole else torch.float32
            if tuple(found.shape) != shape or found.dtype != kind:
                wrong.append(
                    f"{GOLDEN}: {name} is {found.dtype} {tuple(found.shape)}; allowed: {kind} {shape}"
                )
            elif name in whole and not bool(((found >= 0) & ((found < V) | (name == "rows_T"))).all()):
                wrong.append(
                    f"{GOLDEN}: {name} holds {int(found.min())} to {int(found.max())}, which are no ids"
                )
        return wrong

    def replay(self, tensors: Mapping[str, Tensor], config: Config, info: TargetInfo) -> list[str]:
        """What a module makes of the inputs now that it did not then; nothing where all is alike.

        Args:
            tensors: the module's state, as it was read from the folder.
            config: as it was read from the folder.
            info: the target, as far as it is known.
        """
        made = _ask(tensors, config, info, self.states_TN, (self.first_TE, self.later_KRE), self.rows_T)
        wrong = []
        pairs = (
            ("the attention gathers", made.mixed_KRHD.flatten(2), self.mixed_KRHD.flatten(2)),
            ("logits are", made.logits_KRV, self.logits_KRV),
        )
        for what, got, want in pairs:
            far = distance(got, want)
            if not far <= LIMIT:
                wrong.append(f"{what} something else at a relative distance of {far:.2g} (allowed {LIMIT:g})")
        found_KR = tensors["draft_ids_K"].cpu()[made.logits_KRV.argmax(-1)]
        if not torch.equal(found_KR, self.tokens_KR):
            same, total = int((found_KR == self.tokens_KR).sum()), found_KR.numel()
            wrong.append(f"{same} of {total} drafted tokens are the recorded ones")
        return wrong


def golden_rows(config: Config, info: TargetInfo) -> Tensor:
    """Positions of the golden prompt's rows: its beginning, both sides of each window's edge, its end."""
    last = min(max(FAR, 2 * config.window), info.max_positions - DEPTHS) - 1
    first_chain = last - CHAINS + 1
    edge = first_chain - config.window if config.window else first_chain // 2
    places = [
        *range(6),
        *range(edge - DEPTHS - 2, edge + CHAINS + 2),
        *range(last - 2 * CHAINS + 1, last + 1),
    ]
    return torch.tensor(sorted({place for place in places if 0 <= place <= last}))


def distance(got: Tensor, want: Tensor) -> float:
    """The largest distance of two rows, relative to the recorded one without its mean; NaN is infinite."""
    want_c, got_c = ((part - part.mean(-1, keepdim=True)).double() for part in (want, got))
    far = (got_c - want_c).norm(dim=-1) / want_c.norm(dim=-1).clamp_min(1e-9)
    return float(torch.nan_to_num(far, nan=torch.inf).max())


def draft_of(tensors: Mapping[str, Tensor], config: Config, info: TargetInfo) -> Eagle3Draft:
    """The module in fp32 on the CPU."""
    with torch.device("meta"):
        module = Eagle3Draft(config, info)
    module = module.to_empty(device="cpu")
    module.load_state_dict({name: tensor.cpu() for name, tensor in tensors.items()})
    return module.float().eval().requires_grad_(False)


def rotary_of(config: Config, info: TargetInfo) -> Rotary:
    """The draft's rotary embedding: its own, or the target's."""
    return Rotary(
        config.rope or info.rope,
        head_dim=config.head_dim or info.head_dim,
        max_positions=info.max_positions,
    )


@torch.no_grad()
def _ask(
    tensors: Mapping[str, Tensor],
    config: Config,
    info: TargetInfo,
    states_TN: Tensor,
    embeds: tuple[Tensor, Tensor],
    rows_T: Tensor,
) -> Chains:
    before: Any = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        module = draft_of(tensors, config, info)
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
    finally:
        torch.set_float32_matmul_precision(before)
