"""`features=engine:FOLDER`: EAGLE-3 on states of an engine is EAGLE-3 trained online, to the last bit."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from byte_tokens import byte_tokenizer
from engine_files import write_states
from helpers import token_ids, without_layers
from transformers import AutoConfig, AutoModelForCausalLM

from longtrain.artifact import Artifact
from longtrain.decoding.engine import Engine
from longtrain.errors import ArtifactError, ConfigError, DataError
from longtrain.jobs import export, prepare, train
from longtrain.methods.eagle3.objective import Eagle3Objective
from longtrain.targets.loading import load_target
from longtrain.targets.model import Target
from longtrain.targets.shapes import SHAPES
from longtrain.training import table

LENGTHS = (32, 96, 64, 48, 160, 32, 80, 112, 64, 48)
"""Multiples of 16 rows: a CPU's matrix products of them have the same bits wherever a document lies."""
LAYER_IDS = (1, 2, 3, 4)
"""What vLLM is asked for: the layers that EAGLE-3 reads of a target of 4, and the last one."""
EAGLE3 = ("method=eagle3", "method.depths=3", "method.draft_vocab_size=64")
DSPARK = ("method=dspark", "method.block_size=4", "method.mask_token=7")
STAGES = "data.stages=[{epochs: 3, sequence_tokens: 256, doc_tokens: 256, recut: false}]"


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    torch.manual_seed(0)
    keys = {**SHAPES["llama_micro"], "vocab_size": 256, "num_hidden_layers": 4, "eos_token_id": None}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys), dtype=torch.float32).save_pretrained(
        folder
    )
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows():
    """Token ids of documents; the second half of each is labels."""
    return token_ids(*LENGTHS, vocab=256)


@pytest.fixture
def states(tmp_path, four_layers, rows):
    write_states(tmp_path / "states", load_target(four_layers), rows, LAYER_IDS)
    return tmp_path / "states"


@pytest.fixture
def words(composed, tmp_path, rows, four_layers):
    """`words(job, name, *overrides)`: the configuration of a job of EAGLE-3 on these rows."""
    with (tmp_path / "rows.jsonl").open("w") as file:
        for ids in rows:
            mask = [int(at >= len(ids) // 2) for at in range(len(ids))]
            file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")

    data = [
        "data=text",
        f"data.sources=[{{tokenised: {tmp_path}/rows.jsonl, kind: text}}]",
        "data.min_doc_tokens=8",
        "data.max_doc_tokens=256",
        "data.val_fraction=0.3",
        "data.val_sequences=1",
        STAGES,
    ]
    training = [
        "trainer=cpu",
        "trainer.val_every=2",
        "callbacks.progress=false",
        "callbacks.curves=false",
        f"features.folder={tmp_path}/states",
    ]

    def make(job, name, *overrides, method=EAGLE3):
        only = {"train": [*method, *data, *training], "prepare": data, "export": []}[job]
        return composed(job, f"target.path={four_layers}", f"name={name}", "quiet=true", *only, *overrides)

    return make


@pytest.fixture
def losses(words, tmp_path):
    """`losses(name, *overrides)`: trains, and gives all losses as they were written."""

    def go(name, *overrides, method=EAGLE3):
        train.run(words("train", name, *overrides, method=method))
        rows = table.read(tmp_path / "runs" / name / "train" / "metrics.csv")
        return [(row["train/loss"], row["val/loss"]) for row in rows]

    return go


def test_losses_are_those_of_training_online_to_the_last_bit(losses, states, monkeypatch):
    online = losses("online")
    monkeypatch.setattr(Target, "_run", lambda *_: pytest.fail("the target ran"))
    engine = losses("engine", "features=engine")
    assert engine == online and len(online) >= 6
    assert any(val for _, val in online)


def test_a_run_cut_short_goes_on_bit_for_bit_and_from_no_other_source(losses, states, monkeypatch):
    whole, original, calls = losses("whole", "features=engine"), Eagle3Objective.forward, []

    def forward(self, batch):
        calls.append(batch)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(Eagle3Objective, "forward", forward)
        with pytest.raises(SystemExit):
            losses("cut", "features=engine")
    with pytest.raises(ConfigError, match=r"changed \(features: features=engine -> None\)"):
        losses("cut")
    assert losses("cut", "features=engine") == whole


def test_it_is_exported_without_the_target_and_attached_to_it(
    losses, words, states, four_layers, tmp_path, monkeypatch
):
    """In our own format and in those of engines."""
    losses("one", "features=engine")
    forms = ("speculators", "flat")
    with monkeypatch.context() as patched:
        patched.setattr(Target, "_run", lambda *_: pytest.fail("the target ran"))
        for form in forms:
            export.run(words("export", "one", f"format={form}"))
    target = load_target(four_layers)
    artifact = Artifact.load(tmp_path / "checkpoints/one")
    assert artifact.verified and len(artifact.verification.checks) == 1
    assert {*artifact.golden.inputs} == {"hidden_0", "hidden_1", "hidden_2", "hidden_-1"}
    assert len(artifact.golden.measure(artifact._parts, target)) == 1 + 4 + 1
    prompt = token_ids(40, vocab=256, seed=3)
    plain = Engine(target).generate(prompt, max_new_tokens=24, ignore_eos=True)
    others = [Artifact.load(tmp_path / f"checkpoints/one-{form}", unverified=True) for form in forms]
    for one in (artifact, *others):
        drafted = Engine(target, one.attach(target))
        assert drafted.generate(prompt, max_new_tokens=24, ignore_eos=True).tokens == plain.tokens


def test_a_draft_of_the_ends_of_a_target_with_windows_attaches_to_the_whole(losses, words, rows, tmp_path):
    """Gemma 3 without the files of its layers: windows, two rotary tables, GELU; then all of its files."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    keys = {"vocab_size": 256, "num_hidden_layers": 4, "layer_types": kinds, "eos_token_id": None}
    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**SHAPES["gemma3_micro"], **keys}), dtype=torch.float32
    )
    made.save_pretrained(tmp_path / "whole")
    byte_tokenizer().save_pretrained(tmp_path / "whole")
    part, target = without_layers(tmp_path / "whole", tmp_path / "part"), load_target(tmp_path / "whole")
    write_states(tmp_path / "states", target, rows, LAYER_IDS)
    losses("one", f"target.path={part}", "features=engine", "method.start_mlp=random")
    export.run(words("export", "one", f"target.path={part}"))
    artifact, prompt = Artifact.load(tmp_path / "checkpoints/one"), token_ids(40, vocab=256, seed=3)
    plain = Engine(target).generate(prompt, max_new_tokens=24, ignore_eos=True)
    drafted = Engine(target, artifact.attach(target))
    assert drafted.generate(prompt, max_new_tokens=24, ignore_eos=True).tokens == plain.tokens
    assert artifact.golden.measure(artifact._parts, target)


def test_states_that_were_moved_are_found_where_the_export_is_told(losses, words, states, tmp_path):
    losses("one", "features=engine", "trainer.max_steps=1")
    states.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"states holds no hidden states .*pass features=engine:FOLDER"):
        export.run(words("export", "one"))
    export.run(words("export", "one", "features=engine", f"features.folder={tmp_path}/moved"))
    assert Artifact.load(tmp_path / "checkpoints/one").verified


def test_states_of_other_layers_are_found_once_the_target_is_at_hand(
    losses, words, rows, four_layers, tmp_path
):
    """An engine that was given indices from 0, [1,2], and the last layer: no file can show that."""
    write_states(tmp_path / "states", load_target(four_layers), rows, (1, 2, 4))
    losses("one", "features=engine", "method.layers=[1,2]")
    export.run(words("export", "one"))
    with pytest.raises(ArtifactError, match=r"golden outputs are not reproduced by the target's hidden_[12]"):
        Artifact.load(tmp_path / "checkpoints/one").attach(load_target(four_layers))


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        (EAGLE3, "float32"),
        (DSPARK, "bfloat16"),
        pytest.param(EAGLE3, "bfloat16", marks=pytest.mark.slow),
        pytest.param(DSPARK, "float32", marks=pytest.mark.slow),
    ],
)
def test_a_last_state_of_another_layer_is_found_once_the_target_is_at_hand(
    losses, words, rows, four_layers, tmp_path, method, dtype
):
    """An engine that was given [1,2,3] in place of [1,2,4]: the draft reads the right layers."""
    target, reads = load_target(four_layers, dtype=dtype), (*method, "method.layers=[0,1]")
    said = r"are not reproduced by the target's hidden_-1: .*; it was trained on an engine's states: "
    for name, ids in (("right", (1, 2, 4)), ("wrong", (1, 2, 3))):
        write_states(tmp_path / "states", target, rows, ids)
        losses(name, "features=engine", "trainer.max_steps=2", f"target.dtype={dtype}", method=reads)
        export.run(words("export", name, f"target.dtype={dtype}"))
        artifact = Artifact.load(tmp_path / "checkpoints" / name)
        if name == "right":
            artifact.attach(target)
            continue
        with pytest.raises(ArtifactError, match=said) as error:
            artifact.attach(target)
        assert "\n" not in str(error.value)
        marked = Artifact.load(tmp_path / "checkpoints" / name, unverified=True)
        marked.attach(target)
        assert len(marked.verification.faults) == 1


def test_documents_that_the_engine_lacks_or_has_cut_are_named_before_the_first_step(
    losses, rows, four_layers, tmp_path
):
    target = load_target(four_layers)
    write_states(tmp_path / "states", target, [ids for ids in rows if len(ids) != 160], LAYER_IDS)
    said = r"lack 1 of 10 pieces of documents, the first of document \S+ \(160 tokens\)"
    with pytest.raises(DataError, match=rf"{said}; have the engine write them too, for these very token ids"):
        losses("one", "features=engine")
    write_states(tmp_path / "states", target, [rows[4][:150]], LAYER_IDS, name="cut-{}")
    with pytest.raises(
        DataError, match=rf"{said} \(cut-0.safetensors has 150 tokens .* the server cut"
    ) as error:
        losses("one", "features=engine")
    assert "\n" not in str(error.value) and not (tmp_path / "runs/one/train/config.yaml").exists()


def test_methods_that_read_keys_and_values_are_refused(losses, states):
    said = r"lack a pass of its setup \(hidden=-1 kv=3\); an engine writes hidden states of documents alone"
    with pytest.raises(DataError, match=said):
        losses("one", "features=engine", method=["method=longspec"])
    with pytest.raises(
        ConfigError, match="features=engine has hidden states alone, and this method reads more"
    ):
        losses("two", "features=engine", method=["method=longspec", "method.warm_start=false"])


def test_a_folder_without_states_is_refused_at_once(words):
    from longtrain.prompt.checks import check

    with pytest.raises(ConfigError, match="states holds no hidden states of an engine") as error:
        check([("train", words("train", "one", "features=engine"))])
    assert "\n" not in str(error.value)


def test_dspark_learns_from_an_engines_states_too(losses, states):
    small = [*DSPARK, "method.layers=[0,1,2]"]
    assert losses("engine", "features=engine", method=small) == losses("online", method=small)


def test_the_rows_that_prepare_writes_are_the_documents_that_training_reads(
    losses, words, four_layers, tmp_path, rows
):
    cut = "data.stages=[{epochs: 2, sequence_tokens: 128, doc_tokens: 64, recut: false}]"
    prepare.run(words("prepare", "one", cut, f"rows={tmp_path}/asked/rows.jsonl"))
    asked = [json.loads(line) for line in (tmp_path / "asked/rows.jsonl").read_text().splitlines()]
    assert not [file for file in (tmp_path / "asked").iterdir() if file.name != "rows.jsonl"]
    assert max(len(row["input_ids"]) for row in asked) == 64 and all(any(row["loss_mask"]) for row in asked)
    assert {tuple(row["input_ids"]) for row in asked} >= {tuple(ids) for ids in rows if len(ids) <= 64}
    write_states(
        tmp_path / "states", load_target(four_layers), [row["input_ids"] for row in asked], LAYER_IDS
    )
    assert losses("engine", "features=engine", cut) == losses("online", cut)
    again = "data.stages=[{epochs: 2, sequence_tokens: 128, doc_tokens: 64}]"
    with pytest.raises(ConfigError, match=r"cuts documents of up to 160 tokens .*; pass recut: false"):
        prepare.run(words("prepare", "one", again, f"rows={tmp_path}/rows.jsonl"))


@pytest.mark.parametrize(
    ("exported", "loaded"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")]
)
def test_states_in_bf16_allow_for_their_rounding_and_not_for_more(
    losses, words, rows, four_layers, tmp_path, exported, loaded
):
    half = load_target(four_layers, dtype="bfloat16")
    write_states(tmp_path / "states", half, rows, LAYER_IDS)
    losses("one", "features=engine", f"target.dtype={exported}", "trainer.max_steps=2")
    export.run(words("export", "one", f"target.dtype={exported}"))
    artifact = Artifact.load(tmp_path / "checkpoints/one")
    assert (
        artifact.verified and artifact.golden.dtype == "bfloat16" and {*artifact.golden.noise} == {"outputs"}
    )
    artifact.attach(load_target(four_layers, dtype=loaded))
    write_states(tmp_path / "states", half, rows, (0, 1, 2, 4))
    losses(
        "two",
        "features=engine",
        f"target.dtype={exported}",
        "trainer.max_steps=2",
        "features.layer_ids=[0,1,2,4]",
        "method.layers=[0,1]",
    )
    write_states(tmp_path / "states", half, rows, (0, 2, 3, 4))
    export.run(words("export", "two", f"target.dtype={exported}"))
    with pytest.raises(ArtifactError, match=r"the target's hidden_[01]"):
        Artifact.load(tmp_path / "checkpoints/two").attach(load_target(four_layers, dtype=loaded))
