"""A second tree draft, written by somebody else, is one folder: here `tests/methods/toy_draft`.

The folder is registered by its place alone; the jobs then train, export, load and run it as they are.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from longtrain import cli, methods
from longtrain.artifact import Artifact
from longtrain.assets import asset_dir
from longtrain.config import RunConfig
from longtrain.costs import decoding
from longtrain.costs.hardware import GPUS
from longtrain.costs.model import Sizes
from longtrain.decoding.engine import AUTO, Engine
from longtrain.decoding.roles import ChildChoice, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError
from longtrain.jobs import bench, export, generate, plan, train
from longtrain.targets.loading import load_target, random_target

HERE = Path(__file__).parent
PROMPT = "Once upon a time there was a fox who lived in a wood."


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(HERE)])


@pytest.fixture
def composed(registered, tmp_path):
    """`composed(job, *overrides)`: the configuration that the command line would make."""
    GlobalHydra.instance().clear()
    with pytest.MonkeyPatch.context() as before:
        before.setattr(methods, "__path__", [place for place in methods.__path__ if place != str(HERE)])
        cli.mount()
    cli.mount()
    with initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):

        def make(job, *overrides):
            common = ["target.path=tiny", "target.device=cpu", f"home={tmp_path}", "name=toy", "quiet=true"]
            return RunConfig.from_hydra(compose(job, overrides=[*common, *overrides]))

        yield make


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(6):
        (folder / f"story{number}.txt").write_text(f"{PROMPT} The fox had {number} friends. " * 30)
    return folder


def test_a_folder_elsewhere_is_a_method_once_its_place_is_on_the_path(registered):
    assert "toy_draft" in methods.names() and "longspec" in methods.names()
    assert methods.config_class("toy_draft")().width == 64
    assert methods.get("toy_draft").name == "toy_draft"


def test_a_method_that_comes_later_leaves_the_others_in_place(composed):
    assert composed("train", "method=toy_draft").method.settings.width == 64
    assert composed("train", "method=longspec", "method.window=64").method.settings.window == 64


def test_without_that_it_is_unknown():
    with pytest.raises(ConfigError, match="unknown method 'toy_draft'"):
        methods.get("toy_draft")


def test_it_trains_exports_loads_and_generates_through_the_jobs(composed, text, tmp_path, capsys):
    train.run(
        composed(
            "train",
            "method=toy_draft",
            "method.width=32",
            "data=text",
            f"data.text={text}",
            "data.stages=[{fraction: 1.0, sequence_tokens: 96, doc_tokens: 64}]",
            "data.min_doc_tokens=8",
            "data.val_fraction=0.2",
            "data.val_sequences=2",
            "trainer=cpu",
            "trainer.max_steps=4",
            "callbacks.progress=false",
            "optim.lr=3e-3",
        )
    )
    made = tmp_path / "checkpoints" / "toy"
    export.run(composed("export"))
    back = Artifact.load(made)
    assert back.method == "toy_draft" and back.config["width"] == 32 and back.golden is not None
    capsys.readouterr()

    def text_of(*more):
        words = [f"prompt='{PROMPT}'", "decode.max_new_tokens=16", *more]
        generate.run(composed("generate", *words))
        return capsys.readouterr()

    plain, _ = text_of("decode=autoregressive")
    for shape in ("[2,4,4]", "auto"):
        drafted, about = text_of(f"artifact={made}", f"decode.shape={shape}")
        assert drafted == plain, shape
        assert shape == "auto" or "accepted" in about, shape  # auto may find that drafting does not pay here


def test_plan_and_bench_ask_it_what_it_costs(composed, text, tmp_path, capsys):
    stage = "data.stages=[{steps: 3, sequence_tokens: 64, doc_tokens: 32}]"
    plan.run(composed("plan", "method=toy_draft", "data=text", f"data.text={text}", stage))
    said = capsys.readouterr().out
    assert "| 64 | 32 | 2 | 64 |" in said and "bench suite=training" in said
    keys = ("lengths=[32,64]", "suite.repeats=1", "suite.min_repeats=1")
    bench.run(composed("bench", "suite=training", "method=toy_draft", *keys))
    rows = json.loads((tmp_path / "runs" / "toy" / "bench" / "training.json").read_text())["rows"]
    width = 384 * 4  # the target that is named, in float32
    assert [row["inputs"]["hidden_bytes"] for row in rows] == [3 * 32 * width, 3 * 64 * width]
    assert all(row["draft"]["tokens_per_s"] > 0 for row in rows)


def test_the_engine_is_timed_with_it(composed, tmp_path):
    keys = ("suite.shape=llama_micro", "lengths=[24]", "suite.max_new_tokens=5", "suite.repeats=1")
    bench.run(composed("bench", "suite=engine", "method=toy_draft", *keys))
    (row,) = json.loads((tmp_path / "runs" / "toy" / "bench" / "engine.json").read_text())["rows"]
    assert row["same"] == 1.0 and row["draft"]["tau"] >= 1.0


def test_its_cycles_have_a_time(registered):
    spec, size = methods.get("toy_draft"), Sizes.of(random_target("llama_micro").info)
    served = decoding.Served(size, GPUS["H100"], 1, 2, 10**6)
    cost = spec.cost.cycle(spec.config(), size, (2, 2), 2)
    row = decoding.speculative(served, cost, decoding.plain(served, 1024), rate=0.9)
    assert 0 < row["draft_ms"] < row["verify_ms"] and row["own_share"] == 1


def test_it_learns_what_it_is_trained_on_and_then_is_accepted(registered):
    """Trained on one text of the bundled target's own, it drafts that text's next tokens."""
    from longtrain.data.packing.batch import Batch

    target, spec = load_target("tiny"), methods.get("toy_draft")
    prompt = target.require_tokenizer().encode(PROMPT)
    own = Engine(target).generate([prompt], max_new_tokens=48, ignore_eos=True).tokens[0]
    ids_T = torch.tensor(prompt + own)
    mask_T = torch.ones(len(ids_T), dtype=torch.bool)
    mask_T[0] = False
    batch = Batch(ids_T, (0, len(ids_T)), mask_T, seed=0, tokens_in_step=len(ids_T) - 1)
    torch.manual_seed(0)
    module = spec.build(spec.config(), target.info)
    objective = spec.objective(module, target, spec.config())
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(30):
        loss = objective(batch)
        optimizer.zero_grad()
        (loss.total / loss.tokens).backward()
        optimizer.step()
    engine = Engine(target, spec.attach(module.eval(), target, spec.config(), {}))
    found = engine.generate([prompt], max_new_tokens=48, ignore_eos=True, shape=TreeShape((4, 4)))
    assert found.tokens[0] == own
    assert found.stats.target_forwards < 40  # one prefill and 47 cycles would be plain decoding


@pytest.mark.parametrize("children", [ChildChoice.POINT, ChildChoice.IID])
def test_a_batch_decodes_as_without_it(registered, children):
    target, spec = random_target("llama_micro", dtype="float64"), methods.get("toy_draft")
    torch.manual_seed(1)
    parts = spec.attach(spec.build(spec.config(), target.info).double(), target, spec.config(), {})
    prompts = [[5, 9, 11, 40], [7, 3]]
    outputs = Engine(target).generate(prompts, max_new_tokens=9, ignore_eos=True).tokens
    for shape in (TreeShape((1, 1), children), TreeShape((2, 3, 2), children), AUTO):
        engine = Engine(target, parts)
        assert engine.generate(prompts, max_new_tokens=9, ignore_eos=True, shape=shape).tokens == outputs
    sampled = Sampling(temperature=0.8, seed=3)
    drafted = Engine(target, parts).generate(
        prompts, max_new_tokens=9, ignore_eos=True, sampling=sampled, shape=TreeShape((2, 2), children)
    )
    assert [len(row) for row in drafted.tokens] == [9, 9]
    with pytest.raises(ConfigError, match=r"the toy draft drafts by decode\.children"):
        parts.draft.check_shape(TreeShape((2,), ChildChoice.NO_REPLACE))
