"""The words that retrieval questions are asked in: RULER's, or those that `method=pretrain` teaches.

A target's own `tokenizer_config.json` says which (`"retrieval_wording": "pretrain"`); without that key it is
RULER's. Training data and suites ask here, so that a module meets the words it was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longtrain.errors import ConfigError, refusal

KEY = "retrieval_wording"
"""Key of `tokenizer_config.json`."""


@dataclass(frozen=True)
class TaskWords:
    """How one task is asked.

    The places that are filled in are named in braces; keys of needles and cues of quotations begin with
    their own space.

    Args:
        intro: what the user's turn begins with.
        ask: the question, at the end of the user's turn.
        answer: what the assistant's turn begins with (RULER's answer prefix): targets would word it in ways
            of their own.
    """

    intro: str
    ask: str
    answer: str


@dataclass(frozen=True)
class Wording:
    """How all tasks are asked.

    Args:
        name: value of the key.
        needle: one value is asked for.
        needles: several values are asked for.
        chains: all variables with a value are.
        table: the value of a key is.
        quote: what stands after a cue is.
        copy: what a text to be repeated is introduced with.
        singular: share of the questions about one value that use the singular.
        always_begun: whether needle grids, and tables and quotations in documents with many questions, write
            the beginning of the answer too; prompts that end with one question always do.
        without_template: what stands between question and answer where there is no chat template.
        about: what results say of it.
    """

    name: str
    needle: TaskWords
    needles: TaskWords
    chains: TaskWords
    table: TaskWords
    quote: TaskWords
    copy: str
    singular: float
    always_begun: bool
    without_template: str
    about: str

    def hidden(self, *, single: bool) -> TaskWords:
        """The words for needles, one value being asked for or several."""
        return self.needle if single else self.needles


_CHAIN = "Memorize and track the chain(s) of variable assignment hidden in the following text."
_FIND = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
_FOUND = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are "
    "assigned the value {value}, they are:"
)

RULER = Wording(
    "ruler",
    needle=TaskWords(
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz "
        "you about the number afterwards.\n",
        "\nWhat is the special magic number for{key} mentioned in the provided text?",
        " The special magic number for{key} mentioned in the provided text is",
    ),
    needles=TaskWords(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will "
        "quiz you about the numbers afterwards.\n",
        "\nWhat are all the special magic numbers for{key} mentioned in the provided text?",
        " The special magic numbers for{key} mentioned in the provided text are",
    ),
    chains=TaskWords(
        f"{_CHAIN}\n\nThe grass is green. VAR JQW = 52701. The sky is blue. The sun is "
        "yellow. VAR ZKD = VAR JQW. Here we go. VAR PTH = VAR ZKD. There and back again."
        f"{_FIND.format(value=52701)}{_FOUND.format(count=3, value=52701)} JQW, ZKD, PTH.\n\n{_CHAIN}\n\n",
        _FIND,
        _FOUND,
    ),
    table=TaskWords(
        "Here is a table of keys and their values. Make sure to memorize it. I will quiz you about the "
        "values afterwards.\n",
        "What is the value of {key} in the table above?",
        " The value of {key} in the table above is",
    ),
    quote=TaskWords(
        "Memorize the following text. I will ask you to quote from it afterwards.\n",
        "\nQuote the passage of the text above that begins with:{cue}",
        "{cue}",
    ),
    copy="Repeat the following text.\n",
    singular=1.0,
    always_begun=True,
    without_template="",
    about="asked in RULER's words",
)
"""RULER's wording of needles and variable tracking; tables and quotations, which it does not have, alike.

A chain comes after a solved example, as there; here the example is short and the same in every prompt.

Note: RULER writes a space after a chain's last colon, which most tokenizers would not split off there.

Source: Hsieh et al. 2024 and NVIDIA/RULER, scripts/data/synthetic/constants.py.
"""

PRETRAIN = Wording(
    "pretrain",
    needle=TaskWords(
        "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
        "I will quiz you about them afterwards.\n",
        "\nWhat is the special magic number for{key} mentioned in the provided text?",
        "The special magic number for{key} mentioned in the provided text is",
    ),
    needles=TaskWords(
        "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
        "I will quiz you about them afterwards.\n",
        "\nWhat are all the special magic numbers for{key} mentioned in the provided text?",
        "The special magic numbers for{key} mentioned in the provided text are",
    ),
    chains=TaskWords(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n",
        "\nFind all variables that are assigned the value {value} in the text above.",
        "The variables are:",
    ),
    table=TaskWords("Here is a table.\n", "Look up {key}.", "{key}:"),
    quote=TaskWords(
        "Read the text, then quote from it.\n", "\nQuote the passage that continues after:{cue}", ""
    ),
    copy="Repeat the following text.\n",
    singular=0.3,
    always_begun=False,
    without_template="\nAnswer:",
    about="asked in the words that the target was trained on (method=pretrain)",
)
"""What the bundled target and others of `method=pretrain` read in training."""

WORDINGS = {wording.name: wording for wording in (RULER, PRETRAIN)}


def wording_of(tokenizer: Any) -> Wording:
    """The words that a target's retrieval questions are asked in.

    Args:
        tokenizer: of the target, read from its folder.

    Raises:
        ConfigError: its `tokenizer_config.json` names another wording.
    """
    name = getattr(tokenizer, "init_kwargs", {}).get(KEY, RULER.name)
    if name not in WORDINGS:
        said = f"the target's tokenizer_config.json has {KEY}={name!r}"
        raise refusal(ConfigError, said, f"{', '.join(WORDINGS)}, or no such key: RULER's words")
    return WORDINGS[name]
