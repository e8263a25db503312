"""At the prompt: help, completion, checks before the first job, and how a command ends."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf

from longtrain import cli, methods
from longtrain.assets import asset_dir
from longtrain.errors import ConfigError
from longtrain.files import lock
from longtrain.jobs import JOBS, KEPT
from longtrain.prompt.explain import explain
from longtrain.prompt.help import group_keys, job_help
from longtrain.prompt.interrupts import NOTHING_DONE

Run = Callable[..., subprocess.CompletedProcess[str]]

LIGHT = (
    "import sys; from longtrain import cli\n"
    "for words in COMMANDS:\n"
    "    sys.argv = ['longtrain', *words]\n"
    "    try: cli.main()\n"
    "    except SystemExit: pass\n"
    "    print([m for m in NAMES if m in sys.modules])"
)


def alone(*commands: list[str], names: tuple[str, ...], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Commands in a process of their own, which says after each which of the packages are imported by now."""
    code = LIGHT.replace("COMMANDS", repr(commands)).replace("NAMES", repr(names))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=cwd, env=env
    )


def loaded(words: list[str], *names: str, cwd: Path) -> str:
    """Which of the packages a command imports in a process of its own."""
    return alone(words, names=names, cwd=cwd).stdout.splitlines()[-1]


def test_help_has_the_keys_of_every_chosen_group(tmp_path: Path) -> None:
    text = job_help("train", ["method=longspec", "optim=muon", "data=text"])
    assert "\n  window: 512  # previous tokens" in text
    assert "== optim=muon" in text and "\n  lr: " in text and "  momentum: 0.95" in text
    assert "== data=text" in text and "== decode=chain" not in text and "  max_steps: null " in text
    assert "== decode=chain" in job_help("eval")
    # the last field has its comment too
    assert "  dims: 16  # dimensions of" in job_help("train", ["method=indexer"])
    set_by = job_help("train", ["+recipe=quickstart"])
    assert "== method=longspec" in set_by and "== trainer=cpu" in set_by and "max_steps: 100" in set_by
    assert loaded(["train", "--help"], "hydra", "omegaconf", "torch", "rich", cwd=tmp_path) == "[]"


@pytest.mark.parametrize("name", methods.names())
def test_help_of_a_method_has_all_its_fields(name: str) -> None:
    said = [line.partition(":")[0] for line in group_keys("method", name)]
    assert said == list(methods.config_class(name).__dataclass_fields__)


def test_completion_offers_jobs_recipes_groups_and_keys(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def offered(line: str) -> list[str]:
        monkeypatch.setenv("COMP_LINE", f"longtrain {line}")
        done = run("-sc", "query=bash")
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert {"train", "eval", "recipes", "callbacks=", "seed="} <= set(offered(""))
    assert offered("eval +recipe=quickst") == ["+recipe=quickstart"]
    assert offered("eval +recipe=quickstart method.window") == ["method.window="]
    assert offered("generate prompt_") == ["prompt_file="] and offered("eval prompt_") == []
    assert "suite.batch=" in offered("eval suite=needle suite.")
    assert offered("config eval target=tin") == ["target=tiny"]


def test_completion_for_another_shell_is_refused(run: Run) -> None:
    done = run("completion", "tcsh")
    assert done.returncode == 2 and "completion for tcsh? allowed: bash, zsh, fish" in done.stderr


def test_bash_takes_the_completion(tmp_path: Path) -> None:
    tool = tmp_path / "longtrain"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m longtrain "$@"\n')
    tool.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parent.parent)}
    line = "longtrain eval +recipe=quickst"
    script = (
        'eval "$(longtrain completion bash)"\n'
        f"COMP_LINE='{line}' COMP_CWORD=2; hydra_bash_completion; echo ${{COMPREPLY[@]}}"
    )
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, env=env)
    assert done.stdout.split() == ["+recipe=quickstart"], done.stderr


def test_config_prints_what_is_resolved(run: Run) -> None:
    done = run("config", "+recipe=quickstart", "trainer.max_steps=7")
    cfg = OmegaConf.create(done.stdout)
    assert done.returncode == 0 and not done.stderr
    assert cfg.name == "quickstart" and cfg.trainer.max_steps == 7 and cfg.run_dir == "./runs/quickstart"
    assert "prompt_file: null" in run("config", "generate").stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trainer.max_steps=abc"], "trainer.max_steps=abc; allowed: a whole number, 1 or more, or null"),
        (["name=../x"], "name=../x; allowed: a name, or names with / between them, none of which is empty"),
        (["data.name=../d"], "data.name=../d; allowed: a name"),
        (["optim.lr=-1"], "optim.lr=-1; allowed: a number, above 0"),
        (["method.window=0"], "method.window=0; allowed: a whole number, 1 or more"),
        (["decode.temperature=-1"], "decode.temperature=-1"),
        (["suite.batch=no"], "suite.batch=no"),
        (["job=[train,eval]"], "no artifact was exported under name=quickstart"),
        (["job=[train,generate]"], "generate needs one prompt"),
        (
            ["+recipe=joint_tiny", "method.members.longspec=null"],
            "artifact=joint_tiny/longspec is none of those that this joint training exports, one for each of "
            "method.members; name some of them, artifact=[joint_tiny/eagle3,joint_tiny/lookaheadkv]",
        ),
        (["+recipe=joint_tiny", "artifact=joint_tiny"], "artifact=joint_tiny is none of those that this"),
        (["init=nothing"], "no artifact 'nothing'"),
        (["target.dtype=half"], "target.dtype=half; allowed: auto, float64, float32, bfloat16, float16"),
        (["target.device=cudaa"], "target.device=cudaa; allowed: auto, cpu, cuda, cuda:0, ..."),
        (["target.device=cuda:1"], "trainer.accelerator=cpu and trainer.devices say; leave it out"),
        (["target.fused=maybe"], "target.fused=maybe; allowed: auto, true, false"),
        (["trainer.precision=foo"], "trainer.precision=foo; allowed: auto, bf16-mixed, 32-true"),
        (["trainer.accelerator=tpu"], "trainer.accelerator=tpu; allowed: auto, cpu, cuda, gpu"),
    ],
)
def test_all_jobs_are_checked_before_the_first_begins(
    words: list[str], says: str, tmp_path: Path, run: Run
) -> None:
    recipe = [] if words[0].startswith("+recipe=") else ["+recipe=quickstart"]
    done = run(*recipe, *words)
    assert done.returncode == 1 and says in done.stderr
    assert all(line.startswith("longtrain: error: ") for line in done.stderr.splitlines())
    assert not done.stdout and not list(tmp_path.iterdir())


def test_a_command_composes_once_and_reads_the_methods_that_it_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run
) -> None:
    composed = []
    compose = Hydra.compose_config

    def counted(self: Hydra, *given: object, **named: object) -> object:
        composed.append(given)
        return compose(self, *given, **named)

    monkeypatch.setattr(Hydra, "compose_config", counted)
    run("+recipe=quickstart", "optim.lr=-1")
    assert len(composed) == 1
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [{override /method: eagle3}]\n"
        "hydra: {mode: MULTIRUN, sweeper: {params: {optim.lr: '-1,-2'}}}\n"
    )
    done = run("train", "--config-dir", str(tmp_path), "+recipe=mine", "target=tiny")
    said = done.stderr  # the file itself asks for a sweep
    assert "optim.lr=-1; allowed" in said and "optim.lr=-2; allowed" in said
    assert "runs/mine_0" in done.stdout and "runs/mine_1" in done.stdout
    names = [f"longtrain.methods.{name}.config" for name in ("longspec", "kvzap")]
    assert loaded(["plan", "target=tiny", "gpu=FOO"], "numpy", cwd=tmp_path) == "[]"
    wrong = (
        ["eval", "target=tiny"],
        ["eval", "suite=needle", "suite.text=no", "target=tiny"],
        ["bench", "suite=engine", "lengths=x", "target=tiny"],
    )
    done = alone(*wrong, names=("torch",), cwd=tmp_path)
    assert done.stdout.splitlines() == ["[]"] * 3 and done.stderr.count("longtrain: error: ") == 3
    assert loaded(["+recipe=quickstart", "optim.lr=-1"], *names, cwd=tmp_path) == str(names[:1])


@pytest.mark.parametrize("word", ["nan", "1e3", "007", "1_000", "1.5", "inf", "True"])
def test_names_are_text_however_they_look(word: str, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    seen: list[tuple[object, object]] = []
    fake(monkeypatch, bench=lambda cfg: seen.append((cfg.name, cfg.values["artifact"])))
    for typed in (word, f"'{word}'"):
        done = run("bench", "target=tiny", f"name={typed}", f"artifact=[a1, {typed},b]", "quiet=true")
        assert done.returncode == 0, done.stderr
    assert seen == 2 * [(word, ["a1", word, "b"])]
    assert f"no artifact '{word}'" in run("inspect", word).stderr
    assert f"unknown recipe '{word}'" in run("train", f"+recipe={word}").stderr


@pytest.mark.parametrize("key", ["name", "home", "run_dir"])
def test_a_name_that_must_be_there_is_not_null(key: str, run: Run) -> None:
    done = run("+recipe=quickstart", f"{key}=null")
    assert done.returncode == 1 and done.stderr.startswith(f"longtrain: error: {key}=null; allowed: ")
    assert len(done.stderr.splitlines()) == 1


def test_what_is_missing_names_a_command_that_serves(run: Run) -> None:
    said = run("eval", "+recipe=quickstart", "name=ec", "suite.prompts=2").stderr
    assert "make it: longtrain job=[train,export] +recipe=quickstart name=ec, or" in said
    again = run("job=[train,export]", "+recipe=quickstart", "name=ec", "dry_run=true")
    assert again.returncode == 0, again.stderr
    assert again.stderr == (
        "dry run of train, export: no error in what is checked before work begins; "
        "GPUs, memory and the content of data are checked later\n"
    )


def fake(monkeypatch: pytest.MonkeyPatch, **does: Callable[..., None]) -> None:
    """Jobs that do what is given instead of their work."""
    for job, run in does.items():
        monkeypatch.setitem(sys.modules, f"tests_fake_{job}", type("Module", (), {"run": staticmethod(run)}))
        monkeypatch.setitem(JOBS, job, (f"tests_fake_{job}", ""))


def test_eval_takes_what_the_same_command_exported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run
) -> None:
    seen: list[str] = []

    def export(cfg: object) -> None:
        (tmp_path / "checkpoints" / "mine").mkdir(parents=True)
        (tmp_path / "checkpoints" / "mine" / "longtrain.json").write_text("{}")

    fake(
        monkeypatch,
        train=lambda cfg: None,
        export=export,
        eval=lambda cfg: seen.append(cfg.values["artifact"]),
    )
    words = ["job=[train,export,eval]", "target=tiny", "method=longspec", "data=excerpt", "name=mine"]
    done = run(*words, "quiet=true")
    assert done.returncode == 0, done.stderr
    assert seen == ["checkpoints/mine"]


@pytest.mark.parametrize("how", ["error", "interrupt"])
def test_a_job_that_ends_early_says_which_are_done(
    how: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    def ends(cfg: object) -> None:
        raise KeyboardInterrupt if how == "interrupt" else ConfigError("no such thing")

    fake(monkeypatch, prepare=lambda cfg: None, train=lambda cfg: None, bench=ends)
    words = ["target=tiny", "method=longspec", "data=excerpt", "quiet=true"]
    done = run("job=prepare,train,bench", *words)
    said = done.stderr.strip().splitlines()
    if how == "interrupt":
        assert done.returncode == 130 and len(said) == 1
        assert said[0].startswith(
            "longtrain: bench was interrupted after prepare, train, of which all is kept; "
        )
    else:
        assert done.returncode == 1 and said[1] == "longtrain: error: no such thing"
        assert said[0].startswith("longtrain: bench failed after prepare, train, of which all is kept; ")
    assert "after" not in run("job=[bench,train]", *words).stderr  # nothing was done before


def test_what_a_later_job_checks_is_checked_before_the_first(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    def refuse(cfg: object) -> None:
        raise ConfigError("not with this suite")

    done: list[str] = []
    fake(monkeypatch, train=lambda cfg: done.append("train"), bench=lambda cfg: done.append("bench"))
    monkeypatch.setattr(sys.modules["tests_fake_bench"], "check", staticmethod(refuse), raising=False)
    words = ["target=tiny", "method=longspec", "data=excerpt", "quiet=true"]
    assert "not with this suite" in run("job=train,bench", *words).stderr and not done


def test_a_machine_without_a_gpu_is_told_before_work_and_a_target_may_be_fetched(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    done: list[str] = []
    fake(monkeypatch, prepare=lambda cfg: done.append("prepare"))
    monkeypatch.setattr("longtrain.jobs.train.run", lambda cfg: done.append("train"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ["target.path=no/such", "method=longspec", "data=excerpt", "trainer=one_gpu"]
    said = run("job=[prepare,train]", *words).stderr
    assert "trainer.accelerator=cuda, and torch sees no CUDA device here" in said and not done
    assert len(said.splitlines()) == 1
    assert "no such model" not in run("job=[prepare,train]", *words, "trainer=cpu", "quiet=true").stderr
    assert done == ["prepare", "train"]


@pytest.mark.corners
@pytest.mark.parametrize("raised", ["itself", "as another error"])
@pytest.mark.parametrize("job", ["train", "eval"])
def test_ctrl_c_ends_with_130_and_says_what_is_kept(
    job: str, raised: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    def interrupted(cfg: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if raised == "itself":
                raise
            raise RuntimeError("Error calling __set_name__ on 'Field'") from None  # as an import may end

    fake(monkeypatch, **{job: interrupted})
    done = run(job, "+recipe=quickstart", "artifact=null", "quiet=true")
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert f"{job} was interrupted" in done.stderr and "the same command goes on" in done.stderr
    assert "runs/quickstart" in done.stderr
    assert set(KEPT) == set(JOBS)


def test_ctrl_c_before_a_job_begins(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def interrupted(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "mount", interrupted)
    done = run("train", "+recipe=quickstart")
    assert done.returncode == 130 and "nothing was done" in done.stderr


def test_ctrl_c_that_a_library_would_turn_into_another_error(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom longtrain import cli\nsys.argv = ['longtrain', 'train']\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored behind a shell's &\n"
        "def mount(words):\n"
        "    try: os.kill(os.getpid(), signal.SIGINT)\n"
        "    except BaseException: raise AttributeError('no such attribute') from None\n"
        "cli.mount = mount\ncli.main()"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", NOTHING_DONE)


def test_a_reader_that_is_gone_is_no_error(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "longtrain", "train", "--help"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=env)
    os.close(writer)
    assert done.returncode == 141 and done.stderr == ""


def test_a_reader_that_goes_while_a_job_runs_is_no_error(tmp_path: Path) -> None:
    """`longtrain generate ... | head -1`: the reader leaves after the first line."""
    words = [sys.executable, "-m", "longtrain", "generate", "target=tiny", "prompt=Once upon a time"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    with subprocess.Popen(
        [*words, "decode.max_new_tokens=2000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=env,
    ) as job:
        assert job.stdout is not None and job.stderr is not None
        job.stdout.read(1)
        job.stdout.close()
        said = job.stderr.read()
    assert (job.returncode, said) == (141, "")


def test_another_broken_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def broken(cfg: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    fake(monkeypatch, plan=broken)
    done = run("plan", "target=tiny", "quiet=true")
    assert done.returncode == 1 and "BrokenPipeError" in done.stderr


def test_a_home_that_cannot_be_written(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").write_text("")
    done = run("+recipe=quickstart", f"home={tmp_path}/file/below")
    assert done.returncode == 1 and "cannot be written to" in done.stderr and "home=FOLDER" in done.stderr
    done = run("eval", "suite=smoke", "target=tiny", "home=/proc/nothing")  # root may write there, they say
    assert done.returncode == 1 and "home=/proc/nothing cannot be written to (/proc: " in done.stderr
    for name in ("tiny_longspec", "tiny"):  # the latter is the bundled target
        assert run("inspect", name, f"home={tmp_path}/file/below", "dry_run=true").returncode == 0
    said = explain(PermissionError(13, "Permission denied", "/x/y"))
    assert said.startswith("/x/y: Permission denied; outputs go below home=FOLDER")


def test_threads_wait_asleep_and_no_more_than_granted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    (tmp_path / "all").write_text("max 100000\n")
    assert cli.granted_cores(tmp_path / "cpu.max") == 2
    assert cli.granted_cores(tmp_path / "all") is None and cli.granted_cores(tmp_path / "none") is None
    monkeypatch.setattr(cli, "granted_cores", lambda limit: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    cli.quiet_threads()
    assert (os.environ["GOMP_SPINCOUNT"], os.environ["OMP_NUM_THREADS"]) == ("10000", "1")


def test_a_recipe_of_ones_own_has_its_files_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run
) -> None:
    folder = tmp_path / "conf" / "recipe"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "# @package _global_\n# What I try\ndefaults:\n  - override /target: tiny\n  - _self_\nseed: 3\n"
    )
    seen: list[tuple[str, str, int]] = []
    fake(monkeypatch, plan=lambda cfg: seen.append((cfg.name, cfg.values["run_dir"], cfg.seed)))
    done = run("plan", "--config-dir", str(tmp_path / "conf"), "+recipe=mine", "quiet=true")
    assert done.returncode == 0, done.stderr
    (folder / "mine.yaml").write_bytes(b"\xef\xbb\xbf" + (folder / "mine.yaml").read_bytes())
    done = run("plan", "--config-dir", str(tmp_path / "conf"), "+recipe=mine", "quiet=true")
    assert done.returncode == 0, done.stderr
    assert seen == [("mine", "./runs/mine", 3)] * 2, "a byte order mark is no part of the file"
    assert "mine " in run("recipes", "--config-dir", str(tmp_path / "conf")).stdout
    assert "mine " in run("recipes", f"--config-dir={tmp_path / 'conf'}").stdout
    assert "your own: --config-dir FOLDER" in run("plan", "+recipe=mine").stderr
    wrong = run("plan", "--config-dir", str(tmp_path / "conf"), "+recipe=mine", "target.pth=x")
    assert "unknown key 'target.pth'; did you mean target.path?" in wrong.stderr
    shutil.copy(asset_dir("recipes") / "quickstart.yaml", folder / "copied.yaml")
    (folder / "odd.yaml").write_text("# @package _global_\ndefaults:\n  - override /trget: tiny\n")
    odd = run("plan", "--config-dir", str(tmp_path / "conf"), "+recipe=odd")
    assert odd.stderr == (
        "longtrain: error: In 'recipe/odd': Could not override 'trget'. No match in the defaults list.\n"
    )
    copied = run("plan", "--config-dir", str(tmp_path / "conf"), "+recipe=copied")
    assert "copied.yaml has no line '# @package _global_'; put it above all others" in copied.stderr


@pytest.mark.parametrize(("suite", "kept"), [("retrieval", False), ("perplexity", True)])
def test_a_recipe_leaves_out_what_it_says_of_another_suite(suite: str, kept: bool, run: Run) -> None:
    """Its keys of the perplexity suite do not reach a suite that knows none of them; shared ones do."""
    done = run("config", "eval", "+recipe=specontext_tiny", f"suite={suite}")
    shown = OmegaConf.create(done.stdout)
    assert ("stride" in shown.suite) is kept and shown.suite.budgets == [128, 256]


@pytest.mark.parametrize(
    ("words", "name", "data"),
    [
        (
            ["target=tiny", "method=longspec", "data=text", "data.text=me/it.txt"],
            "longspec_tiny",
            "text_me_it",
        ),
        (["target.path=models/mine", "data=text", "data.text=it", "data.name=x"], "mine", "x"),
        (["target=tiny", "artifact=[checkpoints/a,b]"], "a_b_tiny", None),
        (["target=tiny", "name=run"], "run", None),
        (["+recipe=quickstart"], "quickstart", "excerpt"),
        ([], "run", None),
    ],
)
def test_what_a_run_and_its_data_are_called(
    words: list[str], name: str, data: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    seen: list[tuple[str, str | None]] = []
    fake(monkeypatch, bench=lambda cfg: seen.append((cfg.name, cfg.data_values.get("name"))))
    done = run("bench", *words, "quiet=true")
    assert done.returncode == 0, done.stderr
    assert seen == [(name, data)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["eval", "suite=needle", "suite.prompts=0"], "suite.prompts=0; allowed: a whole number"),
        (["eval", "suite=acceptance", "method=quantspec", "suite.kinds=3"], "suite.kinds=3; allowed"),
        (["train", "method=specontext", "method.sets=99", "data=excerpt"], "method.sets=99; target tiny"),
        (["train", "method=eagle3", "method.n_heads=7", "data=excerpt"], "method.n_heads=7 does not divide"),
    ],
)
def test_a_dry_run_reads_the_suite_and_builds_the_module(words: list[str], says: str, run: Run) -> None:
    done = run(*words, "target=tiny", "dry_run=true")
    assert done.returncode == 1 and says in done.stderr


def test_a_dry_run_says_where_a_run_would_lack_its_gpu(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    library = ctypes.CDLL

    def none(name: str | None, *args: object, **keys: object) -> ctypes.CDLL:
        if name == "libcuda.so.1":
            raise OSError(name)
        return library(name, *args, **keys)  # type: ignore[arg-type]

    monkeypatch.setattr("longtrain.prompt.checks.ctypes.CDLL", none)
    done = run("train", "+recipe=longspec_small", "target=tiny", "dry_run=true")
    assert done.returncode == 0 and "a run would be refused: trainer.accelerator=cuda" in done.stderr


def test_method_keys_beside_an_artifact_are_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run
) -> None:
    folder = tmp_path / "checkpoints" / "it"
    folder.mkdir(parents=True)
    (folder / "longtrain.json").write_text('{"method": "longspec", "config": {"window": 64}}')
    fake(monkeypatch, generate=lambda cfg: None, eval=lambda cfg: None)
    monkeypatch.setattr("longtrain.jobs.generate.check", lambda cfg: None)
    words = ["target=tiny", "method=longspec", "artifact=it", "quiet=true"]
    assert run("generate", *words, "method.window=64").returncode == 0
    done = run("generate", *words, "method.window=32")
    assert done.returncode == 1
    assert "method.window=32 is typed, and artifact it was exported with 64; leave it out" in done.stderr
    shipped = ["target=tiny", "method=longspec", "artifact=tiny_longspec", "quiet=true", "method.window=77"]
    assert "and artifact tiny_longspec was exported with" in run("generate", *shipped).stderr
    (folder / "longtrain.json").write_text("[" * 100_000)  # whoever loads it says so
    assert run("generate", *words, "method.window=32").returncode == 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a/b", "is a place in the artifact"),
        ("c", "is a file"),
        ("d", "it holds thesis.tex"),
    ],
)
def test_a_place_where_nothing_can_be_exported_is_told_before_training(
    name: str, says: str, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "checkpoints/a").mkdir(parents=True)
    (tmp_path / "checkpoints/a/longtrain.json").write_text("{}")
    (tmp_path / "checkpoints/c").write_text("")
    (tmp_path / "checkpoints/d").mkdir()
    (tmp_path / "checkpoints/d/thesis.tex").write_text("years of work")
    done = run("train,export", "+recipe=longspec_tiny", f"name={name}", f"home={tmp_path}", "dry_run=true")
    assert done.returncode == 1 and says in done.stderr


def test_a_member_of_joint_training_replaces_nothing_else_either(tmp_path: Path, run: Run) -> None:
    (tmp_path / "checkpoints/x/lookaheadkv").mkdir(parents=True)
    (tmp_path / "checkpoints/x/lookaheadkv/thesis.tex").write_text("years of work")
    done = run("train,export", "+recipe=joint_tiny", "name=x", f"home={tmp_path}", "dry_run=true")
    assert done.returncode == 1 and "lookaheadkv exists and is not replaced by an artifact" in done.stderr


def test_a_name_that_is_being_trained_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    with lock(tmp_path / "runs/x/.train.lock"):
        words = ["train", "+recipe=longspec_tiny", "name=x", f"home={tmp_path}"]
        done = alone(words, names=("torch",), cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "name=x is being trained by another process" in done.stderr
    assert [path.name for path in (tmp_path / "runs/x").iterdir()] == [".train.lock"]
