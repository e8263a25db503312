"""The command line: what it says, what it starts, and how it fails."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra.errors import HydraException

from longtrain import cli
from longtrain.assets import asset_dir
from longtrain.bench.suites import SUITES
from longtrain.errors import ConfigError
from longtrain.jobs import JOBS, NAMED
from longtrain.prompt.job_groups import EXAMPLES, GROUPS
from longtrain.prompt.suite_help import keys_of, suites_help, suites_of

Run = Callable[..., subprocess.CompletedProcess[str]]


def start(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m longtrain ARGS` in a process and a folder of its own."""
    words = [sys.executable, "-m", "longtrain", *args]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.run(words, capture_output=True, text=True, cwd=cwd, timeout=120, env=env)


def test_top_help_is_one_screen(tmp_path: Path) -> None:
    done = start("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(f"\n  {job} " in done.stdout for job in JOBS)
    assert len(done.stdout.splitlines()) <= 24


def test_top_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['longtrain', '--help']; from longtrain.cli import main; main(); "
        "print([m for m in ('hydra', 'numpy', 'omegaconf', 'torch', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_a_terminal_would_obey_is_escaped_in_errors(capsys: pytest.CaptureFixture[str]) -> None:
    cli._complain("document \x1b[2J\x07\r\n\u202e größe 龙\ud800 is wrong")
    assert capsys.readouterr().err == (
        "longtrain: error: document \\x1b[2J\\x07\\r\\n\\u202e größe 龙\\ud800 is wrong\n"
    )


def test_no_arguments_is_help(run: Run) -> None:
    assert run().stdout == run("--help").stdout


@pytest.mark.parametrize("job", JOBS)
def test_job_help_lists_its_groups_options_and_keys(
    job: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    done = run(job, "--help")
    assert done.returncode == 0, done.stderr
    assert (
        JOBS[job][1] in done.stdout and f"\n  longtrain {job}" in done.stdout
    )  # what it does, and an example
    for group in ("target", "method", "trainer", "data", "evict"):
        assert (f"\n{group}: " in done.stdout) == (group in GROUPS[job])
    assert "longspec_llama8b_anchor" not in done.stdout
    assert ("deepspeed_zero3" in done.stdout) == (job in ("train", "plan"))
    assert "seed: 0 " in done.stdout and "of initial weights" in done.stdout  # the key with its comment
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("columns", [60, 100])
def test_help_heeds_columns(columns: int, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("eval", "--help").stdout.splitlines()
    words = " ".join(lines).replace(" # ", " ").split()
    monkeypatch.delenv("COLUMNS")
    whole = run("eval", "--help").stdout
    assert max(map(len, lines)) <= columns < max(map(len, whole.splitlines()))
    assert [word for word in words if word != "#"] == [word for word in whole.split() if word != "#"]


@pytest.mark.parametrize("job", EXAMPLES)
def test_the_example_of_each_job_composes(job: str, run: Run) -> None:
    program, word, *words = shlex.split(EXAMPLES[job])
    assert (program, word) == ("longtrain", job)
    if job not in NAMED:
        done = run("config", job, *words)
        assert done.returncode == 0, done.stderr


def test_keys_of_one_job_are_in_its_help_alone(run: Run) -> None:
    assert "prompt: null" in run("generate", "--help").stdout
    assert "prompt: null" not in run("eval", "--help").stdout


def test_help_says_which_suites_are_of_a_job() -> None:
    evals, benches = (suites_help(job) for job in ("eval", "bench"))
    assert "\n  speculation " in evals and "\n  ruler " in evals and "\n  engine " not in evals
    assert "\n  engine " in benches and "\n  ruler " not in benches and "\n  common " not in evals
    assert re.search(r"\n  eviction +accuracy against budget", evals) and "\n  first_token " in benches
    assert "longtrain eval suite=smoke target=tiny method=quantspec" in evals and "compare=[" in evals
    assert suites_help("train") == ""


def test_help_of_a_suite_lists_its_keys(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    done = run("eval", "suite=needle", "--help")
    assert done.returncode == 0, done.stderr
    assert "== Keys of suite=needle ==" in done.stdout and "lengths: ${lengths}" in done.stdout
    assert "\n    budgets: [128] " in done.stdout  # of what it builds on
    drafted = keys_of("speculation")
    assert "prompts decoded together" in drafted and drafted.count("\n    batch: ") == 1


def test_every_suite_is_in_the_help_of_its_job_with_all_its_keys() -> None:
    found = {job: suites_of(job) for job in ("eval", "bench")}
    assert set(found["bench"]) == set(SUITES)
    folder = asset_dir("conf") / "suite"
    files = {file.stem: yaml.safe_load(file.read_text()) for file in folder.glob("*.yaml")}
    assert {*found["eval"], *found["bench"]} == set(files) - {"common"}

    def keys(name: str) -> set[str]:
        base = files[name].get("defaults", [])
        return set(files[name]["suite"]).union(*map(keys, base))

    for name in found["eval"]:
        said = [line[4:].partition(":")[0] for line in keys_of(name).splitlines() if line[4:5].strip()]
        assert keys(name) <= set(said), name


def test_version_and_recipes(run: Run) -> None:
    assert run("--version").stdout.startswith("longtrain ")
    listed = run("recipes").stdout
    assert all(name in listed for name in cli.recipes())


@pytest.mark.parametrize(
    ("args", "says", "code"),
    [
        (["evil"], ["unknown word 'evil'", "did you mean eval?", "prepare, answers, train"], 2),
        (["quickstart"], ["write +recipe=quickstart"], 2),
        (["+recipe=quickstart", "eval"], ["the job comes first: longtrain eval"], 2),
        (
            ["train", "export"],
            ["several jobs are one word, with commas between: longtrain train,export ..."],
            2,
        ),
        (["train,export", "+recipe=quickstart", "eval"], ["longtrain train,export,eval ..."], 2),
        (
            ["train", "+recipe=/me/mine.yaml"],
            ["move it to /me/recipe/mine.yaml and pass --config-dir '/me' +recipe=mine"],
            1,
        ),
        (["train", "+recipe=my own/recipe/x.yml"], ["name; pass --config-dir 'my own' +recipe=x"], 1),
        (["--bogus"], ["unknown flag '--bogus'; known: --help, --version, --multirun"], 2),
        (["--hepl"], ["unknown flag '--hepl'; did you mean --help?"], 2),
        (["train", "target=tiny", "--multirum"], ["did you mean --multirun?"], 2),
        (["+recipe=quickstrat"], ["unknown recipe 'quickstrat'; did you mean quickstart?"], 1),
        (["recipe=quickstart"], ["write +recipe=NAME"], 1),
        (["train", "target=tinny"], ["unknown target 'tinny'; did you mean tiny?", "llama31_8b"], 1),
        (["train", "trget=tiny"], ["unknown key 'trget'", "did you mean target?"], 1),
        (["eval", "target.pth=x"], ["unknown key 'target.pth'; did you mean target.path?"], 1),
        (["generate", "max_new_tokens=20"], ["'max_new_tokens'; did you mean decode.max_new_tokens?"], 1),
        (["+recipe=quickstart", "lr=1"], ["did you mean optim.lr?"], 1),
        (["train", "+name=x"], ["key 'name' exists already"], 1),
        (["train", "method=longspec", "method.window=wide"], ["method.window", "wide", "Integer"], 1),
        (["train", "method=longspec", "method.windw=3"], ["did you mean method.window?"], 1),
        (
            ["+recipe=quantspec_llama8b", "prompt=hello"],
            ["key 'prompt' needs the job's word; write longtrain generate +recipe=quantspec_llama8b prompt="],
            1,
        ),
        (
            ["+recipe=quickstart", "report=html"],
            ["is one of eval alone; in a list of jobs write +report="],
            1,
        ),
        (["job=train,eval", "target=tiny", "report=html"], ["in a list of jobs write +report=VALUE"], 1),
        (["job=[train,fly]"], ["unknown job 'fly'", "known: prepare, answers, train"], 1),
        (["bench", "suite=acceptance", "quiet=true"], ["bench has no suite 'acceptance'", "engine"], 1),
        (["bench", "suite=engine", "lengths=x"], ["suite.lengths=x; allowed: one or more"], 1),
        (["bench", "suite=engine", "suite.warmup=x"], ["suite.warmup=x; allowed: a whole number"], 1),
        (["eval", "suite=needle", "target=tiny", "suite.needles=x"], ["suite.needles=x; allowed"], 1),
        (["eval", "target=tiny"], ["suite=acceptance measures drafts and none is given"], 1),
        (["eval", "target=tiny", "method=quantspec", "suite.text=no"], ["no held-out text at no"], 1),
        (["generate", "prompt=a", "+max_new_tokens=2"], ["did you mean decode.max_new_tokens?"], 1),
        (["generate", "prompt=a", "+decode.max_tokens=2"], ["did you mean decode.max_new_tokens?"], 1),
        (["train", "quiet=true"], ["no method is chosen", "pass +recipe=NAME"], 1),
        (["+recipe=quickstart", "target.path=./no", "quiet=true"], ["target.path=./no does not exist"], 1),
        (["eval", "artifact=./no", "quiet=true"], ["./no"], 1),
        (["export", "+recipe=quickstart", "quiet=true"], ["nothing was trained under name=quickstart"], 1),
        (["generate", "target=tiny", "quiet=true"], ["pass either prompt=TEXT or prompt_file=FILE"], 1),
        (["prepare", "target=tiny"], ["no data is chosen"], 1),
        (["prepare", "data=excerpt"], ["no target is chosen"], 1),
        (["+recipe=longspec_small", "trainer=cpu"], ["no target model is chosen"], 1),
        (["eval", "suite=needle"], ["no target model is chosen"], 1),
    ],
)
def test_mistakes_get_one_line(args: list[str], says: list[str], code: int, tmp_path: Path, run: Run) -> None:
    done = run(*args)
    assert done.returncode == code
    assert all(text in done.stderr for text in says), done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir()), "a mistake must leave nothing behind"


@pytest.mark.parametrize(("word", "code"), [("evil", 2), ("+recipe=nope", 1), ("job=[train,fly]", 1)])
def test_a_process_says_and_exits_the_same(word: str, code: int, tmp_path: Path, run: Run) -> None:
    here, there = run(word), start(word, cwd=tmp_path)
    assert there.returncode == here.returncode == code
    assert there.stderr == here.stderr and there.stdout == here.stdout == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("args", [["+recipe=nope"], ["bench", "suite=acceptance", "quiet=true"]])
def test_traceback_on_request(args: list[str], monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises((ConfigError, HydraException)):
        run(*args)


class TestDispatch:
    """`run_jobs` in this process, with jobs that only note that they ran."""

    @pytest.fixture
    def ran(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
        ran: list[tuple[str, str]] = []
        for job in JOBS:
            module = type(
                "Module", (), {"run": staticmethod(lambda cfg: ran.append((cfg.values["job"], cfg.name)))}
            )
            monkeypatch.setitem(sys.modules, f"tests_job_{job}", module)
            monkeypatch.setitem(JOBS, job, (f"tests_job_{job}", ""))
        monkeypatch.chdir(tmp_path)
        return ran

    @staticmethod
    def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> list[str]:
        """Run main; returns argv as Lightning would find it for the other ranks."""
        monkeypatch.setattr(sys, "argv", ["longtrain", *args, "quiet=true"])
        cli.main()
        return sys.argv[1:]

    def test_no_word_does_the_recipes_jobs(
        self, ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.call(monkeypatch, "+recipe=quickstart")
        assert ran == [(job, "quickstart") for job in ("train", "export", "eval")]

    @pytest.mark.parametrize("word", ["train,export,eval", "job=train,export,eval"])
    def test_several_jobs_with_commas(
        self, word: str, ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.call(monkeypatch, word, "+recipe=quickstart", "target.device=auto")
        assert ran == [(job, "quickstart") for job in ("train", "export", "eval")]

    def test_a_word_does_that_job_alone(
        self, ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.call(monkeypatch, "eval", "+recipe=quickstart", "artifact=null")
        assert ran == [("eval", "quickstart")]

    def test_relaunch_argv_keeps_the_job(
        self, ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        argv = self.call(monkeypatch, "train", "+recipe=quickstart")
        monkeypatch.setenv("LOCAL_RANK", "1")
        self.call(monkeypatch, *argv, "hydra.run.dir=.", "hydra.output_subdir=null")
        assert ran == [("train", "quickstart")] * 2

    def test_other_ranks_only_train(
        self, ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOCAL_RANK", "1")
        self.call(monkeypatch, "+recipe=quickstart")
        assert ran == [("train", "quickstart")]

    def test_a_sweep_names_its_runs_by_their_values_and_sums_up(
        self,
        ran: list[tuple[str, str]],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        folder = tmp_path / "runs" / "quickstart_window-64_seed-2" / "train"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text('{"final_loss": 2.5, "final": {"val/loss": 2.75}}')
        self.call(monkeypatch, "train", "-m", "+recipe=quickstart", "method.window=64", "seed=1,2")
        assert ran == [("train", "quickstart_seed-1"), ("train", "quickstart_seed-2")]
        self.call(monkeypatch, "train", "-m", "+recipe=quickstart", "method.window=32,64", "seed=2")
        assert ran[2:] == [("train", "quickstart_window-32"), ("train", "quickstart_window-64")]
        with pytest.raises(SystemExit):
            self.call(monkeypatch, "train", "-m", "+recipe=quickstart", "method.window=64,0", "seed=1,2")
        assert ran[4:] == [("train", f"quickstart_window-64_seed-{seed}") for seed in (1, 2)]
        shown = capsys.readouterr()
        said = [line.split()[:5] for line in shown.out.partition("method.window ")[2].splitlines()]
        assert ["64", "1", "done", "-", "-"] in said and ["64", "2", "done", "2.5", "2.75"] in said
        assert ["0", "1", "failed", "-", "-"] in said and "method.window=0" in shown.err

    def test_a_prompt_is_taken_as_typed(
        self, ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompts: list[str] = []
        module = type("Module", (), {"run": staticmethod(lambda cfg: prompts.append(cfg.generate.prompt))})
        monkeypatch.setitem(sys.modules, "tests_job_generate", module)
        for text in ("It's [a] {b}, 50% \"c\" \\'d ${home} = e\\", "???", "'a\\${name}'"):
            argv = self.call(monkeypatch, "generate", "target=tiny", f"prompt={text}")
            self.call(monkeypatch, *argv)  # and once more through a relaunch
            assert prompts[-2:] == [text, text]
