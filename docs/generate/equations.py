"""Equations of the pages, which browsers show themselves: LaTeX in, MathML out, no script and no network."""

from __future__ import annotations

import re

from latex2mathml.converter import convert


def shown(text: str) -> str:
    """A page's text with its blocks of `math` as MathML; GitHub shows such blocks as they are.

    Raises:
        LookupError: an equation has a command that is not known here.
    """
    return re.sub(r"^```math\n(.*?)^```$", _one, text, flags=re.MULTILINE | re.DOTALL)


def _one(block: re.Match[str]) -> str:
    equation = convert(block[1].replace("{aligned}", "{split}"), display="block")
    if left := re.search(r"\\\w+|<mi>&<", equation):
        raise LookupError(f"an equation has '{left[0]}', which is not known here: {block[1]}")
    equation = re.sub(r'columnalign="(\w+)"', r'style="text-align: \1"', equation)  # what browsers know
    return f'<div style="overflow-x: auto">{equation}</div>'
