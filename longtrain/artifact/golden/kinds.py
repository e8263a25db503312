"""The three kinds of golden outputs, one for each role that a module can have in an engine.

- `laws`, of a draft: its token distributions along forced tokens. The sequence is prefill, one proposal, two
  drafted tokens accepted, another proposal. All tokens are forced, so that a tie cannot make two runs
  diverge.
- `scores`, of an evictor: the importance it assigns to each token of the prompt. Only the tensors of the
  target's first layers are stored; in fp32 the evictor runs as if the target had no other layers.
- `rows`, of a selector: the scores that the prompt's last token assigns to the KV entries before it.

Each kind has one function, which runs on three targets: the actual one, a view of it in fp32, and this view
with stored tensors in place of its forward (`stored_forward`).

Shapes: T prompt tokens, C cycles, D drafted tokens a cycle, V vocabulary, L layers, F first layers, X sets,
S KV entries, H query heads, G KV heads, K head dim or number of chosen entries, E hidden dim, B batch (1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from longtrain.cache.base import Causal, Mask
from longtrain.cache.entry_sets import EntrySets
from longtrain.cache.selected import SelectedCache
from longtrain.decoding.evict import Budget, PromptRun
from longtrain.decoding.roles import ChildChoice, Draft, Parts, TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ArtifactError
from longtrain.methods.policies.base import Scorer
from longtrain.targets.step import OutputRequest, TargetStep, TokenBatch

if TYPE_CHECKING:
    from longtrain.cache.dense import DenseCache
    from longtrain.decoding.retrieval.selector import Selector
    from longtrain.targets.attention import AttentionHook
    from longtrain.targets.info import TargetInfo
    from longtrain.targets.model import Target

Attach = Callable[[Any], Parts]
"""Function that builds new parts for the target or an fp32 view of it, in that target's dtype."""

Forward = Callable[..., TargetStep]
"""`Target.forward`, or a `StoredForward`."""

PERIOD = 61
"""Length of the random block that the prompt repeats. Repetition makes attention sharp, so that an error of
one position changes the outputs."""

CYCLES, DEPTH = 2, 4
ACCEPTED = 2
"""Drafted tokens that are accepted in every cycle."""

SCRIPTED = CYCLES * (ACCEPTED + 1) + DEPTH - ACCEPTED
"""Tokens after the prompt of a script that is read from a document."""

LOWEST = -25.0
"""Lower bound to which log-probabilities and a selector's scores are clamped before the comparison (nats)."""

LAST = "hidden_-1"
"""Input of the LM head. Stored if another program computed the draft's inputs: training read it as well."""

FIRST = 2
"""Fewest first layers whose tensors are stored for an evictor; the second depends on all of the first."""

REPEATED, SHARE = 8, 0.625
"""Kept entries are chosen from the prompt's scores, repeated this many times, with this budget ratio. The
repeats make the text long enough that a changed window or budget changes the choice."""


@dataclass(frozen=True)
class Kind:
    """A kind of golden outputs.

    Args:
        name: name in the manifest, which omits `laws`.
        role: the field of `Parts` that holds the module.
        outputs: name of the module's outputs in messages.
        tokens: names of the prompt's tensors.
        near: name of the outputs in fp32 on stored inputs.
        whole: name of the outputs with the whole target; equal to `near` if all layers' inputs are stored.
        prompt: (target info, requested length) -> the tensors of `tokens`.
        ask: (module, target, its forward, stored tensors: own and inputs) -> outputs, and the target's
            tensors that the module read.
        distance: (outputs, stored outputs) -> relative distances.
        layers: target info -> number of first layers whose tensors are stored; None: all layers.
        choice: name of the chosen entries; empty: the kind has no choice.
        choose: (module, stored scores, target info) -> the chosen entries, on the CPU.
    """

    name: str
    role: str
    outputs: str
    tokens: tuple[str, ...]
    near: str
    whole: str
    prompt: Callable[[TargetInfo, int], dict[str, Tensor]]
    ask: Callable[[Any, Any, Forward, Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]
    distance: Callable[[Tensor, Tensor], Tensor]
    layers: Callable[[TargetInfo], int] | None = None
    choice: str = ""
    choose: Callable[[Any, Tensor, TargetInfo], Tensor] | None = None

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the stored tensors that are not inputs from the target."""
        names = dict.fromkeys((*self.tokens, self.near, self.whole, self.choice))
        return tuple(name for name in names if name)


def _block(info: TargetInfo, tokens: int, gen: torch.Generator) -> Tensor:
    """Return a repeated block of `PERIOD` random tokens: ids_T, int64."""
    block_T = torch.randint(info.vocab_size, (PERIOD,), generator=gen)
    return block_T.repeat(tokens // PERIOD + 1)[:tokens]


def _prompt(info: TargetInfo, tokens: int, more: int = 0) -> dict[str, Tensor]:
    """Return a prompt of at most half of the target's positions, and `more` tokens after it."""
    tokens = min(max(PERIOD, tokens), info.max_positions // 2)
    return {"ids_T": _block(info, tokens + more, torch.Generator().manual_seed(0))}


def _script(info: TargetInfo, tokens: int) -> dict[str, Tensor]:
    """Return a prompt, and the forced root and drafted tokens of each cycle (`ACCEPTED` are accepted)."""
    gen = torch.Generator().manual_seed(0)
    room = info.max_positions - CYCLES * (ACCEPTED + 1) - DEPTH
    return {
        "ids_T": _block(info, min(max(PERIOD, tokens), room), gen),
        "roots_C": torch.randint(info.vocab_size, (CYCLES,), generator=gen),
        "drafts_CD": torch.randint(info.vocab_size, (CYCLES, DEPTH), generator=gen),
    }


def script_of(ids_T: Tensor) -> dict[str, Tensor]:
    """Return a document as a draft's script: its last tokens are the roots and drafted tokens.

    Args:
        ids_T: token ids of a document, at least `SCRIPTED` + 2.
    """
    first = len(ids_T) - SCRIPTED
    roots = [first + cycle * (ACCEPTED + 1) for cycle in range(CYCLES)]
    drafts = [ids_T[root + 1 : root + 1 + DEPTH] for root in roots]
    return {"ids_T": ids_T[:first], "roots_C": ids_T[roots], "drafts_CD": torch.stack(drafts)}


def _centred_distance(got: Tensor, expected: Tensor) -> Tensor:
    """Relative distances over the last dimension, of which the mean is removed first."""
    got, expected = (one.double() - one.double().mean(-1, keepdim=True) for one in (got, expected))
    return (got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)


def _plain_distance(got: Tensor, expected: Tensor) -> Tensor:
    """Relative distances of scores over the last dimension."""
    return (got.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1).clamp_min(1e-12)


class _NotingCache:
    """Cache wrapper that records which layers a draft reads."""

    def __init__(self, cache: DenseCache) -> None:
        self.cache = cache
        self.layers: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """Record the layer, and compute attention."""
        self.layers.add(layer)
        return self.cache.attend(layer, q_BHTD, mask=mask, scale=scale)

    def read(self, length: int) -> dict[str, Tensor]:
        """Return keys and values of the layers that were read, under the names of inputs."""
        buffers = {"k": self.cache.k_LBGSD, "v": self.cache.v_LBGSD}
        return {
            f"{name}_{layer}": buffer[layer, 0, :, :length].transpose(0, 1)
            for layer in sorted(self.layers)
            for name, buffer in buffers.items()
        }


class _ForcedRng:
    """Random generator that returns given tokens, by absolute position."""

    def __init__(self, tokens_D: Tensor, first: int) -> None:
        self._tokens_D, self._first = tokens_D, first

    def below(self, prob_B: Tensor, pos_B: Tensor, role: str) -> Tensor:
        return prob_B >= 0.5

    def draw(self, weight_BV: Tensor, pos_B: Tensor, role: str) -> Tensor:
        index_B = (pos_B - self._first).clamp(0, len(self._tokens_D) - 1)
        return self._tokens_D.to(weight_BV.device)[index_B.to(weight_BV.device)]


@torch.no_grad()
def _ask_draft(
    draft: Draft, target: Target, forward: Forward, stored: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-distribution at each forced token at temperature 1: logq_CDV (nats).

    The LM head's input, which no draft reads, is returned among the inputs too if it is stored (`LAST`).
    A draft of a few tokens of the vocabulary gives the laws of its `smooth` counterpart (`roles.Draft`).

    Raises:
        ArtifactError: the draft does not sample its tokens with the generator it is given.
    """
    draft = getattr(draft, "smooth", lambda: draft)()
    asked = tuple(dict.fromkeys((*draft.outputs.hidden, *((-1,) if LAST in stored else ()))))
    device, expected = target.device, replace(draft.outputs, logits="none", hidden=asked)
    ids_BT, roots_C = stored["ids_T"][None].to(device), stored["roots_C"].to(device)
    drafts_CD = stored["drafts_CD"]
    length, depth = ids_BT.shape[1], drafts_CD.shape[1]
    total = length + len(roots_C) * (ACCEPTED + 1)
    cache: Any = _NotingCache(target.plain_cache(1, total, depth + 1))
    hidden: dict[int, list[Tensor]] = {layer: [] for layer in expected.hidden}

    def step(first: int, ids_BT: Tensor, committed: int) -> TargetStep:
        pos_BT = first + torch.arange(ids_BT.shape[1], device=device)[None]
        made = forward(TokenBatch(pos_BT, ids_BT, mask=Causal()), cache.cache, outputs=expected)
        for layer, state in made.hidden.items():
            hidden[layer].append(state[0, :committed])
        return made

    prefill = step(0, ids_BT, length)
    cache.commit(None, torch.tensor([length], device=device))
    draft.start(ids_BT, cache.len_B.clone(), prefill, cache)

    path_BP = torch.arange(depth + 1, device=device)[None]
    path_BP = torch.where(path_BP <= ACCEPTED, path_BP, 0)
    n_B = torch.tensor([ACCEPTED + 1], device=device)
    logq = []
    for root, drafts_D, following in zip(roots_C, drafts_CD, roots_C.roll(-1), strict=True):
        position = int(cache.len_B[0])
        tree, q_DV = _forced(draft, root[None], drafts_D, position + 1)
        logq.append(q_DV.log().clamp_min(LOWEST))
        made = step(position, tree.tokens_BN, ACCEPTED + 1)
        cache.commit(path_BP, n_B)
        draft.observe(tree, Verdict(path_BP, n_B, following[None]), made)
    states = {f"hidden_{layer}": torch.cat(parts) for layer, parts in hidden.items()}
    return torch.stack(logq), states | cache.read(total)


def _forced(draft: Draft, root_B: Tensor, drafts_D: Tensor, first: int) -> tuple[TokenTree, Tensor]:
    """Have the draft propose these tokens from position `first`; return chain and distributions q_DV."""
    shape, sampling = TreeShape((1,) * len(drafts_D), ChildChoice.IID), Sampling(temperature=1.0)
    tree = draft.propose(root_B, shape, sampling, _ForcedRng(drafts_D, first))
    if tree.q_BNV is None or tree.tokens_BN[0, 1:].tolist() != drafts_D.tolist():
        raise ArtifactError("the draft does not sample its chain with the generator it is given")
    return tree, tree.q_BNV[0, : len(drafts_D)]


def _first_layers(info: TargetInfo) -> int:
    """Return the number of layers up to the first that has scores, or `FIRST`."""
    return min(max(FIRST, info.full_layers[0] + 1), info.n_layers)


class _FirstLayers:
    """Attention hook that records the first layers' tensors and calls the evictor's hook for all layers."""

    def __init__(self, inner: AttentionHook | None, count: int) -> None:
        self.inner, self.count = inner, count
        self.read: dict[str, Tensor] = {}
        self.see_inputs = None if getattr(inner, "see_inputs", None) is None else self._see_inputs

    def _see_inputs(self, layer: int, x_BTE: Tensor) -> None:
        if layer < self.count:
            self.read[f"input_{layer}"] = x_BTE[0].cpu()
        cast(Any, self.inner).see_inputs(layer, x_BTE)

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        parts = {"k": k_BGTD, "v": v_BGTD} | ({} if self.inner is None else {"q": q_BHTD})
        if layer < self.count:
            self.read |= {f"{name}_{layer}": part[0].transpose(0, 1).cpu() for name, part in parts.items()}
        if self.inner is not None:
            self.inner(layer, q_BHTD, k_BGTD, v_BGTD)


@torch.no_grad()
def _ask_evictor(
    evictor: Any, target: Target, forward: Forward, stored: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the importance of each token: scores_LGT."""
    if not isinstance(evictor, Scorer):
        raise ArtifactError(f"golden scores need an evictor with scores; {type(evictor).__name__} has none")
    ids_BT, length = stored["ids_T"][None].to(target.device), len(stored["ids_T"])
    n_B, pos_BT = torch.tensor([length]).to(ids_BT), torch.arange(length, device=target.device)[None]
    cache = target.plain_cache(1, length, 0)
    hook = _FirstLayers(cast(Any, evictor).hook([length]), _first_layers(target.info))
    forward(TokenBatch(pos_BT, ids_BT), cache, outputs=OutputRequest("none"), hook=hook)
    cache.commit(None, n_B)
    run = PromptRun(target, cache, (length,), ids_BT, n_B, root_B=ids_BT[:, -1], watched=hook.inner)
    scores_LBGT = evictor.scores(run)
    assert scores_LBGT is not None
    return scores_LBGT[:, 0], hook.read


def _keep(evictor: Scorer, scores_LGT: Tensor, info: TargetInfo) -> Tensor:
    """Return the mask of KV entries that the evictor keeps: kept_LGS, bool."""
    scores_LBGS = scores_LGT.double().repeat(1, 1, REPEATED)[:, None]
    run = SimpleNamespace(lengths=(scores_LBGS.shape[-1],))  # all that `select` reads if scores are given
    keep = evictor.with_budget(Budget(ratio=SHARE)).select(cast(PromptRun, run), scores_LBGS)
    assert keep is not None
    return keep.mask(scores_LBGS.shape[-1])


@torch.no_grad()
def _ask_selector(
    selector: Selector, target: Target, forward: Forward, stored: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the scores that the last token assigns to the KV entries before it: scores_XS.

    A selector that scores before the forward reads hidden states of those tokens; one that scores within each
    layer reads their keys and the last token's queries.
    """
    ids_BT, S = stored["ids_T"][None].to(target.device), len(stored["ids_T"]) - 1
    queries: list[Tensor] = []
    read: dict[str, Tensor] = {}

    def hook(layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        if selector.table_LG is None:
            queries.append(q_BHTD[:, :, S:])
            read[f"k_{layer}"] = k_BGTD[0, :, :S].transpose(0, 1)
            read[f"q_{layer}"] = q_BHTD[0, :, S:].transpose(0, 1)

    store = target.plain_cache(1, S + 1, 0)
    rows = TokenBatch(torch.arange(S + 1, device=target.device)[None], ids_BT)
    step = forward(rows, store, outputs=OutputRequest("none", hidden=selector.outputs.hidden), hook=hook)
    store.rewind([S])
    hidden = {layer: state[:, :S] for layer, state in step.hidden.items()}
    read |= {f"hidden_{layer}": state[0] for layer, state in hidden.items()}
    cache = SelectedCache(store)
    selector.start(ids_BT[:, :S], torch.tensor([S]).to(ids_BT), TargetStep(None, hidden), cache)
    if selector.table_LG is not None:
        scores_BXS = selector.ahead(ids_BT[:, S])
    else:
        found = [selector.at_layer(n, q_BHTD, cache.keys(n), cache.len_B) for n, q_BHTD in enumerate(queries)]
        scores_BXS = torch.cat(found, 1)
    return scores_BXS[0, :, :S].clamp_min(LOWEST), read


def _read(selector: Selector, scores_XS: Tensor, info: TargetInfo) -> Tensor:
    """Return the indices of the KV entries that each KV head of each layer reads: read_LGK, int64."""
    X, S = scores_XS.shape
    table_LG = selector.table_LG
    if table_LG is None:  # one set for each KV head of each layer
        table_LG = torch.arange(info.n_layers * info.n_kv_heads).view(info.n_layers, -1)
    sets = EntrySets(selector.budget, 1, X, torch.device("cpu"))
    sets.open(torch.tensor([S]))
    sets.put(scores_XS[None])
    return sets.idx_BXK[0, table_LG.cpu()]


_KINDS = (
    Kind(
        name="laws",
        role="draft",
        outputs="laws",
        tokens=("ids_T", "roots_C", "drafts_CD"),
        near="logq_CDV",
        whole="logq_CDV",
        prompt=_script,
        ask=_ask_draft,
        distance=_centred_distance,
    ),
    Kind(
        name="scores",
        role="evictor",
        outputs="scores",
        tokens=("ids_T",),
        near="near_FGT",
        whole="scores_LGT",
        prompt=_prompt,
        ask=_ask_evictor,
        distance=_plain_distance,
        layers=_first_layers,
        choice="kept_LGS",
        choose=_keep,
    ),
    Kind(
        name="rows",
        role="selector",
        outputs="scores",
        tokens=("ids_T",),
        near="scores_XS",
        whole="scores_XS",
        prompt=lambda info, tokens: _prompt(info, tokens, more=1),
        ask=_ask_selector,
        distance=_centred_distance,
        choice="read_LGK",
        choose=_read,
    ),
)
KINDS = {kind.name: kind for kind in _KINDS}
