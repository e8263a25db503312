"""Readers of RULER prompts: one solves them with regular expressions, one never sees the context."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

QUESTIONS = {
    "niah": re.compile(
        r"What (?:is|are all) the special magic \w+ for (.+) mentioned in the provided text\?$"
    ),
    "vt": re.compile(r"Question: Find all variables that are assigned the value (\d+) in the text above\.$"),
    "qa": re.compile(r"Question: (.+)$"),
}


def oracle(task: str, prompt: str) -> str:
    """The answer, read off the text of the prompt (the input)."""
    return _niah(prompt) if task.startswith("niah") else READERS[task](prompt)


def _niah(prompt: str) -> str:
    keys = re.split(r", and |, ", _asked("niah", prompt))
    found = [
        re.findall(rf"One of the special magic \w+ for {re.escape(key)} is: (\S+)\.", prompt) for key in keys
    ]
    return ", ".join(value for values in found for value in values)


def _vt(prompt: str) -> str:
    value = _asked("vt", prompt)
    text = prompt[prompt.rindex("Memorize and track") :]
    names: list[str] = []
    for name, copied, source in re.findall(r"VAR (\w+) = (VAR )?(\w+)", text):
        if source in names if copied else source == value:
            names.append(name)
    return " ".join(names)


def _cwe(prompt: str) -> str:
    text = prompt[prompt.rindex("appear most often.\n") + 19 : prompt.rindex("\nQuestion:")]
    words = re.findall(r"\d+\. (\S+)", text)
    return " ".join(f"{i}. {word}" for i, (word, _) in enumerate(Counter(words).most_common(10), 1))


def _fwe(prompt: str) -> str:
    text = prompt[prompt.index("coded words. ") + 13 : prompt.index("\nQuestion:")]
    return " ".join(word for word, _ in Counter(text.split(" ")).most_common(4)[1:])


def _qa(prompt: str) -> str:
    place = re.fullmatch(r"What is the main trade of (\w+)\?", _asked("qa", prompt))
    assert place
    found = re.search(rf"The main trade of {place[1]} is (\w+)\.", prompt)
    assert found
    return found[1]


def _asked(kind: str, prompt: str) -> str:
    found = QUESTIONS[kind].search(prompt)
    assert found, prompt[-300:]
    return found[1]


READERS = {"vt": _vt, "cwe": _cwe, "fwe": _fwe, "qa_1": _qa, "qa_2": _qa}


def ignorant(task: str, prompt: str, prefix: str, rng: Random, words: list[str], trades: list[str]) -> str:
    """An answer from question, answer prefix and solved example alone, with what luck may add."""
    question = prompt[prompt.rindex("\n") :]
    solved = "\n".join(re.findall(r"(?:they are: |list are:)(.+)\n", prompt))
    letters = "".join(chr(97 + rng.randrange(26)) for _ in range(30))
    guesses = {
        "n": f"{rng.randrange(10**6, 10**7)} {rng.getrandbits(128):032x}",
        "v": f"{letters[:5]} {letters[5:10]}".upper(),
        "c": " ".join(rng.sample(words, 10)),
        "f": f"{letters[:6]} {letters[6:12]} {letters[12:18]}",
        "q": rng.choice(trades),
    }
    return f"{question}{prefix}{solved} {guesses[task[0]]}"
