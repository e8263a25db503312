"""The wording of retrieval questions: RULER's, or the one that `method=pretrain` trains on.

The target's `tokenizer_config.json` selects it (`"retrieval_wording": "pretrain"`); without that key it is
RULER's. Training data and evaluation suites both use it, so that a module is evaluated on the wording it was
trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longtrain.errors import ConfigError, refusal

KEY = "retrieval_wording"
"""Key of `tokenizer_config.json`."""


@dataclass(frozen=True)
class TaskWords:
    """The wording of one task.

    Placeholders are in braces; the values for keys of needles and cues of quotations include their leading
    space.

    Args:
        intro: start of the user's turn.
        ask: the question, at the end of the user's turn.
        answer: start of the assistant's turn (RULER's answer prefix), which targets would otherwise phrase in
            different ways.
    """

    intro: str
    ask: str
    answer: str


@dataclass(frozen=True)
class Wording:
    """The wording of all tasks.

    Args:
        name: value of the key in `tokenizer_config.json`.
        needle: asks for one value.
        needles: asks for several values.
        chains: asks for all variables with a value.
        table: asks for the value of a key.
        quote: asks for the text after a cue.
        copy: introduces a text that is to be repeated.
        singular: share of the questions about one value that use the singular.
        always_begun: True: needle grids, and tables and quotations in documents with many questions, also
            include the start of the answer; prompts that end with one question always do.
        without_template: text between question and answer if there is no chat template.
        about: note on the wording in results.
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
        """Return the wording for needles, asking for one value or for several."""
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
"""RULER's wording of needles and variable tracking; tables and quotations, not in RULER, are worded alike.

As in RULER, a solved example precedes a chain; here it is short and the same in every prompt.

Note: RULER writes a space after a chain's last colon, which most tokenizers would merge with the next word.

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
"""The wording that targets of `method=pretrain`, such as the bundled one, are trained on."""

WORDINGS = {wording.name: wording for wording in (RULER, PRETRAIN)}


def wording_of(tokenizer: Any) -> Wording:
    """Return the wording of a target's retrieval questions.

    Args:
        tokenizer: the target's tokenizer, read from its folder.

    Raises:
        ConfigError: its `tokenizer_config.json` names another wording.
    """
    name = getattr(tokenizer, "init_kwargs", {}).get(KEY, RULER.name)
    if name not in WORDINGS:
        said = f"the target's tokenizer_config.json has {KEY}={name!r}"
        raise refusal(ConfigError, said, f"{', '.join(WORDINGS)}, or no such key: RULER's words")
    return WORDINGS[name]
