"""A stand-in for the target that stores what `packed` gives, a document at a time, and gives it again.

Keys are stored before RoPE and rotated as they are read, so a document may stand at any positions later.
Shapes: T tokens of a packed row, G KV heads, D head dim.
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
from longtrain.layers import apply_rope
from longtrain.losses import top_law
from longtrain.targets.step import PackedStep, Want

if TYPE_CHECKING:
    from longtrain.data.rows.batch import Batch
    from longtrain.targets.attention import Watch
    from longtrain.targets.model import Target

PROBE = Form("bf16")
"""How passes outside of a batch are stored, those of a warm start, say."""


class StoredTarget:
    """A target whose packed passes are stored and read; everything else is the real one's.

    What is computed is used as it was stored, rounding included: it makes no difference whether a document
    was read or computed. Documents without labels are neither computed for good nor stored; their features
    are zeros. A pass outside of a batch (`follow`) is kept by itself, whole and in bf16.

    Args:
        target: the real one; without layers where everything is stored.
        features: where they are.
        form: how rows are stored.
        compute: whether the target runs for what is not stored; False: that is an error.

    Note: with other positions than those a document was stored at, anchors excepted, V and hidden states are
        those of the first time. RoPE is relative, so this is exact where a whole document moves, and as good
        as LongSpec's own guard says where its first tokens stay (about 0.001 nats).
    """

    def __init__(self, target: Target, features: FeatureFiles, form: Form, *, compute: bool) -> None:
        self.real, self.features, self.form, self.compute = target, features, form, compute
        self._batch: Batch | None = None
        self._want: str | None = None
        self._settled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def follow(self, objective: nn.Module) -> None:
        """See the batch that an objective works on, for as long as it does."""

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
        want: Want = Want("none", hidden=(-1,)),  # noqa: B008 (frozen)
        *,
        watch: Watch | None = None,
    ) -> PackedStep:
        """As `Target.packed`; with a lean form `top` comes in the place of the LM head's input.

        Raises:
            ConfigError: the pass is watched; or another one is wanted of a row, and no layers are there.
            DataError: a document is not stored and the target may not run, or a shard is damaged.
            LongtrainError: the disk is full.
        """
        if watch is not None:
            raise ConfigError(
                "this method watches every layer of the target, and that is not stored; pass features=online"
            )
        asked = in_words(want)
        if self._batch is not None and self._want not in (None, asked):
            return self._aside(ids_T, pos_T, bounds, want)
        form = self.form if self._batch is not None else PROBE
        if self._batch is not None:
            self._want = asked
            self._check(asked)
        stored = self._row(ids_T, pos_T, bounds, want, form, asked)
        features = form.features(stored, self.real.dtype)
        rope = tuple(part[0] for part in self.real.rope(pos_T[None]))
        kv = {layer: (apply_rope(k_TGD, rope), v_TGD) for layer, (k_TGD, v_TGD) in features.kv.items()}  # type: ignore[arg-type]
        return PackedStep(features.hidden, kv, features.top)

    def _aside(self, ids_T: Tensor, pos_T: Tensor, bounds: tuple[int, ...], want: Want) -> PackedStep:
        """A further pass over the same row with another want, which measures the target itself."""
        if not self.compute:
            raise ConfigError(
                f"this method asks the target itself for {in_words(want)}, beside what is stored "
                f"({self._want}), and features=offline loads no layers; switch that measurement off (a "
                "guard_every of 0, say) or pass features=fill"
            )
        return self.real.packed(ids_T, pos_T, bounds, want)

    def _check(self, asked: str) -> None:
        """Refuse a folder that was filled for something else."""
        if self._settled:
            return
        others = {one for one in self.features.wants("row") if one != asked}
        if others:
            raise ConfigError(
                f"features in {self.features.folder} hold {', '.join(sorted(others))}, and this method asks "
                f"for {asked}; pass features.folder=OTHER, or the method's settings that filled them"
            )
        self._settled = True

    def _row(
        self, ids_T: Tensor, pos_T: Tensor, bounds: tuple[int, ...], want: Want, form: Form, asked: str
    ) -> Stored:
        """The row's features as they are stored; what is not there yet is computed and added."""
        spans = [(a, b) for a, b in pairwise(bounds) if b > a]
        host_T, kept = ids_T.cpu(), self._kept(bounds)
        kind, make = ("row", row_key) if self._batch is not None else ("probe", _probe_key)
        keys = {span: make(host_T[slice(*span)], asked) for span in spans if span in kept}
        missing = [span for span, key in keys.items() if key not in self.features]
        if missing and self.features.many:
            self.features.look()
            missing = [span for span in missing if keys[span] not in self.features]
        if missing and not self.compute:
            raise self._lacking(missing[0], spans, asked)
        found: dict[tuple[int, int], Stored] = {}
        if missing:
            whole = len(missing) == len(keys)
            computed = self._computed(ids_T, pos_T, spans if whole else missing, want, form)
            for span in missing:
                self.features.add(
                    keys[span], computed[span], kind=kind, want=asked, name=self._name(span, spans)
                )
                found[span] = computed[span]
        for span, key in keys.items():
            if span not in found:
                read = self.features.read(key, self._name(span, spans))
                found[span] = {name: part.to(ids_T.device, non_blocking=True) for name, part in read.items()}
        return _joined(found, spans, bounds[-1])

    def _kept(self, bounds: tuple[int, ...]) -> set[tuple[int, int]]:
        """The documents with labels; all of them where nobody knows."""
        batch, spans = self._batch, [(a, b) for a, b in pairwise(bounds) if b > a]
        if batch is None or tuple(batch.bounds) != tuple(bounds):
            return set(spans)
        mask_T = batch.loss_mask_T.cpu() if batch.host_mask_T is None else batch.host_mask_T
        kept = {(a, b) for a, b in spans if bool(mask_T[a:b].any())}
        return kept or set(spans[:1])  # a row without labels has features too

    def _computed(
        self, ids_T: Tensor, pos_T: Tensor, spans: list[tuple[int, int]], want: Want, form: Form
    ) -> dict[tuple[int, int], Stored]:
        """The target's pass over some documents of a row, as it will be stored."""
        picked = torch.cat([torch.arange(a, b) for a, b in spans]).to(ids_T.device)
        edges = [0]
        for a, b in spans:
            edges.append(edges[-1] + b - a)
        with keys_before_rope(self.real, want.kv) as keys:
            step = self.real.packed(ids_T[picked], pos_T[picked], tuple(edges), want)
        features = Features(dict(step.hidden), {layer: (keys[layer], kv[1]) for layer, kv in step.kv.items()})
        if form.top_k and -1 in features.hidden:
            k = min(form.top_k, self.real.info.vocab_size)
            features.top = top_law(features.hidden.pop(-1), self.real.head_weight, k)
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
        return DataError(
            f"features in {self.features.folder} lack {what} ({asked}); fill them with the same settings and "
            "features=fill (documents that data.stages cut must be cut alike: recut: false)"
        )


def row_key(ids_T: Tensor, asked: str) -> str:
    """The key of a document in a batch.

    Args:
        ids_T: its token ids, on the host.
        asked: what is asked of the target (`in_words`).
    """
    return key_of(ids_T, f"row {asked}")


def _probe_key(ids_T: Tensor, asked: str) -> str:
    return key_of(ids_T, f"probe {asked}")


def in_words(want: Want) -> str:
    """What a pass gives, such as `hidden=-1 kv=5`."""
    parts = [f"hidden={','.join(map(str, sorted(want.hidden)))}"] if want.hidden else []
    parts += [f"kv={','.join(map(str, sorted(want.kv)))}"] if want.kv else []
    return " ".join(parts) or "nothing"


@contextmanager
def keys_before_rope(target: Target, layers: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Layer -> its keys [T, G, D] before RoPE of the packed pass that runs inside the block."""
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
    """The documents one after another; those that are not there are zeros."""
    some = next(iter(found.values()))
    parts: dict[str, list[Tensor]] = {name: [] for name in some}
    for a, b in spans:
        for name, like in some.items():
            here = found.get((a, b))
            parts[name].append(like.new_zeros(b - a, *like.shape[1:]) if here is None else here[name])
    return {name: torch.cat(pieces) for name, pieces in parts.items()}
