"""Tables of settings from the dataclasses that define them: key, default and the comment beside it."""

from __future__ import annotations

from longtrain.prompt.help import method_settings


def table(method: str) -> str:
    """The settings of a method as a Markdown table.

    Raises:
        LookupError: a setting has no comment.
    """
    rows = ["| key | default | what |", "|---|---|---|"]
    for key, default, about in method_settings(method):
        if not about:
            raise LookupError(f"method.{key} of {method} has no comment in its Config")
        what = about.replace("|", "\\|")
        rows.append(f"| `method.{key}`{{.key}} | `{default}` | {what} |")
    return "\n".join(rows)
