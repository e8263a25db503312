"""Defines `StoredTarget`, which replaces the target and stores or reads the outputs of `packed`.

Keys are stored before RoPE and rotated when read, so a document may have other positions in a later batch.

Shapes: T tokens of a packed sequence, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longtrain.errors import ConfigError, DataError
from longtrain.features.forms import Features, Form, Stored
from longtrain.features.shards import FeatureFiles, key_of
from longtrain.kernels.fused_layer import rotated
from longtrain.losses import top_tokens
from longtrain.targets.step import OutputRequest, PackedStep

if TYPE_CHECKING:
    from longtrain.data.packing.batch import Batch
    from longtrain.targets.attention import AttentionHook
    from longtrain.targets.model import Target

PROBE = Form("bf16")
"""Storage form of forwards outside of a batch, such as those of a warm start."""


class StoredTarget:
    """A target whose packed forwards are stored and read; every other attribute is the real target's.

    Computed features are used as they were stored, rounding included, so it makes no difference whether a
    document was read or computed. Features of documents without labels are neither computed nor stored; they
    are zeros. A forward outside of a batch (`follow`) is stored separately, whole and in bf16.

    Args:
        target: the real target; its layers may be absent if everything is stored.
        features: the folder that features are read from and added to.
        form: storage form of documents.
        compute: True: run the target for what is not stored; False: that is an error.

    Note: at positions other than those a document was stored at, V and hidden states are still those of the
        first time. RoPE is relative, so this is exact when a whole document moves, and as good as LongSpec's
        own guard measures when its first tokens (anchors) stay (about 0.001 nats).
    """

    def __init__(self, target: Target, features: FeatureFiles, form: Form, *, compute: bool) -> None:
        self.real, self.features, self.form, self.compute = target, features, form, compute
        self._batch: Batch | None = None
        self._want: str | None = None
        self._checked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def follow(self, objective: nn.Module) -> None:
        """Register hooks on an objective that record its current batch while it runs."""

        def begin(_module: nn.Module, args: tuple[Any, ...]) -> None:
            self._batch, self._want = args[0], None

        def end(_module: nn.Module, _args: Any, _loss: Any) -> None:
            self._batch = None

        objective.register_forward_pre_hook(begin)
        objective.register_forward_hook(end, always_call=True)

    @torch.no_grad()
    def packed(
        self,
        ids_T: Tensor,
        pos_T: Tensor,
        bounds: tuple[int, ...],
        outputs: OutputRequest = OutputRequest("none", hidden=(-1,)),  # noqa: B008 (frozen)
        *,
        hook: AttentionHook | None = None,
    ) -> PackedStep:
        """Same as `Target.packed`; with `form.top_k`, `top` replaces the LM head's input.

        Raises:
            ConfigError: attention is observed (`hook`), or a second output request for the same batch
                without layers.
            DataError: a document is not stored and the target may not run, or a shard is damaged.
            LongtrainError: the disk is full.
        """
        if hook is not None:
            raise ConfigError(
                "this method watches every layer of the target, and that is not stored; pass features=online"
            )
        asked = in_words(outputs)
        if self._batch is not None and self._want not in (None, asked):
            return self._aside(ids_T, pos_T, bounds, outputs)
        form = self.form if self._batch is not None else PROBE
        if self._batch is not None:
            self._want = asked
            self._check(asked)
        stored = self._row(ids_T, pos_T, bounds, outputs, form, asked)
        features = form.features(stored, self.real.dtype)
        cos_BTD, sin_BTD = self.real.rope(pos_T[None])
        rope, neighbours = (cos_BTD[0], sin_BTD[0]), self.real.family.neighbours
        kv = {
            layer: (rotated(k_TGD, rope, neighbours=neighbours), v_TGD)
            for layer, (k_TGD, v_TGD) in features.kv.items()
        }
        return PackedStep(features.hidden, kv, features.top)

    def _aside(
        self, ids_T: Tensor, pos_T: Tensor, bounds: tuple[int, ...], outputs: OutputRequest
    ) -> PackedStep:
        """Run the real target for a second output request on the same batch (a method's own measurement)."""
        if not self.compute:
            raise ConfigError(
                f"this method asks the target itself for {in_words(outputs)}, beside what is stored "
                f"({self._want}), and no layers are loaded (features=offline or engine); switch it off (a "
                "guard_every of 0, say) or pass features=fill"
            )
        return self.real.packed(ids_T, pos_T, bounds, outputs)

    def _check(self, asked: str) -> None:
        """Refuse a folder that was filled for another output request."""
        if self._checked:
            return
        others = {one for one in self.features.wants("row") if one != asked}
        if others:
            raise ConfigError(
                f"features in {self.features.folder} hold {', '.join(sorted(others))}, and this method asks "
                f"for {asked}; pass features.folder=OTHER, or the method's settings that filled them"
            )
        self._checked = True

    def _row(
        self,
        ids_T: Tensor,
        pos_T: Tensor,
        bounds: tuple[int, ...],
        outputs: OutputRequest,
        form: Form,
        asked: str,
    ) -> Stored:
        """Return the stored features of a packed sequence, computing and adding those that are missing."""
        spans = [(a, b) for a, b in pairwise(bounds) if b > a]
        host_T, kept = ids_T.cpu(), self._kept(bounds)
        kind, make = ("row", row_key) if self._batch is not None else ("probe", _probe_key)
        keys = {span: make(host_T[slice(*span)], asked) for span in spans if span in kept}
        missing = [span for span, key in keys.items() if key not in self.features]
        if missing and self.features.many:
            self.features.look()
            # another rank may have stored them meanwhile
            missing = [span for span in missing if keys[span] not in self.features]
        if missing and not self.compute:
            raise self._lacking(missing[0], spans, asked)
        found: dict[tuple[int, int], Stored] = {}
        if missing:
            whole = len(missing) == len(keys)
            computed = self._computed(ids_T, pos_T, spans if whole else missing, outputs, form)
            for span in missing:
                self.features.add(
                    keys[span], computed[span], kind=kind, outputs=asked, name=self._name(span, spans)
                )
                found[span] = computed[span]
        for span, key in keys.items():
            if span not in found:
                read = self.features.read(key, self._name(span, spans))
                found[span] = {name: part.to(ids_T.device, non_blocking=True) for name, part in read.items()}
        return _joined(found, spans, bounds[-1])

    def _kept(self, bounds: tuple[int, ...]) -> set[tuple[int, int]]:
        """Return the spans of documents with labels; all spans if the labels are unknown."""
        batch, spans = self._batch, [(a, b) for a, b in pairwise(bounds) if b > a]
        if batch is None or tuple(batch.bounds) != tuple(bounds):
            return set(spans)
        mask_T = batch.host_labels
        kept = {(a, b) for a, b in spans if bool(mask_T[a:b].any())}
        return kept or set(spans[:1])  # a sequence without labels still needs tensors

    def _computed(
        self, ids_T: Tensor, pos_T: Tensor, spans: list[tuple[int, int]], outputs: OutputRequest, form: Form
    ) -> dict[tuple[int, int], Stored]:
        """Run the target over some documents of a packed sequence and encode the result for storage."""
        picked = torch.cat([torch.arange(a, b) for a, b in spans]).to(ids_T.device)
        edges = [0]
        for a, b in spans:
            edges.append(edges[-1] + b - a)
        with keys_before_rope(self.real, outputs.kv) as keys:
            step = self.real.packed(ids_T[picked], pos_T[picked], tuple(edges), outputs)
        features = Features(dict(step.hidden), {layer: (keys[layer], kv[1]) for layer, kv in step.kv.items()})
        if form.top_k and -1 in features.hidden:
            k = min(form.top_k, self.real.info.vocab_size)
            features.top = top_tokens(features.hidden.pop(-1), self.real.head_weight, k)
            features.vocab_size = self.real.info.vocab_size
        stored = form.stored(features)
        return {
            span: {name: part[a:b] for name, part in stored.items()}
            for span, (a, b) in zip(spans, pairwise(edges), strict=True)
        }

    def _name(self, span: tuple[int, int], spans: list[tuple[int, int]]) -> str:
        names = () if self._batch is None else self._batch.names
        at = spans.index(span)
        return names[at] if at < len(names) else f"number {at}"

    def _lacking(self, span: tuple[int, int], spans: list[tuple[int, int]], asked: str) -> DataError:
        a, b = span
        what = (
            f"document {self._name(span, spans)} of {b - a} tokens" if self._batch else "a pass of its setup"
        )
        remedy = self.features.remedy(setup=self._batch is None)
        return DataError(f"features in {self.features.folder} lack {what} ({asked}); {remedy}")


def row_key(ids_T: Tensor, asked: str) -> str:
    """Return the key of a document in a batch.

    Args:
        ids_T: its token ids, on the host.
        asked: the requested outputs (`in_words`).
    """
    return key_of(ids_T, f"row {asked}")


def _probe_key(ids_T: Tensor, asked: str) -> str:
    return key_of(ids_T, f"probe {asked}")


def in_words(outputs: OutputRequest) -> str:
    """Describe the outputs of a request in words, such as `hidden=-1 kv=5`."""
    parts = [f"hidden={','.join(map(str, sorted(outputs.hidden)))}"] if outputs.hidden else []
    parts += [f"kv={','.join(map(str, sorted(outputs.kv)))}"] if outputs.kv else []
    return " ".join(parts) or "nothing"


@contextmanager
def keys_before_rope(target: Target, layers: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Context manager that records keys [T, G, D] before RoPE, by layer, of the packed forward inside."""
    found: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            found[layer] = output.reshape(-1, target.info.n_kv_heads, target.info.head_dim)

        return hook

    handles = []
    for layer in layers:
        attention = target.model.model.layers[layer].self_attn
        module = attention.k_norm if target.info.qk_norm else attention.k_proj
        handles.append(module.register_forward_hook(keep(layer)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _joined(found: dict[tuple[int, int], Stored], spans: list[tuple[int, int]], tokens: int) -> Stored:
    """Concatenate the documents' features; missing documents become zeros."""
    some = next(iter(found.values()))
    parts: dict[str, list[Tensor]] = {name: [] for name in some}
    for a, b in spans:
        for name, like in some.items():
            here = found.get((a, b))
            parts[name].append(like.new_zeros(b - a, *like.shape[1:]) if here is None else here[name])
    return {name: torch.cat(pieces) for name, pieces in parts.items()}
