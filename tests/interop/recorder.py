"""A draft that writes down what it proposes, to be compared with what another engine drafts."""

from __future__ import annotations

from typing import Any


class Recorder:
    """A draft that writes down what it proposes."""

    def __init__(self, draft: Any) -> None:
        self.draft, self.seen = draft, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.draft, name)

    def propose(self, *args: Any) -> Any:
        tree = self.draft.propose(*args)
        self.seen.append(tree.tokens_BN[0, 1:].tolist())
        return tree
