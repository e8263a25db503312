"""Variable tracking: a chain of assignments hidden in noise, after one solved example."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from string import ascii_uppercase

from longtrain.evaluation.ruler.haystack import NOISE
from longtrain.evaluation.ruler.sizing import Framing, largest
from longtrain.evaluation.ruler.tasks import SHORT, Draft, Task

NAME_LETTERS = 5
SOLVED_NAME_LETTERS = 3
SOLVED_TOKENS = 500
"""Most tokens of the solved example without its answer."""

STEP = 10
SHORT_STEP = 5


class VariableWriter:
    """Writes `vt`. Sizes are lines of noise.

    The solved example's lines stand alike in every prompt of a run; its names and value are drawn anew.

    Args:
        task: the task of the family `variable_tracking`.
        length: the stated length, tokens.
        stream: the stream that places the solved example's lines.
        framing: counts the solved example.
    """

    unit = 1

    def __init__(self, task: Task, length: int, *, stream: str, framing: Framing) -> None:
        self.chains, self.hops = int(task.options["chains"]), int(task.options["hops"])
        self.step = SHORT_STEP if length < SHORT else STEP
        self.template, self.prefix = task.wording.template, task.wording.answer_prefix
        self._solved_stream = stream
        least = max(SHORT_STEP, self.least(0))
        fits = largest(lambda lines: framing.count_text(self._example(lines)), SOLVED_TOKENS, least=least)
        self._solved_lines = fits or least

    def least(self, index: int) -> int:
        """As many lines as a chain has assignments."""
        return self.hops + 1

    def write(self, size: int, index: int, stream: str) -> Draft:
        """See `Writer`."""
        rng = Random(stream)
        chains = self._names(rng, NAME_LETTERS)
        values = [_value(rng) for _ in chains]
        context = self._context(chains, values, size, rng)
        solved_chains = self._names(rng, SOLVED_NAME_LETTERS)
        solved_values = self._fresh_values(rng, set(values))
        solved = self._solved(solved_chains, solved_values, self._solved_lines)
        shown = " ".join(solved_chains[0])
        return Draft(
            f"{solved} {shown}\n\n" + self.template.format(context=context, query=values[0]),
            self._answer_prefix(values[0]),
            tuple(chains[0]),
        )

    def _solved(self, chains: list[list[str]], values: list[str], lines: int) -> str:
        context = self._context(chains, values, lines, Random(self._solved_stream))
        return self.template.format(context=context, query=values[0]) + self._answer_prefix(values[0])

    def _example(self, lines: int) -> str:
        """A solved example to count."""
        rng = Random(self._solved_stream)
        return self._solved(self._names(rng, SOLVED_NAME_LETTERS), self._fresh_values(rng, set()), lines)

    def _answer_prefix(self, value: str) -> str:
        return self.prefix.format(num_v=self.hops + 1, query=value)

    def _context(self, chains: list[list[str]], values: list[str], size: int, rng: Random) -> str:
        """Noise with each chain's assignments in it, in their order."""
        lines = [NOISE] * size
        for names, value in zip(chains, values, strict=True):
            chain = [f"VAR {names[0]} = {value}"]
            chain += [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
            places = sorted(rng.sample(range(len(lines)), len(chain)))
            for shift, (place, statement) in enumerate(zip(places, chain, strict=True)):
                lines.insert(place + shift, statement)
        return "\n".join(lines).replace(". \n", ".\n")

    def _names(self, rng: Random, letters: int) -> list[list[str]]:
        """Different names for every chain; none reads `VAR`."""
        wanted = (self.hops + 1) * self.chains
        found: dict[str, None] = {}
        while len(found) < wanted:
            name = "".join(rng.choices(ascii_uppercase, k=letters))
            if name != "VAR":
                found[name] = None
        names = list(found)
        return [names[i : i + self.hops + 1] for i in range(0, wanted, self.hops + 1)]

    def _fresh_values(self, rng: Random, taken: set[str]) -> list[str]:
        values: list[str] = []
        while len(values) < self.chains:
            if (value := _value(rng)) not in taken:
                values.append(value)
        return values


def _value(rng: Random) -> str:
    return str(rng.randrange(10000, 99999))
