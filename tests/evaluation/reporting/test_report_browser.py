"""The page in a real headless browser, cut off from every network."""

import shutil

import pytest

from longtrain.evaluation.analysis.compare import Run, compare
from longtrain.evaluation.analysis.statistics import Bootstrap
from longtrain.evaluation.reporting.page import compare_page, page
from longtrain.evaluation.reporting.pictures import pictures

pytestmark = pytest.mark.slow
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[test]'")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECRET = "zebra-7731"
"""Stands in one output alone."""
SHOWN = ["full", "streaming_llm@64", "snapkv@64"]
"""The systems whose outputs are shown first."""


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(made, tmp_path_factory):
    examples = [dict(one) for one in made.examples]
    outputs = {name: dict(one) for name, one in examples[33]["outputs"].items()}
    outputs["full"]["texts"] = [f"a hidden {SECRET} word"]
    examples[33] = {**examples[33], "outputs": outputs}
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_bytes(page(made.results, examples, pictures=pictures(made.results)))
    return file


@pytest.fixture
def open_page(browser):
    """Opens a file: (file, context options) -> page; afterwards nothing may have gone wrong or out."""
    contexts, wrong, asked = [], [], []

    def opened(file, **options):
        contexts.append(
            browser.new_context(offline=True, **{"viewport": {"width": 1280, "height": 900}, **options})
        )
        tab = contexts[-1].new_page()
        tab.set_default_timeout(60_000)
        tab.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(file.as_uri())
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def names(tab):
    """The first column of the first table."""
    return tab.eval_on_selector_all(
        "table >> nth=0 >> tbody td:first-child", "cells => cells.map(c => c.innerText)"
    )


def test_a_heading_sorts_its_table(made, report, open_page):
    tab = open_page(report)
    assert names(tab) == [system.name for system in made.systems]
    values = {system["name"]: system["average"]["value"] for system in made.results["systems"]}
    head = tab.locator("thead >> nth=0 >> button", has_text="average score")
    head.click()
    assert [values[name] for name in names(tab)] == sorted(values.values(), reverse=True)
    head.click()
    assert [values[name] for name in names(tab)] == sorted(values.values())
    tab.locator("thead >> nth=0 >> button", has_text="τ").click()
    assert all("longspec" in name for name in names(tab)[:3])  # dashes stay last


def test_examples_are_searched_filtered_and_ordered(made, report, open_page):
    tab = open_page(report)
    count = tab.locator("#examples-count")
    assert count.inner_text() == "80 of 80 examples" and tab.locator(".example").count() == 12
    tab.fill("#examples input[type=search]", SECRET)
    assert count.inner_text() == "1 of 80 examples"
    tab.fill("#examples input[type=search]", "")
    same = sum(len({str(one["outputs"][name]["texts"]) for name in SHOWN}) == 1 for one in made.examples)
    tab.get_by_label("texts differ").check()
    assert abs(int(count.inner_text().split()[0]) - (80 - same)) <= 1  # one output was changed
    tab.get_by_label("texts differ").uncheck()
    tab.select_option("#examples select >> nth=0", "needle")
    assert count.inner_text() == "40 of 80 examples"
    tab.fill("#examples input[type=search]", "no text has this")
    assert "No example matches" in tab.inner_text("#examples-list")


def test_outputs_are_text_whatever_they_hold(made, report, open_page):
    tab = open_page(report)
    first = next(iter(made.examples))["outputs"]["full"]["texts"][0]
    assert tab.inner_text(".example >> nth=0 >> .outputs pre.text >> nth=0") == first
    while tab.locator("#examples-list > button").count():
        tab.click("#examples-list > button")
    assert tab.locator(".example").count() == 80
    assert tab.evaluate("window.broken") is None
    assert tab.locator("#examples img, #examples script, #examples b b").count() == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(report, open_page, width):
    tab = open_page(report, viewport={"width": width, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator("main > img").count() == 3


def test_a_comparison_opens(made, tmp_path, open_page):
    outputs = {}
    for one in made.examples:
        outputs.setdefault(one["task"], {})[one["example"]] = one["outputs"]
    runs = [Run(name, made.results, outputs, {}) for name in ("old", "<b>new</b>")]
    file = tmp_path / "compare.html"
    file.write_bytes(compare_page(compare(*runs, Bootstrap(resamples=50))))
    tab = open_page(file)
    assert tab.inner_text("h1").endswith("old and <b>new</b>")
    assert names(tab) == [system.name for system in made.systems]
