import base64
import json
import re
from html.parser import HTMLParser
from importlib import resources

import pytest

from longtrain.evaluation.reporting import page as page_module
from longtrain.evaluation.reporting.page import SCRIPTS, as_script, page, thinned

DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
TIMINGS = {
    "device": "cpu",
    "speed": [
        {
            "task": "lcc", "length": None, "prompts": 2, "batch": 1, "max_new_tokens": 64,
            "metrics": {
                name: {
                    "tokens_per_s": 10.0 * ratio, "ratio": ratio, "ratio_range": [ratio - 0.5, ratio + 1],
                    "end_to_end_tokens_per_s": 9.0, "end_to_end_ratio": 1.0, "ms_per_cycle": 2.0,
                    "tokens": 126, "decode_s": 12.6 / ratio, "first_token_s": 0.5,
                    "cache_bytes": 1 << 21, "draft_bytes": 0, "peak_device_bytes": None,
                }
                for name, ratio in (("full", 1.0), ("longspec_llama8b", 2.5))
            },
        }
    ],
}  # fmt: skip


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
    return page(made.results, made.examples, timings=TIMINGS, pictures={"dot.png": DOT}).decode()


def parsed(html):
    found = Elements()
    found.feed(html)
    return found


def test_the_examples_arrive_whole_whatever_the_outputs_are(made, html):
    data = json.loads(parsed(html).scripts[0])
    assert data["examples"] == json.loads(json.dumps(made.examples))
    assert data["examples_total"] == len(made.examples) == 80
    assert [system["name"] for system in data["systems"]] == [system.name for system in made.systems]


def test_the_page_has_the_tables_of_the_report_with_values_to_sort_by(made, html):
    rows = re.findall(r"<tr>(<td>.*)</tr>", html.split("<h2>Systems</h2>")[1].split("</table>")[0])
    assert [re.match("<td>([^<]*)</td>", row)[1] for row in rows] == [one.name for one in made.systems]
    for row, system in zip(rows, made.results["systems"], strict=True):
        assert f'data-value="{system["average"]["value"]:g}"' in row
        versus = system["versus_full"]
        assert ("<b>" in row) == bool(versus and versus["larger_than_noise"])
    speed = html.split("<h2>Speed</h2>")[1]
    assert '2.50 × <span class="range">(2.00 to 3.50)</span>' in speed
    assert "do not predict speed on a GPU" in speed


def test_nothing_from_outside_becomes_an_element(made, html):
    """Outputs are data; names, notes and settings are escaped."""
    allowed = {
        "src",
        "alt",
        "class",
        "id",
        "type",
        "scope",
        "data-value",
        "lang",
        "charset",
        "name",
        "content",
    }
    for tag, attributes in parsed(html).tags:
        assert set(attributes) <= allowed | {"http-equiv"}, tag
    assert len(parsed(html).scripts) == 1 + len(SCRIPTS)
    assert "window.broken" in html  # it is there, as data
    assert "&lt;b&gt;{context}&lt;/b&gt;" in html  # of the protocol's settings
    assert "<script>window.broken" not in html


def test_a_title_is_escaped(made):
    results = {**made.results, "title": "</title><script>window.broken = 3</script> [[data]] \\g<0>"}
    html = page(results, []).decode()
    assert "<title>&lt;/title&gt;&lt;script&gt;window.broken = 3" in html
    assert len(parsed(html).scripts) == 1 + len(SCRIPTS)


def test_the_page_asks_the_network_for_nothing(html):
    assert "default-src 'none'" in html
    for tag, attributes in parsed(html).tags:
        assert not {"srcset", "data", "href"} & set(attributes), tag
        assert tag not in ("link", "iframe", "object", "embed")
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
    style = html.split("<style>")[1].split("</style>")[0]
    assert "@import" not in style and "url(" not in style


def test_scripts_of_the_page_never_write_markup():
    for name in SCRIPTS:
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
