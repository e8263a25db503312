"""Tables of settings from the dataclasses that define them: key, default and the comment beside it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

from repository import ROOT

METHODS = ROOT / "longtrain" / "methods"


def names() -> list[str]:
    """Every method: the folders with a `config.py`, as `longtrain.methods.names` has them."""
    return sorted(file.parent.name for file in METHODS.glob("*/config.py"))


def table(method: str) -> str:
    """The settings of a method as a Markdown table.

    Raises:
        LookupError: a setting has no comment.
    """
    rows = [
        f"| `method.{key}`{{.key}} | `{default}` | {about} |"
        for key, default, about in _class(METHODS / method / "config.py", "Config")
    ]
    return "\n".join(["| key | default | what |", "|---|---|---|", *rows])


def about(method: str) -> str:
    """First line of a method's package: what it is."""
    text = (METHODS / method / "__init__.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def _class(file: Path, name: str) -> list[tuple[str, str, str]]:
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    (node,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    found = []
    for base in node.bases:  # settings that two methods share stand in another module
        (module,) = [
            one.module or ""
            for one in tree.body
            if isinstance(one, ast.ImportFrom) and any(alias.name == ast.unparse(base) for alias in one.names)
        ]
        found += _class(ROOT / f"{module.replace('.', '/')}.py", ast.unparse(base))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith("# noqa")
    }
    constants = _constants(tree)
    for here, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
            last = following.lineno if following else (here.end_lineno or here.lineno) + 1
            words = " ".join(comments[line] for line in range(here.lineno, last) if line in comments)
            if not words:
                raise LookupError(f"{file}: {here.target.id} has no comment")
            found.append((here.target.id, _default(here.value, constants), words.replace("|", "\\|")))
    return found


def _constants(tree: ast.Module) -> dict[str, str]:
    """Names of the module's own strings."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names, values = node.targets[0], node.value
            pairs = (
                zip(names.elts, values.elts, strict=True)
                if isinstance(names, ast.Tuple) and isinstance(values, ast.Tuple)
                else [(names, values)]
            )
            found |= {
                ast.unparse(key): value.value
                for key, value in pairs
                if isinstance(value, ast.Constant) and isinstance(value.value, str)
            }
    return found


def _default(node: ast.expr | None, constants: dict[str, str]) -> str:
    """A default as it is typed on the command line."""
    text = ast.unparse(node) if node else "-"
    if made := re.fullmatch(r"field\(default_factory=(?:lambda: )?(.*)\)", text):
        text = {"list": "[]", "dict": "{}"}.get(made[1], made[1])
    text = constants.get(text, text)
    text = {
        "None": "null",
        "True": "true",
        "False": "false",
        "[FULL]": "[full]",
        "Members": "all",
        "Scales": "1 for all",
        "''": '""',
    }.get(text, text)
    return text.strip("'")
