"""Held-out text that is continued from the same points after several context lengths.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from longtrain.assets import asset_dir
from longtrain.data.rows.prepare import tokenizer_hash
from longtrain.data.rows.prepared import Prepared, read_manifest
from longtrain.errors import ConfigError
from longtrain.evaluation.contexts import (
    HeldOutText,
    Point,
    documents_from_files,
    documents_from_prepared,
    prefix_of,
)
from longtrain.evaluation.prompts import Encoded
from longtrain.evaluation.records import ids_sha256
from longtrain.evaluation.task import Example, Task
from longtrain.log import get_logger
from longtrain.tables import tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longtrain.targets.model import Target

log = get_logger(__name__)

HELD_OUT = "text/heldout"
"""The bundled held-out files: novels that no target or draft of this package was trained on."""


@dataclass(frozen=True)
class Continuation(Task):
    """Prompts of one length, cut at points of held-out text that all lengths share.

    Args:
        length: tokens of a prompt.
        prompts: of each row.
    """

    length: int = 0
    prompts: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def prompt(self, example: Example) -> str:
        """Where the text comes from, for messages alone: `encode` gives its tokens."""
        return f"{example.fields['document']} to token {example.fields['end']}"

    def size(self, example: Example) -> int:
        """Tokens."""
        return self.length

    def encode(
        self,
        example: Example,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        answers: Sequence[str] = (),
    ) -> Encoded:
        """The prompt, which is never shortened: its length is what is measured."""
        return Encoded(self.prompts[int(example.fields["number"])], False)

    def facets(self, example: Example) -> dict[str, int | float | str]:
        """Context length, and the kind of text."""
        return {"length": self.length, "kind": str(example.fields["kind"])}


def continuations(
    points: Sequence[Point],
    lengths: Sequence[int],
    target: Target,
    *,
    max_new_tokens: int,
    ignore_eos: bool = True,
    name: str = "{}",
) -> list[Continuation]:
    """A task for each context length.

    Args:
        points: where prompts end, the same at every length.
        lengths: of the prompts, tokens.
        target: its tokenizer says what stands before a text.
        max_new_tokens: most tokens of a continuation.
        ignore_eos: go on past the end of text.
        name: of a task; `{}` stands for the length.

    Raises:
        ConfigError: a length that the target's context does not hold.
    """
    most = target.info.max_positions - max_new_tokens
    if max(lengths) > most:
        raise ConfigError(
            f"length {max(lengths)} with {max_new_tokens} new tokens exceeds the target's context of "
            f"{target.info.max_positions}; pass lengths of at most {most}"
        )
    prefix = prefix_of(target.tokenizer)
    tasks = []
    for length in lengths:
        prompts = tuple(tuple(point.prompt(length, prefix)) for point in points)
        tasks.append(
            Continuation(
                name.format(tokens(length)),
                tuple(_row(i, point, prompts[i]) for i, point in enumerate(points)),
                "{document}",
                max_new_tokens,
                "acceptance",
                None,
                chat=False,
                ignore_eos=ignore_eos,
                protocol={"lengths": [length]},
                length=length,
                prompts=prompts,
            )
        )
    return tasks


def held_out(
    target: Target, where: str | None, kinds: Sequence[str], *, home: str = ".", data: str | None = None
) -> list[HeldOutText]:
    """Documents no draft was trained on.

    Args:
        target: with a tokenizer.
        where: a file or folder, `bundled`, or `data`; None: the held-out documents of prepared data if there
            are any, else what ships here.
        kinds: of text; empty: all.
        home: holds prepared data.
        data: its name.

    Raises:
        ConfigError: `data` without a name, or the target has no tokenizer.
        DataError: there is no text.
    """
    tokenizer = target.require_tokenizer()
    if where in (None, "data"):
        if where == "data" and data is None:
            raise ConfigError("suite.text=data needs data=NAME, or pass a file, a folder or bundled")
        folder = Path(home) / "data" / f"{data}-{tokenizer_hash(tokenizer)[:8]}"
        manifest = read_manifest(folder) if data is not None else None
        if where == "data" or (manifest is not None and manifest["counts"]["val_documents"]):
            log.info("text=%s (held-out documents)", folder)
            return documents_from_prepared(Prepared.open(folder), kinds=kinds)
    bundled = where in (None, "bundled")
    path = asset_dir("bundled") / HELD_OUT if bundled else Path(str(where))
    log.info("text=%s", path)
    prose = "book" if bundled else "text"  # the excerpt that ships is from novels
    return documents_from_files(path, tokenizer, kinds=kinds, prose=prose)


def _row(number: int, point: Point, prompt: Sequence[int]) -> Example:
    fields = {
        "number": number,
        "document": point.document.name,
        "kind": point.document.kind,
        "end": point.end,
        "sha256": ids_sha256(prompt),
    }
    return Example(f"{number:04d}", fields)
