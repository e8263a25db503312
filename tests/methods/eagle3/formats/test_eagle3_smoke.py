"""A folder tried on a text with its target: what was trained passes, and a better reading is named."""

from __future__ import annotations

import json

import pytest
import torch
from eagle3_folders import trained_draft

from longtrain.errors import ArtifactError
from longtrain.files import write_files
from longtrain.methods.draft_checks import heldout_tokens
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.formats import FORMATS
from longtrain.methods.eagle3.formats.smoke import DEPTHS, TOKENS
from longtrain.methods.eagle3.recursion import recursion
from longtrain.methods.rope import rotary_of
from longtrain.targets.step import OutputRequest


def learn(module, config, target):
    """Fit all of a draft to the target on the very text that it will be tried on: seconds of Adam."""
    ids = heldout_tokens(target, TOKENS)
    places = torch.arange(len(ids))
    with torch.no_grad():
        step = target.packed(ids, places, (0, len(ids)), OutputRequest("none", hidden=(*module.layers, -1)))
        best, embed = target.head(step.hidden[-1]).argmax(-1), target.embed(ids)
    rows, optim = len(ids) - DEPTHS - 1, torch.optim.Adam(module.parameters(), lr=5e-3)
    for _ in range(60):
        made = recursion(
            module,
            module.feature([step.hidden[layer][:rows] for layer in module.layers]),
            (embed[1 : rows + 1], embed[None, 2 : rows + 2]),
            rope=rotary_of(config, target.info),
            pos_T=places[:rows],
        )
        wanted = torch.stack([best[1 + depth : rows + 1 + depth] for depth in range(DEPTHS)])
        loss = torch.nn.functional.cross_entropy(made.logits_KRV.flatten(0, 1), wanted.flatten())
        optim.zero_grad()
        loss.backward()
        optim.step()
    return module


@pytest.fixture(scope="module")
def learned(target):
    config = Config(layers=[1, 2, 4], draft_vocab_size=0, fc_norm=True, norm_output=True)
    return learn(trained_draft(config, target.info), config, target), config


def test_what_was_trained_passes_and_other_readings_are_named(learned, target, tmp_path):
    module, config = learned
    write_files(
        tmp_path / "good", FORMATS.write("flat", module.state_dict(), config, target, {"step": 60}, "good")
    )
    said = FORMATS.verify(tmp_path / "good", target, None)
    assert any(line.startswith("on a text: predicts the target's likeliest token in") for line in said)

    config = json.loads((tmp_path / "good" / "config.json").read_text())
    del config["trained_by"]
    wrong = {
        "layer ids one higher": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "eagle_config": None},
        "norm_output=true": {"norm_output": False},
    }
    for reading, keys in wrong.items():
        path = tmp_path / reading.partition("=")[0].replace(" ", "_")
        files = {"model.safetensors": (tmp_path / "good" / "model.safetensors").read_bytes()}
        write_files(path, files | {"config.json": json.dumps(config | keys).encode()})
        with pytest.raises(ArtifactError, match=f"read with {reading} the draft predicts"):
            FORMATS.verify(path, target, None)
