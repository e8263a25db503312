"""The documentation states what the results, the settings, the signatures and the error messages are."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from docs import check, picture
from longtrain import methods

TAU = "<!-- recipes/results/longspec_small/main.scores.json\n{} = variants[name=main chain 4].{}\n-->\n"
PLACE = "lengths[length=2048].tau.value"


def test_pages_state_what_is_so() -> None:
    assert [f"{page.name}: {one}" for page in check.PAGES for one in check.wrong(page)] == []


def test_the_picture_of_readme_is_drawn_from_its_results() -> None:
    assert picture.draw().startswith(b"\x89PNG")


def test_pages_are_plain_markdown() -> None:
    for page in check.PAGES:
        text = page.read_text(encoding="utf-8")
        assert "{{" not in text and "\n:::" not in text, page


@pytest.mark.parametrize(
    ("shown", "place", "found"),
    [
        ("2.79", PLACE, []),
        ("2.8", PLACE, []),
        ("279%", PLACE, []),
        ("2.78", PLACE, ["2.78 is 2.7"]),
        ("2.79", "lengths[length=5].tau", ["ValueError"]),
        ("2.79", "lengths[0].none", ["KeyError('none')"]),
        ("2.79 apples", PLACE, ["KeyError(' apples')"]),
        ("two", PLACE, ["AttributeError"]),
    ],
)
def test_numbers_are_those_of_their_file(shown: str, place: str, found: list[str]) -> None:
    wrong = list(check.wrong_numbers(f"A draft has {shown}.\n" + TAU.format(shown, place)))
    assert len(wrong) == len(found) and all(part in one for part, one in zip(found, wrong, strict=True))


def test_numbers_stand_above_their_reference_as_often_as_they_are_referenced() -> None:
    reference = TAU.format("2.79", PLACE)
    assert list(check.wrong_numbers("12.79 and 2.791\n" + reference)) != []
    assert list(check.wrong_numbers("| 2.79 | 2.79 |\n" + reference + reference)) == []
    assert list(check.wrong_numbers("| 2.79 | 2.70 |\n" + reference + reference)) != []
    assert "No such file" in next(check.wrong_numbers("1\n<!-- recipes/results/none.json\n1 = a\n-->"))


def test_generated_parts_and_messages_are_compared(tmp_path: Path) -> None:
    page, errors = tmp_path / "method.md", tmp_path / "troubleshooting.md"
    table = check.generated("settings", "longspec")
    assert "| `method.window` | `512` |" in table
    page.write_text(f"<!-- settings: longspec -->\n{table}\n\nText.\n")
    errors.write_text("| `no method is chosen (method=null)` | why | what to do |\n")
    assert [*check.wrong(page), *check.wrong(errors)] == []
    page.write_text("<!-- recipe/results/x.json\n1 = a\n-->\n")
    assert list(check.wrong(page)) == [
        "a comment is no reference, settings or signature as docs/check.py reads them"
    ]
    page.write_text(f"<!-- settings: longspec -->\n{table.replace('512', '513')}\n")
    errors.write_text("| `no such message` | why | what to do |\n")
    assert [*check.wrong(page), *check.wrong(errors)] == [
        "the settings of longspec have changed: python docs/check.py --write",
        "no error says 'no such message'",
    ]
    assert check.generated("signature", "longtrain.methods.policies.get") == (
        "```python\nget(name: str, *, budget: Budget, **options: Any) -> BasePolicy\n```"
    )


def test_every_method_has_a_page_with_its_settings() -> None:
    for name in methods.names():
        text = (check.ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
        assert f"<!-- settings: {name} -->" in text
        keys = {field.name for field in fields(methods.config_class(name))}
        assert all(f"| `method.{key}` |" in text for key in keys)
        for part in ("## In a picture", "## The equation", "## What to expect", "## When not to use it"):
            assert part in text, (name, part)
