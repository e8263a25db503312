"""The page in a real headless browser, cut off from every network."""

import shutil
from dataclasses import replace

import pytest

from longtrain.evaluation.figures.acceptance import ACCEPTANCE
from longtrain.evaluation.figures.compare import Run, compare
from longtrain.evaluation.figures.statistics import Bootstrap
from longtrain.evaluation.reporting.page import compare_page, page
from longtrain.evaluation.suite import Scale, Summary

pytestmark = pytest.mark.slow
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[test]'")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECRET = "zebra-7731"
"""Stands in one output alone."""
EXTRA = {"title": "By turn", "columns": {"first": 3.14159, "second": None}}


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
    speed = [{"task": "lcc", "length": 4096, "prompts": 2, "batch": 1, "max_new_tokens": 64}]
    speed[0]["figures"] = {
        "full": {"tokens_per_s": 10.0, "ratio": 1.0},
        "longspec_llama8b": {"tokens_per_s": 25.0, "ratio": 2.5, "ratio_range": [2.0, 3.5]},
    }
    timings = {"device": "cpu", "speed": speed}
    file.write_bytes(page(made.results, examples, timings=timings))
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
        tab.wait_for_selector("html[data-ready]")
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def column(tab, table, place):
    return tab.eval_on_selector_all(
        f"#{table} tbody td:nth-child({place})", "cells => cells.map(c => c.innerText)"
    )


def test_tables_show_sort_and_filter(made, report, open_page):
    tab = open_page(report)
    assert tab.inner_text("h1") == "Variant of LongBench"
    assert "5 of 16 tasks" in tab.inner_text(".loud")
    names = [system.name for system in made.systems]
    assert column(tab, "systems", 1) == names
    head = tab.locator("#systems thead button", has_text="average score")
    values = {system["name"]: system["average"]["value"] for system in made.results["systems"]}
    head.click()
    down = column(tab, "systems", 1)
    assert [values[name] for name in down] == sorted(values.values(), reverse=True)
    assert tab.get_attribute("#systems th:has(button:text('average score'))", "aria-sort") == "descending"
    head.click()
    assert [values[name] for name in column(tab, "systems", 1)] == sorted(values.values())
    tab.locator("#systems thead button", has_text="drafted texts").click()
    assert set(column(tab, "systems", 1)[:3]) == {
        name for name in names if "longspec" in name
    }  # unknown last
    tab.fill("section#systems input[type=search]", "SNAP")
    assert {name.split("@")[0] for name in column(tab, "systems", 1)} == {"snapkv"}
    tab.fill("section#systems input[type=search]", "nothing has this name")
    assert column(tab, "systems", 1) == ["No row has this text."]


def test_only_differences_larger_than_noise_are_bold(made, report, open_page):
    tab = open_page(report)
    tab.click("section#tasks button:text('difference from full')")
    cells = tab.eval_on_selector_all(
        "#tasks-versus tbody td:not(:first-child) > span",
        "spans => spans.map(s => [s.className, s.innerText])",
    )
    tasks = [task["versus_full"] for system in made.results["systems"][1:] for task in system["tasks"]]
    assert len(cells) == len(tasks)
    for (kind, text), versus in zip(cells, tasks, strict=True):
        assert (kind in ("better", "worse")) == versus["larger_than_noise"]
        assert float(text.replace("\u2212", "-")) == pytest.approx(versus["difference"]["value"], abs=0.0051)
    tab.click("section#tasks button:text('acceptance')")
    assert len(column(tab, "tasks-tau", 1)) == 3


def test_every_plot_draws(made, report, open_page):
    tab = open_page(report)
    lines = {
        "plot-budget": 4,
        "plot-tau-length": 2,
        "plot-depth": 2,
        "plot-position": 2,
        "plot-score-length": 6,
    }
    for plot, count in lines.items():
        paths = f"#{plot} .scatterlayer .trace path.js-line"
        assert tab.locator(paths).count() == count, plot
        assert all(
            len(d) > 20 for d in tab.eval_on_selector_all(paths, "ps => ps.map(p => p.getAttribute('d'))")
        )
    assert tab.locator("#plot-average .barlayer .point").count() == len(made.systems)
    assert tab.locator("#plot-budget .shapelayer path").count() == 2  # the full cache: band and line
    maps = tab.locator(".maps > div:visible")
    assert maps.count() == 6
    assert (
        tab.locator(".maps > div:visible .heatmaplayer image, .maps > div:visible .heatmaplayer path").count()
        >= 6
    )
    full = [cell for cell in made.results["cells"] if cell["system"] == "full" and cell["facets"]]
    shown = tab.eval_on_selector_all(
        "#plot-needle-0 .heatmap-label", "labels => labels.map(l => l.textContent)"
    )
    assert sorted(map(int, shown)) == sorted(round(cell["score"]["value"]) for cell in full)


def test_plots_follow_their_controls(made, report, open_page):
    tab = open_page(report)
    before = tab.locator("#plot-budget .yaxislayer-above").text_content()
    tab.select_option("section#plots .plot:has(#plot-budget) select", "lcc")
    lcc = next(task for task in made.results["systems"][0]["tasks"] if task["task"] == "lcc")
    assert f"full cache {lcc['score']['value']:.2f}" in tab.locator("#plot-budget .annotation").text_content()
    assert tab.locator("#plot-budget .yaxislayer-above").text_content() != before
    tab.click(".plot:has(#plot-budget) .chip:has-text('streaming_llm')")
    assert tab.locator("#plot-budget .scatterlayer .trace").count() == 3
    tab.click(".plot:has(.maps) .chip:has-text('snapkv@64')")
    assert tab.locator(".maps > div:visible").count() == 7


def test_examples_are_searched_filtered_and_read_side_by_side(made, report, open_page):
    tab = open_page(report)
    assert tab.inner_text("#examples-count") == "80 of 80 examples"
    assert tab.locator(".example").count() == 12
    assert tab.locator(".example >> nth=0 >> .outputs > div").count() == 3
    tab.click("#examples .chip:has-text('snapkv@512')")
    assert tab.locator(".example >> nth=0 >> .outputs > div").count() == 4

    def count(number):
        playwright.expect(tab.locator("#examples-count")).to_have_text(f"{number} of 80 examples")

    tab.fill("#examples-search", SECRET.upper())
    count(1)
    assert tab.inner_text(".example .line b") == made.examples[33]["example"]
    tab.fill("#examples-search", "")
    count(80)
    chosen = tab.eval_on_selector_all(
        "#examples .chip[aria-pressed=true]", "chips => chips.map(c => c.innerText)"
    )
    same = sum(len({str(one["outputs"][name]["texts"]) for name in chosen}) == 1 for one in made.examples)
    assert 0 < same < 80
    tab.check("#examples-differ")
    count(80 - same)
    tab.uncheck("#examples-differ")
    tab.select_option("#examples select >> nth=0", "needle")
    count(40)
    tab.select_option("#examples select >> nth=1", "spread")
    spread = max(
        max(scores) - min(scores)
        for one in made.examples
        if one["task"] == "needle"
        for scores in [[one["outputs"][name]["score"] for name in chosen]]
    )
    shown = [float(text) for text in tab.locator(".example >> nth=0 >> .score").all_inner_texts()]
    assert (max(shown) - min(shown)) / 100 == pytest.approx(spread)
    tab.fill("#examples-search", "no text has this")
    count(0)
    assert "No example matches" in tab.inner_text("#examples-list")


def test_outputs_are_text_whatever_they_hold(made, report, open_page):
    tab = open_page(report)
    first = next(iter(made.examples))["outputs"]["full"]["texts"][0]
    assert tab.inner_text(".example >> nth=0 >> pre.text:visible >> nth=0") == first
    while tab.locator("#examples-list > button").count():
        tab.click("#examples-list > button")
    assert tab.locator(".example").count() == 80
    assert tab.evaluate("window.broken") is None
    assert tab.locator("#app img, #app script, #app b b").count() == 0


def test_prompts_open(report, open_page):
    tab = open_page(report)
    prompt = tab.locator(".example >> nth=0 >> pre.prompt >> nth=1")
    assert not prompt.is_visible()
    tab.click(".example >> nth=0 >> summary:text-is('Prompt')")
    assert "</textarea></script>\nAnswer:" in prompt.inner_text()


def test_dark_and_light(report, open_page):
    tab = open_page(report, color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    ink = "document.querySelector('#plot-budget .xtick text').style.fill"
    dark = tab.evaluate(f"[{paper}, {ink}]")
    tab.click("#theme")
    light = tab.evaluate(f"[{paper}, {ink}]")
    assert dark[0] != light[0] and dark[1] != light[1]


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(report, open_page, width):
    tab = open_page(report, viewport={"width": width, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator("#times tbody tr").count() == 2


def rescaled(made, kind):
    """The made-up run as another suite would have it."""
    if kind == "perplexity":
        scale = Scale("perplexity", None, higher_is_better=False)
        records = [
            replace(
                one, turns=(), score=None, cycles=None, measures={"nats": 90 * (2 - one.score), "tokens": 40}
            )
            for one in made.records
        ]
    elif kind == "acceptance":
        scale, records = Scale(ACCEPTANCE, None), [replace(one, score=None) for one in made.records]
    else:
        scale, records = (
            Scale("rating", 10.0),
            [replace(one, score=None, marks={"said": "<b>"}) for one in made.records],
        )
    suite = replace(made.suite, scale=scale, summarise=lambda _: Summary(kind, (), extra={"table": EXTRA}))
    return suite, records


@pytest.mark.parametrize(("kind", "plots"), [("perplexity", 2), ("acceptance", 4), ("unjudged", 3)])
def test_pages_of_other_suites(made, tools, tmp_path, open_page, kind, plots):
    suite, records = rescaled(made, kind)
    results = tools.make_results(suite, made.systems, records, resamples=50)
    file = tmp_path / "report.html"
    file.write_bytes(page(results, tools.make_examples(suite, made.systems, records)))
    tab = open_page(file)
    assert tab.locator("nav a").all_inner_texts() == ["Systems", "Plots", "Tasks", "Examples", "Protocol"]
    assert tab.locator(".plot .scatterlayer").count() == plots
    head = tab.locator("#systems thead button").all_inner_texts()
    assert (f"average {suite.scale.name}" in head) == (kind != "unjudged")
    assert ("τ" in head) == (kind == "unjudged")
    assert column(tab, "own", 2)[0] == "3.14"
    if kind == "perplexity":  # the full cache has the lowest and so the best
        assert tab.locator("#systems tbody .better").count() == 0
        assert tab.locator("#systems tbody .worse").count() > 5


def test_a_page_of_one_example_a_task_claims_no_interval(made, tools, tmp_path, open_page):
    suite = replace(made.suite, tasks=made.suite.tasks[:1])
    records = [one for one in made.records if one.example == "narrativeqa-0"]
    results = tools.make_results(suite, made.systems, records, resamples=50)
    file = tmp_path / "report.html"
    file.write_bytes(page(results, tools.make_examples(suite, made.systems, records)))
    tab = open_page(file)
    assert "(too few for an interval)" in column(tab, "systems", 4)[0]
    assert tab.locator("#systems tbody .worse, #systems tbody .better").count() == 0
    assert "NaN" not in tab.content().split("<body")[1].split('id="data">')[0]
    assert tab.locator(".plot .scatterlayer").count() > 0


def test_a_comparison_opens_and_sorts(made, tmp_path, open_page):
    outputs = {}
    for one in made.examples:
        outputs.setdefault(one["task"], {})[one["example"]] = one["outputs"]
    runs = [Run(name, made.results, outputs, {}) for name in ("old", "<b>new</b>")]
    file = tmp_path / "compare.html"
    file.write_bytes(compare_page(compare(*runs, Bootstrap(resamples=50))))
    tab = open_page(file)
    assert tab.inner_text("h1") == "old and <b>new</b>"
    tab.locator("#pairs thead button").first.click()
    assert column(tab, "pairs", 1) == sorted(system.name for system in made.systems)
    assert len(column(tab, "pair-tasks", 1)) == len(made.systems)


def test_speeds_show_their_spread_and_that_a_cpu_says_nothing(report, open_page):
    tab = open_page(report)
    assert "2.50 \u00d7 (2.00 to 3.50)" in tab.inner_text("#times") and "25.0" in tab.inner_text("#times")
    assert "say nothing about speed on a GPU" in tab.inner_text("section#speed")
    assert "2.50 \u00d7" in tab.inner_text("#card-speed")
