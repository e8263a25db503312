"""Needle evaluation and bits per byte, on a random target with a tokenizer of bytes."""

import math
from pathlib import Path

import pytest
import torch

from longtrain.decoding.engine import Engine
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation import needle
from longtrain.evaluation.needle import Protocol, bits_per_byte, chat_ids, run
from longtrain.targets.bundle import LlamaShape, build_llama, save_bundle
from longtrain.targets.loading import load_target
from longtrain.targets.tokenizer import train_tokenizer

TEXT = "The sea was calm that day. A boat came in\nand the men went home. " * 60


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("target")
    train_tokenizer([TEXT + "special magic numbers mentioned in the provided text"], folder / "tok", size=300)
    shape = LlamaShape(300, 32, 1, 2, 1, 16, 32, max_positions=1024)
    save_bundle(build_llama(shape), folder / "tok", folder / "tiny")
    return load_target(folder / "tiny", dtype="float32")


def answering(monkeypatch: pytest.MonkeyPatch, target, answer) -> None:
    """Let the engine give `answer(prompt text)` instead of what the random model would say."""

    class Fixed(Engine):
        def generate(self, prompts, **keys):
            made = super().generate(prompts, **{**keys, "max_new_tokens": 1})
            texts = [answer(target.tokenizer.decode(prompt)) for prompt in prompts]
            made.tokens[:] = [target.tokenizer.encode(text) for text in texts]
            return made

    monkeypatch.setattr(needle, "Engine", Fixed)


def found(prompt: str) -> str:
    key = prompt.rpartition(" mentioned in")[0].rpartition(" for ")[2]
    return prompt.partition(f"for {key} is: ")[2][:7]


def test_right_answers_are_counted(target, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, target, lambda prompt: f"The number is {found(prompt)}.")
    cells = run(target, {"sea": TEXT}, Protocol((600, 700), (1, 2), prompts=5, batch=2))["cells"]
    assert [(c["length"], c["needles"]) for c in cells] == [(600, 1), (600, 2), (700, 1), (700, 2)]
    assert all(c["right"] == c["ran"] == 5 and c["exact"]["value"] == 1.0 for c in cells)
    assert all(0.5 < c["exact"]["low"] < 1 for c in cells)


def test_other_numbers_beside_the_right_one_are_wrong(target, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, target, lambda prompt: f"{found(prompt)}, 1234567")
    (cell,) = run(target, {"sea": TEXT}, Protocol((600,), (1,), prompts=4))["cells"]
    assert cell["right"] == 0 and cell["ran"] == 4 and len(cell["wrong"]) == 3


def test_prompts_that_cannot_be_run_are_counted(target) -> None:
    cells = run(target, {"sea": TEXT}, Protocol((300, 1020), (1, 8), prompts=2, max_new_tokens=8))["cells"]
    short = next(c for c in cells if c["length"] == 300 and c["needles"] == 8)
    assert short["dropped"] == {"too short for its needles": 2} and short["exact"]["value"] is None
    long = [c for c in cells if c["length"] == 1020]
    assert all(c["dropped"] == {"longer than the target's context": 2} for c in long)


def test_the_chat_marks_are_read_off_the_template(target) -> None:
    assert chat_ids(target.tokenizer).user == (1,) and chat_ids(target.tokenizer).assistant == (2,)


def test_bits_per_byte_is_that_of_one_forward_where_one_window_is_enough(target) -> None:
    text = TEXT[:700]
    ids_T = torch.tensor(target.tokenizer.encode(text))
    with torch.no_grad():
        hidden_TE = target.packed(ids_T, torch.arange(len(ids_T)), (0, len(ids_T))).hidden[-1]
        nats = torch.nn.functional.cross_entropy(target.head(hidden_TE[:-1]), ids_T[1:], reduction="sum")
    got = bits_per_byte(target, [text, text], window=1024)
    assert got["bytes"] == 1400 and got["tokens"] == 2 * (len(ids_T) - 1)
    assert got["bits_per_byte"] == pytest.approx(float(nats) / math.log(2) / 700, rel=1e-5)
    windows = bits_per_byte(target, [text], window=64, row_tokens=256)
    assert windows["tokens"] == len(ids_T) - 1


def test_nothing_to_measure_on_is_refused(target) -> None:
    with pytest.raises(DataError, match="no text"):
        run(target, {})
    with pytest.raises(DataError, match="no text"):
        bits_per_byte(target, [""])
    with pytest.raises(ConfigError, match="non-positive"):
        Protocol(prompts=0)
