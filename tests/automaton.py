"""A suffix automaton on lists: the reference of look-up (SAM decoding, arXiv 2411.10666, Algorithm 1)."""

from __future__ import annotations


class SuffixAutomaton:
    """All substrings of a text, and the last end of each; it grows by one token in amortised constant time.

    A state stands for the substrings that end at the same places. Attributes by state: `next`, the state
    after each token; `link`, the state of its longest proper suffix that ends at more places; `length`, of
    its longest substring; `end`, a position at which these end.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.end = [-1], [0], [-1]
        self.last = 0
        self.state, self.matched = 0, 0
        """The longest suffix of the text that occurred before: its state and its length."""

    def extend(self, token: int, position: int) -> None:
        """Append a token; first the match is continued with it, over the text before."""
        while self.state and token not in self.next[self.state]:
            self.state = self.link[self.state]
            self.matched = self.length[self.state]
        if token in self.next[self.state]:
            self.state, self.matched = self.next[self.state][token], self.matched + 1
        self._add(token, position)
        # a state may have been split below the match: the match belongs to the shorter part
        while self.state and self.matched <= self.length[self.link[self.state]]:
            self.state = self.link[self.state]

    def _add(self, token: int, position: int) -> None:
        made = self._state({}, 0, self.length[self.last] + 1, position)
        at, self.last = self.last, made
        while at >= 0 and token not in self.next[at]:
            self.next[at][token] = made
            at = self.link[at]
        if at < 0:
            return
        found = self.next[at][token]
        if self.length[at] + 1 != self.length[found]:
            copy = self._state(dict(self.next[found]), self.link[found], self.length[at] + 1, self.end[found])
            while at >= 0 and self.next[at].get(token) == found:
                self.next[at][token] = copy
                at = self.link[at]
            self.link[found], found = copy, copy
        self.link[made] = found

    def _state(self, after: dict[int, int], link: int, length: int, end: int) -> int:
        self.next.append(after)
        self.link.append(link)
        self.length.append(length)
        self.end.append(end)
        return len(self.length) - 1


def longest_suffix(text: list[int]) -> int:
    """Length of the longest suffix of a text that occurs in it earlier; the two may overlap."""
    automaton = SuffixAutomaton()
    for position, token in enumerate(text):
        automaton.extend(token, position)
    return automaton.matched
