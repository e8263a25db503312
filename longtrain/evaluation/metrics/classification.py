"""Which of a list of classes an answer names, as LongBench scores TREC."""

from __future__ import annotations

from collections.abc import Sequence


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """One over the number of classes the prediction names if the right one is among them, else 0.

    Classes that are part of the right one's name are taken off the list first, except that the official loop
    removes from the list it runs over and so never looks at the class that follows a removed one.

    Args:
        prediction: what was generated.
        answer: the right class.
        classes: all classes, in the official order, which the oddity above depends on.

    Source: LongBench, `classification_score`.
    """
    named = [name for name in classes if name in prediction]
    at = 0
    while at < len(named):
        if named[at] in answer and named[at] != answer:
            named.remove(named[at])  # the first that is equal, which need not be the one at `at`
        at += 1
    return 1.0 / len(named) if answer in named else 0.0
