"""Readers of hidden states that other trainers dumped: SpecForge's and speculators' folders.

SpecForge (`scripts/prepare_hidden_states.py`): `rows_0-5000/data_7.ckpt`, a pickled mapping of `input_ids`,
`loss_mask` [T], `hidden_state` [1, T, E], which is the LM head's input, and `aux_hidden_state` [1, T, 3 E].
speculators, older (`SampleFileDataset`): `data_7.pt`, a pickled mapping of `input_ids`, `loss_mask` [T] and
`hidden_states`, a list of [T, E] whose last one is the last layer's output before the final norm.
speculators, newer (`ArrowDataset`): `hs_7.safetensors` with `token_ids` [T] and `hidden_states` [T, L, E].
No dump records which layers it contains, and none contains keys and values: methods that read those need
`features=fill`.

Pickles are read with `weights_only=True`, which runs no code.

Shapes: T tokens, E hidden dim, L layers that were dumped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from longtrain.errors import DataError, TargetMismatchError
from longtrain.features.forms import Features, Form
from longtrain.features.target import in_words, row_key
from longtrain.files import need_regular
from longtrain.pickled import read_pickled
from longtrain.targets.step import OutputRequest

if TYPE_CHECKING:
    from longtrain.features.shards import FeatureFiles
    from longtrain.targets.model import Target

ENDINGS = (".ckpt", ".pt", ".safetensors")


@dataclass(frozen=True)
class DumpedDocument:
    """One sample of a dump.

    Args:
        name: path of its file within the folder.
        ids_T: token ids, int64.
        labels_T: bool, True where the token is a label; None if the dump has no labels.
        layers_TLE: outputs of the dumped layers other than the last one.
        last_TE: the last layer's output.
        normed: True if `last_TE` is after the final norm, so that it is the LM head's input.
    """

    name: str
    ids_T: Tensor
    labels_T: Tensor | None
    layers_TLE: Tensor
    last_TE: Tensor
    normed: bool


def documents(folder: Path) -> Iterator[DumpedDocument]:
    """Yield the samples of a dump, in the order of their numbers.

    Raises:
        DataError: there are none, or a file is damaged or of another layout.
    """
    files = [path for path in folder.rglob("*") if path.suffix in ENDINGS and path.is_file()]
    if not files:
        raise DataError(f"{folder} holds no dumped hidden states ({', '.join(ENDINGS)})")
    for file in sorted(files, key=_number):
        yield _read(file, str(file.relative_to(folder)))


def take(
    dump: Path, features: FeatureFiles, target: Target, *, form: Form, layers: Sequence[int] = ()
) -> int:
    """Store a dump's documents, for methods that need hidden states but neither keys nor values.

    Args:
        dump: the other trainer's folder.
        features: destination; its owner writes its `Identity` and closes it.
        target: the target whose hidden states were dumped; its layers are not needed.
        form: storage form; its `top_k` must be 0.
        layers: the dumped layers other than the last one, as given to the command that dumped them.

    Returns:
        The number of tokens stored; documents that are stored already are skipped.

    Raises:
        DataError: a damaged file, ids outside the vocabulary, numbers that are not finite, or other layers.
        TargetMismatchError: hidden states of another size.
    """
    asked = in_words(OutputRequest("none", hidden=(*layers, -1)))
    tokens = 0
    for document in documents(dump):
        _check(document, target, layers)
        last_TE = document.last_TE.to(target.device, target.dtype)
        if not document.normed:
            last_TE = target.final_norm(last_TE)
        hidden = {layer: document.layers_TLE[:, at] for at, layer in enumerate(layers)}
        stored = form.stored(Features({**hidden, -1: last_TE}))
        key = row_key(document.ids_T, asked)
        if key not in features:
            features.add(key, stored, kind="row", outputs=asked, name=document.name)
            tokens += len(document.ids_T)
    return tokens


def _check(document: DumpedDocument, target: Target, layers: Sequence[int]) -> None:
    info, found = target.info, document.layers_TLE.shape
    if document.last_TE.shape[-1] != info.hidden_size:
        raise TargetMismatchError(
            f"{document.name} has hidden states of size {document.last_TE.shape[-1]}, and target {info.name} "
            f"of {info.hidden_size}"
        )
    if found[1] != len(layers):
        raise DataError(
            f"{document.name} holds {found[1]} layers beside the last one, and {len(layers)} are named "
            f"({list(layers)}); name those that its command dumped"
        )
    if int(document.ids_T.min()) < 0 or int(document.ids_T.max()) >= info.vocab_size:
        raise DataError(
            f"{document.name} has a token outside the vocabulary of {info.vocab_size} of target {info.name}"
        )
    if not (document.last_TE.isfinite().all() and document.layers_TLE.isfinite().all()):
        raise DataError(f"{document.name} has hidden states that are not finite; dump it again")


def _read(file: Path, name: str) -> DumpedDocument:
    try:
        if file.suffix == ".safetensors":
            need_regular(file)
            return _newer_speculators(load_file(file), name)
        values = read_pickled(file)
        return _specforge(values, name) if file.suffix == ".ckpt" else _speculators(values, name)
    except (
        OSError,
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        EOFError,
        SafetensorError,
    ) as error:
        reason = (str(error).splitlines() or [""])[0][:120]
        raise DataError(
            f"{file} is damaged, or no dump of SpecForge or speculators ({type(error).__name__}: {reason})"
        ) from None


def _specforge(values: Any, name: str) -> DumpedDocument:
    last_TE = values["hidden_state"].squeeze(0)
    aux = values.get("aux_hidden_state")
    layers_TLE = last_TE.new_zeros(len(last_TE), 0, last_TE.shape[1])
    if aux is not None:
        layers_TLE = aux.squeeze(0).unflatten(-1, (-1, last_TE.shape[1]))
    return _made(name, values["input_ids"], values["loss_mask"], layers_TLE, last_TE, normed=True)


def _speculators(values: Any, name: str) -> DumpedDocument:
    *layers, last_TE = values["hidden_states"]
    layers_TLE = torch.stack(layers, 1) if layers else last_TE.new_zeros(len(last_TE), 0, last_TE.shape[1])
    return _made(name, values["input_ids"], values["loss_mask"], layers_TLE, last_TE, normed=False)


def _newer_speculators(values: dict[str, Tensor], name: str) -> DumpedDocument:
    states_TLE = values["hidden_states"]
    return _made(name, values["token_ids"], None, states_TLE[:, :-1], states_TLE[:, -1], normed=False)


def _made(
    name: str, ids_T: Tensor, mask_T: Tensor | None, layers_TLE: Tensor, last_TE: Tensor, *, normed: bool
) -> DumpedDocument:
    ids_T = ids_T.reshape(-1).long()
    labels_T = None if mask_T is None else mask_T.reshape(-1).bool()
    lengths = {len(ids_T), len(last_TE), len(layers_TLE), len(ids_T) if labels_T is None else len(labels_T)}
    if len(lengths) > 1 or 0 in lengths or last_TE.dim() != 2 or layers_TLE.dim() != 3:
        raise ValueError(f"tensors of {sorted(lengths)} tokens")
    return DumpedDocument(name, ids_T, labels_T, layers_TLE, last_TE, normed)


def _number(file: Path) -> tuple[int, str]:
    found = re.findall(r"\d+", file.stem)
    return (int(found[-1]) if found else 0, str(file))
