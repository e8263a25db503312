"""What is typed arrives: texts, paths and names through Hydra's grammar and OmegaConf's values."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from longtrain.assets import asset_dir
from longtrain.jobs import JOBS
from longtrain.prompt.grammar import NAMES, QUOTED, in_grammar, in_list, spelled_out
from longtrain.prompt.naming import swept

Run = Callable[..., CompletedProcess[str]]

ODD = "josé = a, [b] {c} (d) #&!;'\"~^ `e` %日本"
"""The name of a folder, with all that Hydra's grammar reads otherwise or not at all."""
PIECES = [
    "'", '"', "\\", "\\'", "$", "${", "${x}", "\\${x}", "${oc.env:HOME}", "{", "}", "[", "]", "(", ")", "???",
    ",", "=", "#", "&", "!", ";", "~", "^", "`", "<", ">", "|", ":", "%", "*", "a", "null", "1", "1e3",
    "true", "é", "日", "😀", " ", "\n", "\r", "\t",
]  # fmt: skip


def arrives(word: str, **options: bool) -> Any:
    """The value that a job finds in its configuration."""
    override = OverridesParser.create().parse_override(in_grammar(word, **options))
    cfg = OmegaConf.create({"key": None, "x": "another"})
    OmegaConf.update(cfg, "key", override.value())
    return OmegaConf.to_container(cfg, resolve=True)["key"]


def texts(seed: int) -> list[str]:
    """Short texts of awkward pieces."""
    draw = random.Random(seed)
    return ["".join(draw.choices(PIECES, k=draw.randint(0, 6))) for _ in range(600)]


def test_a_prompt_arrives_as_it_is_typed() -> None:
    typed = ['"quoted"', "'quoted'", r"\${a} ${b} \\${c}", "???", "a\\", "", "0x10", "choice(1,2)", *texts(0)]
    assert [text for text in typed if text != "null" and arrives(f"prompt={text}") != text] == []
    assert arrives("prompt=null") is None


@pytest.mark.parametrize("key", ["target.path", "data.text", "prompt_file", "home", "name", "artifact"])
def test_a_path_arrives_as_it_is_typed(key: str) -> None:
    typed = [ODD, f"/home/{ODD}/a.txt", "/home/josé", "it's", "1e3", "007", "nan", "true", "???", *texts(1)]
    for path in typed:
        other = path == "null" or "${" in path or QUOTED.fullmatch(path)
        if not other and not (key == "artifact" and path[:1] == "["):
            assert arrives(f"{key}={path}") == path


def test_what_is_no_text_is_hydras_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/home/josé")
    assert arrives("seed=3") == 3 and arrives("optim.lr=1e-3") == 1e-3 and arrives("quiet=true") is True
    assert arrives("data.stages=[{fraction: 1.0, sequence_tokens: 8}]") == [
        {"fraction": 1.0, "sequence_tokens": 8}
    ]
    assert arrives("data.prompt_tokens=[64,128]") == [64, 128] and arrives("lengths=[]") == []
    assert arrives("init=null") is None and arrives("home=${oc.env:WHERE}/a=b") == "/home/josé/a=b"
    assert arrives("data.text='a, b'") == "a, b", "all of it in quotes: these are the grammar's"
    assert arrives("job=train,export") == ["train", "export"]
    assert in_grammar("~data.text") == "~data.text"


def test_a_path_under_any_key_may_have_any_character() -> None:
    assert arrives("suite.cost.table=/home/josé/a=b#c") == "/home/josé/a=b#c"
    assert arrives("suite.texts=[/home/josé/a.txt, b&c, 3]") == ["/home/josé/a.txt", "b&c", 3]
    assert arrives("logger.save_dir=${x}/é") == "another/é"


def test_names_in_a_list() -> None:
    assert arrives("artifact=[/home/josé/a,it's, 1e3,'b, c']") == ["/home/josé/a", "it's", "1e3", "b, c"]
    assert arrives("stop=[. ,'\n\n',007]") == [".", "\n\n", "007"] and arrives("stop=. ") == ". "
    assert arrives(f"runs={in_list(['a=b', 'it', '???'])}") == ["a=b", "it", "???"]


def test_keys_of_a_mapping_may_be_in_quotes() -> None:
    assert arrives("optim.lr_multipliers={\"*mlp*\": 0.5, '*.norm.*':2}") == {"*mlp*": 0.5, "*.norm.*": 2}
    assert arrives("x={'a b':1, '(c:d, e=f) [g] {h}' : 2}") == {"a b": 1, "(c:d, e=f) [g] {h}": 2}
    assert arrives("x=[{'a': {'b': 'it: \"c\": 1'}}]") == [{"a": {"b": 'it: "c": 1'}}]
    for key in ("1", "1e3", "true", "null", "", "é", "a\\b"):
        with pytest.raises(HydraException):  # rather than another key than the one that was typed
            arrives(f"x={{'{key}': 1}}")


def test_names_with_commas_are_several_in_a_sweep() -> None:
    words = [in_grammar("data.text=/home/josé/a b.txt,b.txt,'c,d'", sweeps=True), "-m", "--config-dir", "x"]
    (override,) = OverridesParser.create().parse_overrides(words[:1])
    assert override.is_sweep_override()
    given = [f"data.text={one}" for one in override.sweep_string_iterator()]
    found = [swept(words, [one])["data.text"] for one in given]
    assert found == ["/home/josé/a b.txt", "b.txt", "c,d"]
    assert in_grammar("name=choice(a,b)", sweeps=True) == "name=choice(a,b)"
    assert arrives("prompt=a, b", sweeps=True) == "a, b"


@pytest.mark.parametrize(
    "job, option, key",
    [
        ("train", "optim=muon", "optim.lr_multipliers"),
        ("train", "trainer=cpu", "trainer.lightning"),
        ("train", "trainer=deepspeed_zero2", "trainer.strategy"),
        ("train", "callbacks=default", "callbacks.extra"),
        ("train", "target=llama32_1b", "target.shape"),
        ("train", "method=eagle3", "method.rope"),
        ("train", "data=small", "data.stages.0"),
        ("eval", "evict=adakv", "evict.options"),
        ("answers", "data=text", "ask"),
        ("answers", "data=text", "ask_weights"),
    ],
)
def test_a_mapping_takes_new_keys(job: str, option: str, key: str, run: Run) -> None:
    """With a `+` or without: each setting whose value is a mapping, be its keys free or known."""
    found = []
    for plus in ("", "+", "++"):
        done = run("config", job, option, f"{plus}{key}={{*first*: 0.5, second: {{third: x}}}}", "seed=3")
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
        value = OmegaConf.select(OmegaConf.create(done.stdout), key)
        assert value["*first*"] == 0.5 and value["second"] == {"third": "x"}
    assert len({*found}) == 1


def test_the_keys_of_a_mapping_that_is_there_stay(run: Run) -> None:
    done = run("config", "train", "+debug=smoke", "trainer.lightning={fast_dev_run: true}")
    kept = OmegaConf.create(done.stdout).trainer.lightning
    assert kept == {"limit_val_batches": 2, "fast_dev_run": True}


def test_an_empty_mapping_for_one_with_keys_is_refused_and_what_empties_it_is_told(run: Run) -> None:
    done = run("config", "train", "+recipe=eagle3_qwen25_coder", "optim.lr_multipliers={}")
    says = (
        "optim.lr_multipliers={} adds no key to those it has: lm_head*; write ~optim.lr_multipliers to leave "
        "them out, or optim.lr_multipliers={KEY: VALUE} to add one"
    )
    assert done.returncode == 1 and says in done.stderr
    done = run("config", "train", "+recipe=eagle3_qwen25_coder", "~optim.lr_multipliers")
    assert done.returncode == 0 and not OmegaConf.create(done.stdout).optim.get("lr_multipliers")
    done = run("config", "train", "+recipe=eagle3_tiny", "optim.lr_multipliers={}")
    assert done.returncode == 0 and OmegaConf.create(done.stdout).optim.lr_multipliers == {}


def test_every_empty_mapping_takes_new_keys() -> None:
    """Those of the configuration files are among the settings above."""
    found = {
        f"{file.parent.name}.{key}"
        for file in asset_dir("conf").glob("*/*.yaml")
        for key in re.findall(r"(?m)^(\w+): \{\}", file.read_text(encoding="utf-8"))
    }
    assert found == {"optim.lr_multipliers", "trainer.lightning", "callbacks.extra", "evict.options"}


def test_a_wrong_value_in_a_mapping_is_refused_when_it_is_read(run: Run) -> None:
    done = run("train", "+recipe=longspec_tiny", "optim.lr_multipliers={norm: x}", "dry_run=true")
    says = "optim.lr_multipliers={'norm': 'x'}; allowed: {PATTERN: FACTOR, ...}, each factor a number"
    assert done.returncode == 1 and says in done.stderr


def test_a_key_that_is_nowhere_is_refused_whatever_its_value(run: Run) -> None:
    assert "unknown key 'optim.lr_multiplier'; did you mean optim.lr_multipliers?" in (
        run("config", "train", "optim.lr_multiplier={a: 1}").stderr
    )
    assert "unknown key 'foo'" in run("config", "train", "foo={a: 1}").stderr
    says = (
        "optim.lr_multipliers has no keys yet; write '+optim.lr_multipliers.norm=VALUE' or "
        "'optim.lr_multipliers={norm: VALUE}'"
    )
    assert says in run("config", "train", "optim.lr_multipliers.norm=0.5").stderr
    says = "no item of data.stages has 'data.stages.0.weights' yet; write '++data.stages.0.weights=VALUE' if"
    assert says in run("config", "train", "data=text", "data.stages.0.weights={book: 1}").stderr


def test_a_command_finds_its_files_in_a_folder_of_any_name(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def job(cfg: Any) -> None:
        argv = list(sys.argv[1:])
        keys = ("data.text", "home", "name", "run_dir", "data.name", "target.path", "prompt_file")
        values = OmegaConf.create(cfg.values)
        seen.append(({key: OmegaConf.select(values, key) for key in keys}, argv))

    monkeypatch.setitem(sys.modules, "tests_grammar", type("Module", (), {"run": staticmethod(job)}))
    monkeypatch.setitem(JOBS, "generate", ("tests_grammar", ""))
    folder = tmp_path / ODD
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    typed = [f"home={folder}/home", f"name={ODD}", "data=text", f"data.text={folder}/a.txt"]
    typed += [f"target.path={folder}", f"prompt_file={folder}/a.txt", "quiet=true"]
    done = run("generate", *typed)
    assert done.returncode == 0, done.stderr
    ((values, argv),) = seen
    assert values == {
        "data.text": f"{folder}/a.txt",
        "home": f"{folder}/home",
        "name": ODD,
        "run_dir": f"{folder}/home/runs/{ODD}",
        "data.name": "text_josé-a-b-c-d-e-日本_a",
        "target.path": str(folder),
        "prompt_file": f"{folder}/a.txt",
    }
    assert argv == ["generate", *typed], "copies of this process are started with the words as typed"


def test_a_prompt_that_is_not_utf8_is_refused_before_anything_is_loaded(run: Run) -> None:
    done = run("generate", "target=tiny", "prompt=gr\udcf6sse")
    assert done.returncode == 1 and "prompt= holds bytes that are not UTF-8" in done.stderr


def test_every_name_is_a_key_of_a_configuration() -> None:
    def has(name: str) -> bool:
        group, _, key = name.rpartition(".")
        files = (asset_dir("conf") / group).glob("*.yaml")
        return any(re.search(rf"(?m)^\s*{key}:", file.read_text(encoding="utf-8")) for file in files)

    assert [name for name in NAMES if name != "recipe" and not has(name)] == []


def test_features_of_an_engine_are_one_word() -> None:
    assert spelled_out("features=engine:states") == ["features=engine", "features.folder=states"]
    assert spelled_out(f"features=engine:{ODD}")[1] == f"features.folder={ODD}"
    assert spelled_out("features=engine:a=engine:b")[1] == "features.folder=a=engine:b"
    for word in (
        "features=engine",
        "features=engine:",
        "features=fill",
        "prompt=features=engine:a",
        "+x=engine:a",
    ):
        assert spelled_out(word) == [word]
