"""The card of every kind of artifact, and what `inspect` says of it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml

from longtrain import methods, plots
from longtrain.artifact import Artifact
from longtrain.artifact.evidence import EVIDENCE, MOST_POINTS, Curve, Evidence, Measurement
from longtrain.artifact.inspection import inspect
from longtrain.errors import ArtifactError
from longtrain.files import sealed
from longtrain.targets.loading import random_target

KINDS = [
    name
    for name in methods.names()
    if methods.get(name).attach is not None and methods.get(name).objective is not None
]
ELSEWHERE = {
    "longspec": "## In vLLM",
    "kvzap": "## In kvpress\n\n```python\nfrom kvpress import KVzapPress",
    "lookaheadkv": "## In kvpress\n\n```python\nfrom longtrain.integrations.lookaheadkv_kvpress",
    "eagle3": "longtrain export artifact=FOLDER format=speculators   # vLLM",
    "dspark": "longtrain export artifact=FOLDER format=",
}
MADE = {
    "argv": ["/home/me/longtrain", "train", "data.books=/home/me/books"],
    "license": "apache-2.0",
    "target_license": "llama3.1",
    "step": 7,
    "git": {"commit": "0123456789abcdef", "dirty": False},
    "data": {
        "stages": [{"doc_tokens": 2048}],
        "sources": [{"id": "org/books", "license": "cc0-1.0", "kind": "book", "revision": "abc"}],
    },
}
RESULT = Measurement(
    suite="acceptance",
    title="Acceptance by context length",
    target="tiny",
    dtype="float32",
    protocol="0123456789abcdef",
    command="longtrain eval suite=acceptance",
    commit="0123456789ab",
    machine="CPU",
    notes=["a variant | of it"],
    header=["system", "acceptance length", "at 1k"],
    rows=[["a|b", "2.50 [2.40, 2.60]", "2.60"]],
    pictures=["acceptance-acceptance.png"],
)


def picture() -> bytes:
    figure, (axes,) = plots.panels(1)
    axes.plot([1, 2])
    return plots.png(figure)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An artifact of each kind with a picture of its training and a result."""
    home, found = tmp_path_factory.mktemp("home"), {}
    target, image = random_target("qwen3_micro", seed=4), picture()
    for name in KINDS:
        spec = methods.get(name)
        torch.manual_seed(0)
        config = spec.config()
        module = spec.build(config, target.info)
        made = Artifact.from_module(name, config, module=module, target=target, provenance=MADE)
        one = Artifact.load(made.save(home / "checkpoints" / name))
        evidence = Evidence({"train/loss": Curve([1, 2, 3], [4.0, 3.0, 2.0])}, [RESULT])
        one.describe(evidence, pictures={"training.png": image, RESULT.pictures[0]: image})
        found[name] = home / "checkpoints" / name
    return found


def check_card(folder: Path) -> str:
    """The card's front matter is YAML with tags, and every picture that it links to is beside it."""
    text = (folder / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert "longtrain" in yaml.safe_load(front)["tags"]
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", body)
    assert sorted(pictures) == sorted(file.name for file in folder.glob("*.png"))
    assert "/home/me" not in text
    for line in body.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) >= 3, line
    return body


@pytest.mark.parametrize("name", KINDS)
def test_card_has_all_that_a_reader_asks(exported: dict[str, Path], name: str) -> None:
    body = check_card(exported[name])
    titles = re.findall(r"^## (.*)$", body, re.M)
    assert titles[0] == "How to load"
    assert titles[-6:] == ["Results", "Curves", "Training", "Limits", "Configuration", "Files"]
    assert "| a\\|b | 2.50 \\[2.40, 2.60\\] | 2.60 |" in body and "- a variant \\| of it" in body
    assert "| `train/loss` | 3 | 4 | 2 |" in body and "data.books=books" in body
    assert "| org/books | abc | book | cc0-1.0 |" in body
    assert "Licence of the module: apache-2.0; of the target: llama3.1" in body
    assert "texts of up to 2k tokens" in body and "longtrain inspect FOLDER" in body
    assert ELSEWHERE.get(name, "") in body
    assert ("## In" in body) == (name in ELSEWHERE), "no engine is named that cannot load it"


@pytest.mark.parametrize("name", KINDS)
def test_inspect_tells_what_it_is_and_whether_it_verifies(exported: dict[str, Path], name: str) -> None:
    found = inspect(str(exported[name]))
    facts = found.facts
    assert not found.fault and found.results == [RESULT]
    assert facts["method"].startswith(f"{name} (") and facts["train/loss"] == "█▅▁ 4 to 2"
    assert "parameters in" in facts["tensors"] and "qwen3_micro (qwen3" in facts["target"]
    assert facts["licence"] == "apache-2.0; of the target: llama3.1"
    assert facts["data"] == "org/books (cc0-1.0)" and "step 7" in facts["at"]
    assert "finite weights, golden outputs in float32" in facts["verifies"]


def test_job_prints_it_and_fails_where_it_does_not_verify(
    exported: dict[str, Path], tmp_path: Path, run
) -> None:
    good, bad = exported["kvzap"], tmp_path / "bad folder, it's"
    done = run("inspect", str(good))
    assert done.returncode == 0 and "\nverifies     yes: sha256 of" in done.stdout and not done.stderr
    assert "suite=acceptance, tiny in float32" in done.stdout and "kvpress" in done.stdout
    shutil.copytree(good, bad)
    content = bytearray((bad / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (bad / "model.safetensors").write_bytes(content)
    done = run("inspect", str(bad), str(good))
    assert done.returncode == 1 and "verifies     NO: " in done.stdout and done.stdout.count("verifies") >= 2
    assert "does not verify" in done.stderr and "sha256 differs" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_golden_outputs_it_does_not_verify(exported: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(exported["longspec"], tmp_path / "one")
    manifest = json.loads((folder / "longtrain.json").read_text())
    (folder / "longtrain.json").write_bytes(sealed({**manifest, "golden": None}))
    assert "has no golden outputs" in inspect(str(folder)).fault
    assert not inspect(str(folder), unverified=True).fault


@pytest.mark.parametrize(
    "content",
    [
        '{"curves": 3}',
        '{"curves": {"loss": {"steps": [], "values": []}}}',
        '{"curves": {"loss": {"steps": [1], "values": [NaN]}}}',
        '{"curves": {"loss": {"steps": [1, 2], "values": [1.0]}}}',
        json.dumps({"results": [{**asdict(RESULT), "rows": [["one cell"]]}]}),
        json.dumps({"results": [{**asdict(RESULT), "suite": ["x" * 9999]}]}),
    ],
)
def test_evidence_that_is_none_is_one_short_line(
    exported: dict[str, Path], tmp_path: Path, content: str
) -> None:
    folder = shutil.copytree(exported["longspec"], tmp_path / "one")
    (folder / EVIDENCE).write_bytes(sealed(json.loads(content)))
    fault = inspect(str(folder)).fault
    assert "evidence.json cannot be read" in fault and len(fault) < len(str(folder)) + 200


def test_what_a_terminal_would_obey_is_escaped(exported: dict[str, Path], tmp_path: Path, run) -> None:
    folder = shutil.copytree(exported["longspec"], tmp_path / "one")
    manifest = json.loads((folder / "longtrain.json").read_text())
    manifest["provenance"]["license"] = "\x1b[2Jmit\nverifies  yes: all of it"
    (folder / "longtrain.json").write_bytes(sealed(manifest))
    result = {**asdict(RESULT), "title": "\x1b[31mred", "rows": [["\x1b]0;x\x07"] * len(RESULT.header)]}
    (folder / EVIDENCE).write_bytes(sealed({"results": [result]}))
    said = run("inspect", str(folder)).stdout
    assert "\x1b" not in said and "\x07" not in said and said.count("\nverifies") == 1
    assert "\\x1b[2Jmit\\nverifies" in said and "\\x1b[31mred" in said


def test_a_target_is_inspected_too() -> None:
    found = inspect("tiny")
    assert not found.fault and found.facts["licence"] == "apache-2.0"
    assert "9,393,024 weights, all finite" in found.facts["verifies"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("run/train/metrics.csv", "run is a training run, no artifact; export it, longtrain export name=run"),
        ("run/results.json", "holds results of an evaluation, no artifact; see "),
        (
            "run/eval/needle/results.json",
            "holds results of evaluations, no artifact; see ",
        ),
        ("run/something", "holds no longtrain.json"),
    ],
)
def test_another_folder_is_told_with_what_to_run(tmp_path: Path, made: str, said: str) -> None:
    file = tmp_path / made
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    with pytest.raises(ArtifactError, match=said):
        inspect(str(tmp_path / "run"))


def test_card_and_inspect_say_which_weights_the_target_has(tmp_path: Path) -> None:
    target = random_target("qwen3_micro", seed=4)
    source = {"gguf": "small.gguf", "sha256": "ab" * 32, "quantisation": "Q4_K_M"}
    target.info = replace(target.info, extra={"source": source})
    spec = methods.get("kvzap")
    config = spec.config()
    module = spec.build(config, target.info)
    made = Artifact.from_module("kvzap", config, module=module, target=target)
    made.save(tmp_path / "made")
    said = f"GGUF small.gguf, Q4_K_M, SHA-256 {'ab' * 32}"
    assert f"; weights: {said})" in (tmp_path / "made" / "README.md").read_text()
    assert said in inspect(str(tmp_path / "made")).facts["target"]


def test_curves_are_thinned_to_what_a_page_holds() -> None:
    curve = Curve(list(range(1000)), [float(step) for step in range(1000)]).thinned()
    assert len(curve.steps) == MOST_POINTS and (curve.steps[0], curve.values[-1]) == (0, 999.0)
    assert Curve([1], [2.0]).thinned() == Curve([1], [2.0])
