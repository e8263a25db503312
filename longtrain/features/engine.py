"""Hidden states that a serving engine wrote: by vLLM's connectors, or by the data generator of speculators.

A request's file `NAME.safetensors` holds `token_ids` [T] and `hidden_states` [T, L, E] in the engine's dtype,
or in fp8 with `hidden_states_scales` [T, 1, 1]. While vLLM writes it, `NAME.safetensors.lock` is locked.

The file does not say which layers it holds. vLLM numbers a layer's input: id 0 is the embeddings, id k the
output of layer k - 1 (0-based), and the number of layers stands for the last one's output before the final
norm. Layers ascend in the file, in whatever order they were asked for.

Source: vLLM 0.33 (`ExampleHiddenStatesConnector`, `_maybe_add_hidden_state`), speculators 0.9.0
(`generate-offline-data`) and hs_connectors 0.9.0, read and not run.

Shapes: T tokens, E hidden dim, L layers in a file.
"""

from __future__ import annotations

import fcntl
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import cross_entropy

from longtrain.errors import ConfigError, DataError, TargetMismatchError, first_line
from longtrain.features.forms import Stored
from longtrain.features.shards import FeatureFiles, StoredDocument
from longtrain.features.target import in_words, row_key
from longtrain.files import need_regular
from longtrain.log import get_logger
from longtrain.settings import wrong
from longtrain.targets.step import OutputRequest

if TYPE_CHECKING:
    from longtrain.targets.model import Target

IDS, STATES, SCALES, MASK = "token_ids", "hidden_states", "hidden_states_scales", "loss_mask"
DTYPES = ("F32", "F16", "BF16")
log = get_logger(__name__)

PROBE = 256
"""First tokens of a document that are compared with their embeddings; of the first document their loss under
the target is logged, too: another last layer shows there."""
AGAIN = "delete it, and have the engine write it again"


class EngineStates(FeatureFiles):
    """A folder of an engine's files in the place of stored features; nothing is written.

    A document is found by its token ids, all of them.

    Args:
        folder: the folder, searched with its subfolders.
        target: the target that the engine ran; its layers are not needed.
        layer_ids: the layers in the files by vLLM's ids; None: those that the method reads, and the last.
    """

    def __init__(self, folder: Path, target: Target, layer_ids: tuple[int, ...] | None = None) -> None:
        super().__init__(folder.expanduser())
        self.target = target
        self.layer_ids = layer_ids
        self._column: dict[int, int] = {}
        """Layer (0-based, of its output; -1: the LM head's input) -> its place in the files."""

    def expect(self, outputs: OutputRequest | None) -> None:
        """Find the documents, and check every file's form.

        Args:
            outputs: what the method asks of the target for every batch.

        Raises:
            ConfigError: the method reads more than hidden states, or layers that are not in the files.
            DataError: a file is damaged, unfinished, or of another form.
            TargetMismatchError: hidden states of another size.
        """
        if outputs is None or outputs.kv:
            raise ConfigError(
                "features=engine has hidden states alone, and this method reads more of the target; pass "
                "method=eagle3 or method=dspark, or features=online"
            )
        ids, asked = self._ids(outputs), in_words(outputs)
        self._column = {layer: ids.index(self._id(layer)) for layer in outputs.hidden}
        unused: list[tuple[str, str]] = []
        for file in sorted(self.folder.rglob("*.safetensors")):
            name = str(file.relative_to(self.folder))
            ids_T, names = self._checked(file, ids)
            place = StoredDocument(name, "row", asked, len(ids_T), "", names, name)
            first = self._found.setdefault(row_key(ids_T, asked), place)
            if first.name != name:
                unused.append((name, first.name))
        if unused:
            log.warning(
                "unused files=%d of %s: %s has the tokens of %s", len(unused), self.folder, *unused[0]
            )

    def read(self, key: str, name: str) -> Stored:
        """See `FeatureFiles.read`.

        Raises:
            DataError: the file is damaged, a value is not finite, or the layers are not those they should be.
        """
        file = self.folder / self._found[key].name
        tensors = _read(file, IDS, STATES, SCALES)
        states_TLE = tensors[STATES]
        if SCALES in tensors:
            states_TLE = (states_TLE.float() * tensors[SCALES]).bfloat16()
        last_TE = states_TLE[:, -1].to(self.target.device, self.target.dtype)
        if key not in self._sound:
            self._check_values(file, tensors, states_TLE)
            self._sound.add(key)
        return {
            f"hidden.{layer}": self.target.final_norm(last_TE) if layer == -1 else states_TLE[:, column]
            for layer, column in self._column.items()
        }

    def example(self, outputs: OutputRequest, tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return token ids [T] of a document, and states [T, E] under the names of golden inputs.

        The LM head's input is among them: training reads the target's distribution from it.

        Args:
            outputs: see `expect`.
            tokens: T, if some document is that long; else the longest one's length.
        """
        self.expect(replace(outputs, hidden=tuple(dict.fromkeys((*outputs.hidden, -1)))))
        key = max(self._found, key=lambda key: min(self._found[key].tokens, tokens))
        name = self._found[key].name
        ids_T, found = _read(self.folder / name, IDS)[IDS].long()[:tokens], self.read(key, name)
        log.info("states of %s tokens=%d", name, len(ids_T))
        return ids_T, {part.replace(".", "_"): state[:tokens].clone() for part, state in found.items()}

    def remedy(self, *, setup: bool = False) -> str:
        """See `FeatureFiles.remedy`."""
        if setup:
            return (
                "an engine writes hidden states of documents alone: pass method=dspark with "
                "level_inputs=false, or method=eagle3 with start_inputs=plain, or features=online"
            )
        return "have the engine write them too, for these very token ids (longtrain prepare rows=FILE)"

    def near(self, ids_T: Tensor) -> str:
        """Say what the engine has in place of a document that it lacks; empty if nothing like it."""
        mine = ids_T.tolist()
        for place in self._found.values():
            theirs = _read(self.folder / place.name, IDS)[IDS].tolist()
            if theirs in (mine[: len(theirs)], mine[-len(theirs) :]):
                why = "the server cut the prompt (--max-model-len, truncate_prompt_tokens)"
            elif mine == theirs[: len(mine)]:
                why = "generated tokens (include_output_tokens), or the data are cut (doc_tokens)"
            elif mine == theirs[-len(mine) :]:
                why = "the server put special tokens in front; send it token ids"
            else:
                continue
            return f"{place.name} has {len(theirs)} tokens in its place: {why}"
        return ""

    def check_mask(self, key: str, mask_T: Tensor, name: str) -> None:
        """Refuse a file whose loss mask, if it has one, differs from that of document `name` of the data.

        Raises:
            DataError: the masks differ.
        """
        place = self._found[key]
        if MASK not in place.leaves:
            return
        file = self.folder / place.name
        theirs = _read(file, MASK)[MASK]
        if theirs.bool()[1:].tolist() != mask_T.bool()[1:].tolist():
            raise DataError(
                f"{file} has a loss_mask of {int(theirs.bool().sum())} labels, and document {name} of the "
                f"data {int(mask_T.bool().sum())}; pass data with the mask that the file was written from"
            )

    def _id(self, layer: int) -> int:
        """Return vLLM's id of a layer's output."""
        return self.target.info.n_layers if layer == -1 else layer + 1

    def _ids(self, outputs: OutputRequest) -> list[int]:
        """Return the ids of the layers in the files, in the files' order."""
        last = self.target.info.n_layers
        needed = sorted({self._id(layer) for layer in outputs.hidden} | {last})
        ids = needed if self.layer_ids is None else sorted(self.layer_ids)
        if not ids or len({*ids}) < len(ids) or ids[-1] > last:
            allowed = f"different ids from 0 (the embeddings) to {last} (the last layer's output)"
            raise wrong("features.layer_ids", ids, allowed)
        if last not in ids:
            raise ConfigError(
                f"features.layer_ids={ids} lacks {last}, the last layer's output, which gives the target's "
                f"distribution; have the engine write it too: eagle_aux_hidden_state_layer_ids={needed}"
            )
        if missing := [one for one in needed if one not in ids]:
            layers = [one - 1 for one in ids if 0 < one < last]
            raise ConfigError(
                f"features.layer_ids={ids} lacks {missing}: vLLM's id k is the output of layer k - 1, and "
                f"the method reads {[one for one in outputs.hidden if one != -1]} (0-based); pass "
                f"method.layers={layers}, or write other states: eagle_aux_hidden_state_layer_ids={needed}"
            )
        return ids

    def _checked(self, file: Path, ids: list[int]) -> tuple[Tensor, list[str]]:
        """Return a file's token ids, int64, and its tensors' names, after checks that read no states."""
        info = self.target.info
        _refuse_unfinished(file)
        with _opened(file) as store:
            names = [*store.keys()]
            if IDS not in names or STATES not in names:
                have = ", ".join(names) or "no tensors"
                raise DataError(
                    f"{file} has {have}, not {IDS} and {STATES}; pass a folder of an engine's files"
                )
            about, ids_T = store.get_slice(STATES), store.get_tensor(IDS)
            mask_T = store.get_tensor(MASK) if MASK in names else None
            shape, dtype = about.get_shape(), about.get_dtype()
            scales = store.get_slice(SCALES).get_shape() if SCALES in names else []
            of_token = [list(one.shape) for one in (ids_T, mask_T) if one is not None]
        if dtype not in (("F8_E4M3",) if SCALES in names else DTYPES):
            beside = "with" if SCALES in names else "without"
            allowed = f"{', '.join(DTYPES)}, or F8_E4M3 with {SCALES}"
            raise DataError(
                f"{file} has states of type {dtype} {beside} {SCALES}; allowed: {allowed}: {AGAIN}"
            )
        if len(shape) != 3 or any(one != [shape[0]] for one in of_token):
            raise DataError(
                f"{file} has {STATES} {shape}, {IDS} and {MASK} {of_token}; expected [T, layers, size] and "
                f"[T]: {AGAIN}"
            )
        whole = not ids_T.is_floating_point() and ids_T.dtype != torch.bool
        if not whole or (SCALES in names and scales != [shape[0], 1, 1]):
            raise DataError(
                f"{file} has {IDS} of type {ids_T.dtype} and {SCALES} {scales}; expected integers and, of "
                f"fp8, [T, 1, 1]: {AGAIN}"
            )
        if mask_T is not None and not bool(mask_T.isfinite().all()):
            raise DataError(
                f"{file} has a {MASK} of NaN or infinite values, {int((~mask_T.isfinite()).sum())} of "
                f"{len(mask_T)}; expected 1 for a label and 0 for none: {AGAIN}"
            )
        if not len(ids_T):
            raise DataError(f"{file} has no tokens (an aborted request, or one of embeddings); delete it")
        if shape[1] != len(ids):
            lacks = f" (perhaps the last, {ids[-1]}, is missing)" if shape[1] == len(ids) - 1 else ""
            raise DataError(
                f"{file} holds {shape[1]} layers, and {len(ids)} are expected: {ids}{lacks}; pass "
                "features.layer_ids=[...], the eagle_aux_hidden_state_layer_ids that the engine was given"
            )
        if shape[2] != info.hidden_size:
            size = f"hidden states of size {shape[2]}, and target {info.name} of {info.hidden_size}"
            raise TargetMismatchError(f"{file} has {size}")
        if int(ids_T.min()) < 0 or int(ids_T.max()) >= info.vocab_size:
            vocabulary = f"the vocabulary of {info.vocab_size} of target {info.name}"
            raise DataError(f"{file} has a token outside {vocabulary}")
        return ids_T.long(), names

    def _check_values(self, file: Path, tensors: dict[str, Tensor], states_TLE: Tensor) -> None:
        """Refuse values (with the scales applied) that are not finite, and layers shown to be others."""
        target, ids_T, last_TE = self.target, tensors[IDS], states_TLE[:, -1]
        read_TLE = states_TLE[:, sorted({*self._column.values(), states_TLE.shape[1] - 1})]
        odd_T = ~read_TLE.isfinite().flatten(1).all(1) | ~read_TLE.any(-1).all(1)
        if bool(odd_T.any()):
            raise DataError(
                f"{file} has NaN, infinite or all-zero states at {int(odd_T.sum())} of {len(odd_T)} tokens, "
                f"the first at token {int(odd_T.nonzero()[0])}; {AGAIN} (in bfloat16: float16 ends at 65504)"
            )
        apart_T, allowed_T = self._from_embeddings(tensors, states_TLE[:, 0])
        says, begins = 0 in (self.layer_ids or ()), bool((apart_T <= allowed_T).all())
        if begins and not says:
            raise DataError(
                f"{file} begins with the embeddings, which is vLLM's id 0, not the output of a layer: id k "
                "is the output of layer k - 1; pass the ids that it was given: features.layer_ids=[0,...]"
            )
        if says and not begins:
            at = int((apart_T - allowed_T).nan_to_num(nan=math.inf).argmax())
            raise DataError(
                f"{file} does not begin with the embeddings, vLLM's id 0 (relative distance "
                f"{float(apart_T[at]):.2g} at token {at}, allowed {float(allowed_T[at]):.2g}); pass the ids "
                "that the engine was given, features.layer_ids=[...], or have it write the states again"
            )
        size_T = (last_TE.float() / target.final_norm_weight.float().cpu()).square().mean(-1)
        if bool(((size_T - 1).abs() < 0.02).all()):
            raise DataError(
                f"{file} holds the last layer's states after the final norm; expected those before it, "
                f"vLLM's id {target.info.n_layers}"
            )
        if not self._sound:
            normed_TE = target.final_norm(last_TE[:PROBE].to(target.device, target.dtype))
            logits_TV = target.head(normed_TE)[:-1].float().cpu()
            nats = float(cross_entropy(logits_TV, ids_T[1 : 1 + len(logits_TV)].long()))
            guess = math.log(target.info.vocab_size)
            message = "states=%s the target's own next_token_nats=%.3f (%.3f if it knew nothing)"
            if nats < guess:
                log.info(message, file.name, nats, guess)
                return
            advice = (
                "; of text that the target knows it is far below that: check that the engine ran this "
                "target, and wrote its last layer (%d in eagle_aux_hidden_state_layer_ids)"
            )
            log.warning(message + advice, file.name, nats, guess, target.info.n_layers)

    def _from_embeddings(self, tensors: dict[str, Tensor], first_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first tokens' relative distances from their embeddings, and what rounding allows.

        Each is [T], of `PROBE` tokens at most.

        The distance is that from the embeddings times the one factor that fits best, since some
        architectures multiply them, and an engine rounds that factor. At least bf16's rounding is allowed:
        the engine may have stored states in a finer dtype than it computes in.

        Args:
            tensors: a file's tensors, as they are stored.
            first_TE: the states of its first layer, with the scales applied.
        """
        ids_T, first_TE = tensors[IDS][:PROBE].long().to(self.target.device), first_TE[:PROBE].float()
        embeds_TE = self.target.embed(ids_T).float().cpu()
        factor = (first_TE * embeds_TE).sum() / embeds_TE.square().sum().clamp_min(1e-30)
        size_T = first_TE.norm(dim=-1).clamp_min(1e-30)
        stored = torch.finfo(tensors[STATES].dtype)
        eps = max(stored.eps, torch.finfo(torch.bfloat16).eps)
        step_T = tensors[SCALES].flatten()[:PROBE].float() if SCALES in tensors else torch.ones(len(size_T))
        step_T = step_T * (stored.smallest_normal * stored.eps)  # between the smallest values of the dtype
        apart_T = (first_TE - factor * embeds_TE).norm(dim=-1) / size_T
        return apart_T, 2 * eps + step_T * math.sqrt(first_TE.shape[-1]) / size_T


def _opened(file: Path) -> Any:
    try:
        need_regular(file)
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{file} is damaged or torn ({first_line(error)}); {AGAIN}") from None


def _read(file: Path, *names: str) -> dict[str, Tensor]:
    """Return those of the named tensors that a file has."""
    with _opened(file) as store:
        try:
            return {name: store.get_tensor(name) for name in names if name in store.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise DataError(f"{file} is damaged or torn ({first_line(error)}); {AGAIN}") from None


def _refuse_unfinished(file: Path) -> None:
    """Refuse a file that the engine is still writing, for which it holds a lock on a file beside it."""
    try:
        with file.with_name(f"{file.name}.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return
    except OSError:
        raise DataError(f"{file} is still being written by the engine; wait until it has ended") from None
