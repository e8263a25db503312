"""Dumps in the layouts of other trainers' public code, written here as that code writes them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from feature_rows import BOUNDS, positions
from safetensors.torch import save_file

from longtrain.errors import ConfigError, DataError, TargetMismatchError
from longtrain.features import dumps
from longtrain.features.forms import Form
from longtrain.features.settings import FeatureSettings
from longtrain.features.shards import FeatureFiles
from longtrain.jobs.features import stored
from longtrain.targets.step import OutputRequest

WANT = OutputRequest("none", hidden=(0, 1, -1))
"""Of two layers: the first, the last before the final norm, and the LM head's input."""


@pytest.fixture
def states(target, batch):
    """One document after another: (ids, mask, both layers' outputs, the head's input)."""
    step = target.packed(batch.ids_T, positions(BOUNDS), BOUNDS, WANT)
    found = []
    for a, b in pairwise(BOUNDS[:4]):
        parts = (step.hidden[layer][a:b].clone() for layer in (0, 1, -1))
        found.append((batch.ids_T[a:b].clone(), batch.loss_mask_T[a:b].long(), *parts))
    return found


def specforge(folder, states):
    for number, (ids, mask, low, _, head) in enumerate(states):
        path = folder / "rows_0-5000" / f"data_{number}.ckpt"
        path.parent.mkdir(exist_ok=True, parents=True)
        aux = torch.cat([low, low], -1)[None]
        torch.save(
            {"input_ids": ids, "loss_mask": mask, "hidden_state": head[None], "aux_hidden_state": aux}, path
        )


def speculators(folder, states):
    folder.mkdir()
    for number, (ids, mask, low, last, _) in enumerate(states):
        torch.save(
            {"input_ids": ids, "loss_mask": mask, "hidden_states": [low, last]}, folder / f"data_{number}.pt"
        )


def newer(folder, states):
    folder.mkdir()
    for number, (ids, _, low, last, _) in enumerate(states):
        both = torch.stack([low, last], 1)
        save_file({"token_ids": ids, "hidden_states": both}, folder / f"hs_{number}.safetensors")


@pytest.mark.parametrize(("write", "layers"), [(specforge, (0, 0)), (speculators, (0,)), (newer, (0,))])
def test_a_dump_serves_as_features(tmp_path, target, batch, states, ask, write, layers):
    write(tmp_path / "dump", states)
    found = list(dumps.documents(tmp_path / "dump"))
    assert [one.ids_T.tolist() for one in found] == [ids.tolist() for ids, *_ in states]
    if write is not newer:
        assert [one.labels_T.tolist() for one in found] == [mask.bool().tolist() for _, mask, *_ in states]
    features = FeatureFiles(tmp_path / "f")
    assert dumps.take(tmp_path / "dump", features, target, form=Form(), layers=layers) == BOUNDS[3]
    features.close()
    outputs = OutputRequest("none", hidden=(*layers, -1))
    read = ask(target, batch, compute=False, outputs=outputs)
    truth = target.packed(batch.ids_T, positions(BOUNDS), BOUNDS, WANT)
    assert torch.equal(read.hidden[0][: BOUNDS[3]], truth.hidden[0][: BOUNDS[3]])
    torch.testing.assert_close(
        read.hidden[-1][: BOUNDS[3]], truth.hidden[-1][: BOUNDS[3]], rtol=0.01, atol=0.01
    )


def test_a_run_that_fills_takes_a_dump_in_once(tmp_path, target, batch, states):
    specforge(tmp_path / "dump", states)
    words = {"folder": str(tmp_path / "f"), "dump": str(tmp_path / "dump"), "dump_layers": (0, 0)}
    for _ in range(2):
        kept = stored(FeatureSettings(mode="fill", **words), target, data=("rows", "of these"))
        assert len(kept.shards) == len(states) and kept.shards.tokens() == BOUNDS[3]
        kept.close()
    with pytest.raises(ConfigError, match=r"features.dump=.*; allowed: null, or a folder with"):
        FeatureSettings(mode="offline", **words)


def test_what_is_no_dump_is_refused_in_a_line(tmp_path, target, states):
    with pytest.raises(DataError, match=r"holds no dumped hidden states"):
        list(dumps.documents(tmp_path))
    features = FeatureFiles(tmp_path / "f")
    ids, mask, low, last, head = states[0]

    class Runs:
        def __reduce__(self):
            return print, ("this ran",)

    cases = {
        "code": (
            {"input_ids": Runs()},
            DataError,
            r"data_0.pt is damaged, or no dump .*holds more than tensors",
        ),
        "other": ({"ids": ids}, DataError, r"data_0.pt is damaged.*KeyError"),
        "short": (
            {"input_ids": ids[1:], "loss_mask": mask, "hidden_states": [low, last]},
            DataError,
            r"tokens",
        ),
        "layers": (
            {"input_ids": ids, "loss_mask": mask, "hidden_states": [low, low, last]},
            DataError,
            r"holds 2 layers",
        ),
        "size": (
            {"input_ids": ids, "loss_mask": mask, "hidden_states": [head[:, :9], head[:, :9]]},
            TargetMismatchError,
            r"size 9, and target",
        ),
        "nan": (
            {"input_ids": ids, "loss_mask": mask, "hidden_states": [low, last * torch.nan]},
            DataError,
            r"not finite",
        ),
        "ids": (
            {"input_ids": ids + 97, "loss_mask": mask, "hidden_states": [low, last]},
            DataError,
            r"outside the vocabulary",
        ),
    }
    for name, (values, kind, message) in cases.items():
        (tmp_path / name).mkdir()
        torch.save(values, tmp_path / name / "data_0.pt")
        with pytest.raises(kind, match=message) as error:
            dumps.take(tmp_path / name, features, target, form=Form(), layers=(0,))
        assert "\n" not in str(error.value)
    assert len(features) == 0
