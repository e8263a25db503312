"""The output of the demo: coloured on a terminal; brackets instead of colours in a pipe or if NO_COLOR is
set.

Shapes: L layers, G KV heads, S prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from longtrain.tables import Trimmed
from longtrain.targets.tokenizer import GrowingText

if TYPE_CHECKING:
    from longtrain.decoding.engine import Generation
    from longtrain.targets.model import Target

ACCEPTED, BRIGHT, DIM = "bold green", "bold", "dim"
SHOWN = 250
"""Characters shown of the prompt's beginning and of its end."""


class GrowingColumn:
    """A column with text as it is generated, in which drafted tokens are marked."""

    def __init__(self, target: Target, name: str) -> None:
        self.name, self.text = name, GrowingText(target.require_tokenizer())
        self.ends = target.info.eos_ids
        self.pieces: list[tuple[str, str]] = []
        self.grown: Callable[[], None] = lambda: None

    def take(self, row: int, tokens: list[int], drafted: list[bool]) -> None:
        """Append new tokens (the callback type `Stream`)."""
        for token, from_draft in zip(tokens, drafted, strict=True):
            if token not in self.ends:
                self.pieces.append((self.text.add(token), ACCEPTED if from_draft else ""))
        self.grown()


class DemoScreen:
    """Writes the parts of the demo to stdout.

    Args:
        target: its tokenizer decodes tokens.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.console = Console(highlight=False)
        self.marks = self.console.no_color or not self.console.is_terminal

    def say(self, *lines: str | Text | Table) -> None:
        """Print some lines, and an empty one."""
        for line in (*lines, ""):
            self.console.print(Trimmed(Text(line) if isinstance(line, str) else line))

    def prompt(self, prompt: str, tokens: int) -> None:
        """Print the prompt's beginning and end, dimmed."""
        self._title(f"The prompt, {tokens} tokens")
        short = prompt if len(prompt) <= 2 * SHOWN else f"{prompt[:SHOWN]} ... {prompt[-SHOWN:]}"
        self.say(Text(short.strip(), DIM))

    @contextmanager
    def growing(self, *names: str) -> Iterator[list[GrowingColumn]]:
        """Context manager: columns side by side, updated while their texts are generated, or printed at the
        end in a pipe.
        """
        self._title("Two ways of decoding it, greedily")
        shown = "[in brackets]" if self.marks else "green"
        self.say(f"Tokens that the draft proposed and the target accepted are {shown}.")
        columns = [GrowingColumn(self.target, name) for name in names]
        if self.console.is_terminal:
            with Live(Trimmed(self._beside(columns)), console=self.console, refresh_per_second=10) as live:
                for column in columns:
                    column.grown = lambda: live.update(Trimmed(self._beside(columns)))
                yield columns
            self.say()
        else:
            yield columns
            self.say(self._beside(columns))

    def compared(self, plain: Generation, drafted: Generation) -> None:
        """Print steps and acceptance of both decodings; the caller has checked that their texts are equal."""
        lines = []
        for name, made in (("plain", plain), ("speculative", drafted)):
            tokens, steps = len(made.tokens[0]), made.stats.target_forwards
            lines.append(f"{name + ':':<12} {tokens} tokens in {steps} steps, {tokens / steps:.2f} a step")
        lines[-1] += f" (acceptance length τ {drafted.stats.tau:.2f})"
        self.say(
            *lines,
            "The two texts are the same, token for token: this was checked. Each step reads all weights, "
            "which takes most of a GPU's time; a CPU's speed is no guide, so none is given.",
        )

    def kept(self, ids: Sequence[int], begun: str, by: str, made: Generation, budget: int) -> None:
        """Print the prompt and the answer's first words, with the words whose entries eviction kept
        highlighted.
        """
        more = " and the answer's first words" if begun else ""
        self._title(f"The same prompt{more}, with {budget} KV entries a head")
        if made.kept is None:
            self.say(f"The prompt has {len(ids)} tokens, which all fit: nothing is evicted.")
            return
        mask_LGS = made.kept.mask(len(ids))
        kept_S = mask_LGS.any(1).any(0).tolist()
        runs = [
            (word, BRIGHT if any(kept_S[tokens.start : tokens.stop]) else DIM)
            for word, tokens in self.target.words(ids)
        ]
        heads, shown = mask_LGS.shape[0] * mask_LGS.shape[1], "[in brackets]" if self.marks else "bright"
        before, after = made.stats.cache_bytes_full / 1e6, made.stats.cache_bytes / 1e6
        self.say(
            f"{by} chose {budget} of {len(ids)} KV entries, on average, for each of the {heads} KV heads of "
            f"all layers. Words that one of them kept are {shown}. With room for the answer the cache takes "
            f"{after:.2f} MB, and took {before:.2f}."
        )
        self.say(self._marked(runs))

    def texts(self, begun: str, made: Mapping[str, Generation]) -> None:
        """Print the continuation with each cache."""
        self._title(f"What follows: ... {' '.join(begun.split()[-3:])}" if begun else "What follows")
        grid = Table.grid(padding=(0, 2))
        for name, one in made.items():
            grid.add_row(Text(name), Text((one.texts or [""])[0].strip()))
        self.console.print(Trimmed(grid))

    def published(self, lines: Sequence[str]) -> None:
        """Print what was measured on published models."""
        self._title("Measured on models that anybody can install, on one H200")
        self.say(*lines)

    def _title(self, title: str) -> None:
        self.console.print(Trimmed(Text(f"== {title} ==", BRIGHT)))

    def _beside(self, columns: Sequence[GrowingColumn]) -> Table:
        grid = Table.grid(padding=(0, 3), expand=True)
        for _ in columns:
            grid.add_column(ratio=1)
        grid.add_row(*(Text(column.name, "underline") for column in columns))
        grid.add_row(*(self._marked(column.pieces) for column in columns))
        return grid

    def _marked(self, runs: Sequence[tuple[str, str]]) -> Text:
        """Styled pieces of a text; without colours, highlighted pieces are put in brackets."""
        text = Text()
        for style, run in groupby(runs, key=lambda pair: pair[1]):
            piece = "".join(piece for piece, _ in run)
            if self.marks and style in (ACCEPTED, BRIGHT) and (inner := piece.strip()):
                piece = piece.replace(inner, f"[{inner}]")
            text.append(piece, "" if self.marks else style)
        return text
