import json
import re
from html.parser import HTMLParser
from importlib import resources

import pytest

from longtrain.errors import ConfigError
from longtrain.evaluation.reporting import page as page_module
from longtrain.evaluation.reporting.page import COMPARE_SCRIPTS, RUN_SCRIPTS, as_script, page, thinned


class Elements(HTMLParser):
    """The elements of a page, with the text of its scripts."""

    def __init__(self):
        super().__init__()
        self.tags, self.scripts, self.open = [], [], None

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open = dict(attrs) if tag == "script" else None
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.open = None

    def handle_data(self, data):
        if self.open is not None:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def html(made):
    return page(made.results, made.examples).decode()


def parsed(html):
    found = Elements()
    found.feed(html)
    return found


def test_the_data_arrive_whole_whatever_the_outputs_are(made, html):
    data = json.loads(parsed(html).scripts[0])
    assert data["results"] == made.results
    assert data["examples"] == json.loads(json.dumps(made.examples))
    assert data["examples_total"] == len(made.examples) == 80


def test_nothing_from_outside_becomes_an_element(made, html):
    """The elements are those of the template: no output adds one."""
    template = resources.files(page_module.__package__).joinpath("web", "page.html").read_text("utf-8")
    scripts = ["script"] * len(RUN_SCRIPTS) + ["script"]  # and plotly
    assert [tag for tag, _ in parsed(html).tags] == [tag for tag, _ in parsed(template).tags] + scripts
    assert "window.broken" in html  # it is there, as data
    assert (
        "<script>window.broken" not in html and "<img" not in html.split("</style>")[1].split("<script>")[0]
    )


def test_a_title_is_escaped(made):
    results = {**made.results, "title": "</title><script>window.broken = 3</script> [[data]] \\g<0>"}
    html = page(results, []).decode()
    assert "<title>&lt;/title&gt;&lt;script&gt;window.broken = 3" in html
    assert len(parsed(html).scripts) == 2 + len(RUN_SCRIPTS)


def test_the_page_asks_the_network_for_nothing(html):
    own = html.split("<script>")[0]
    assert "default-src 'none'" in own
    for tag, attributes in parsed(html).tags:
        assert not {"src", "srcset", "data"} & set(attributes), tag
        assert tag not in ("link", "iframe", "object", "embed")
        assert attributes.get("href", "#").startswith("#")
    style = own.split("<style>")[1].split("</style>")[0]
    assert "@import" not in style and "url(" not in style


def test_scripts_of_the_page_never_write_markup():
    for name in {*RUN_SCRIPTS, *COMPARE_SCRIPTS}:
        code = resources.files(page_module.__package__).joinpath("web", name).read_text("utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|fetch\(", code
        ), name


def test_json_in_a_script_has_no_sign_that_could_end_it():
    text = as_script({"a": "</script><!-- ]]> & \u2028 \ud800"})
    assert text.isascii() and not set("<>&") & set(text)
    assert json.loads(text) == {"a": "</script><!-- ]]> & \u2028 \ud800"}
    with pytest.raises(ValueError, match="JSON compliant"):
        as_script({"a": float("nan")})


def test_examples_that_do_not_fit_are_thinned_evenly():
    lines = [{"task": task, "example": f"{task}-{i}", "text": "x" * 100} for task in "ab" for i in range(50)]
    lines += [{"task": "rare", "example": "rare-0", "text": "x" * 100}]
    whole = sum(len(as_script(line)) for line in lines)
    assert thinned(lines, whole) == lines
    some = thinned(lines, whole // 5)
    counts = {task: sum(line["task"] == task for line in some) for task in ("a", "b", "rare")}
    assert counts["a"] == counts["b"] >= 8 and counts["rare"] == 1
    assert sum(len(as_script(line)) for line in some) <= whole // 5
    places = [lines.index(line) for line in some]
    assert places == sorted(places)
    assert min(places) < 5 and max(p for p in places if p < 50) >= 45
    assert [line["task"] for line in thinned(lines, 1)] == ["a", "b", "rare"]


def test_without_plotly_the_page_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr(page_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'longtrain\[report\]'"):
        page_module.check_plotly()
