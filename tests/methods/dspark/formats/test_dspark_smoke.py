"""A folder tried on a text with its target: what was trained passes, and a better reading is named."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from longtrain.errors import ArtifactError
from longtrain.files import write_files
from longtrain.methods.draft_checks import heldout_tokens
from longtrain.methods.dspark.formats import FORMATS
from longtrain.methods.dspark.formats.blocks import block_states
from longtrain.methods.dspark.formats.smoke import TOKENS
from longtrain.targets.step import OutputRequest


def learn(module, config, target, *, steps=65):
    """Fit all of a draft to the target on the very text that it will be tried on: seconds of Adam."""
    ids = heldout_tokens(target, TOKENS)
    pos = torch.arange(len(ids))
    with torch.no_grad():
        request = OutputRequest("none", hidden=(*module.read, -1))
        step = target.packed(ids, pos, (0, len(ids)), request)
        best = target.head(step.hidden[-1]).argmax(-1)
        states = torch.cat([step.hidden[layer] for layer in module.read], -1)
        head = target.head_weight.detach() if module.lm_head is None else module.lm_head.weight
    if module.draft_ids_K is not None:
        place_V = torch.full((target.info.vocab_size,), -100)
        place_V[module.draft_ids_K] = torch.arange(len(module.draft_ids_K))
        best = place_V[best]
    place = torch.arange(196, len(ids) - config.block_size)
    rows = module.mask_id.expand(len(place), config.rows).clone()
    rows[:, 0] = ids[place]
    embed, slots = target.embed(rows).detach(), place[:, None] + torch.arange(config.block_size)
    optim = torch.optim.Adam(module.parameters(), lr=5e-3)
    for _ in range(steps):
        hidden = block_states(module, config, target.info, states, pos, place, embed)
        logits = module.markov_head(hidden @ head.T, hidden, ids[slots])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), best[slots].flatten())
        optim.zero_grad()
        loss.backward()
        optim.step()
    return module.eval()


@pytest.fixture(scope="module")
def learned(target, trained_block_draft):
    module, config = trained_block_draft(n_layers=1, intermediate_size=40)
    return learn(module, config, target), config


def folder_of(path, keys, source):
    """A folder without record, with other keys."""
    config = json.loads((source / "config.json").read_text())
    config = {name: value for name, value in (config | keys).items() if value is not None}
    files = {"model.safetensors": (source / "model.safetensors").read_bytes()}
    write_files(path, files | {"config.json": json.dumps(config).encode()})
    return path


def test_what_was_trained_passes_and_other_readings_are_named(learned, target, tmp_path):
    module, config = learned
    good = tmp_path / "good"
    write_files(good, FORMATS.write("flat", module.state_dict(), config, target, {"step": 60}, "good"))
    said = FORMATS.verify(good, target, None)
    assert any(line.startswith("on a text: predicts the target's likeliest token in") for line in said)
    unsigned = {"trained_by": None, "dflash_config": None}
    wrong = {
        "layer ids one higher": {"target_layer_ids": [0, 2], "eagle_aux_hidden_state_layer_ids": [1, 3]},
        "layer ids one lower": {"target_layer_ids": [2, 4], "eagle_aux_hidden_state_layer_ids": [3, 5]},
        "sample_from_anchor=true": {"sample_from_anchor": False},
    }
    for index, (reading, keys) in enumerate(wrong.items()):
        path = folder_of(tmp_path / f"wrong{index}", unsigned | keys, good)
        with pytest.raises(ArtifactError, match=f"read with {reading} the draft predicts"):
            FORMATS.verify(path, target, None)


def test_other_markov_tables_are_named(learned, target, tmp_path):
    """Each is found by reading it the other way round."""
    module, config = learned
    good = tmp_path / "good"
    write_files(good, FORMATS.write("flat", module.state_dict(), config, target, {"step": 60}, "good"))
    tensors = load_file(good / "model.safetensors")
    first, second = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
    changes = {
        "exchanged Markov tables": {first: tensors[second], second: tensors[first]},
        "rows of markov_w1 one higher": {first: tensors[first].roll(1, 0)},
        "rows of markov_w2 one lower": {second: tensors[second].roll(-1, 0)},
    }
    for index, (reading, changed) in enumerate(changes.items()):
        path = folder_of(tmp_path / f"wrong{index}", {"trained_by": None, "dflash_config": None}, good)
        save_file(tensors | {k: v.contiguous() for k, v in changed.items()}, path / "model.safetensors")
        with pytest.raises(ArtifactError, match=f"read with {reading} the draft predicts"):
            FORMATS.verify(path, target, None)


def test_without_a_target_a_folder_of_others_says_what_was_not_tried(learned, target, tmp_path):
    module, config = learned
    good = tmp_path / "good"
    write_files(good, FORMATS.write("flat", module.state_dict(), config, target, {"step": 60}, "good"))
    path = folder_of(tmp_path / "other", {"trained_by": None, "dflash_config": None}, good)
    unchecked = "not tried on a text: layer ids, layout and Markov tables of a folder without a record are"
    assert any(line.startswith(unchecked) for line in FORMATS.verify(path, None, None))
    for folder, on in ((good, None), (path, target)):  # replayed golden blocks, and a text
        assert not any(line.startswith("not tried") for line in FORMATS.verify(folder, on, None))


def test_windows_that_engines_move_too_far_are_told(target, trained_block_draft, tmp_path):
    """Trained with all of a small window in every slot, which is served with less of it."""
    module, config = trained_block_draft(n_layers=1, windows=[5], intermediate_size=40)
    learn(module, config, target)
    path = tmp_path / "windows"
    write_files(path, FORMATS.write("flat", module.state_dict(), config, target, {"step": 60}, "windows"))
    with pytest.raises(ArtifactError, match=r"instead of .* with windows that move with the slot"):
        FORMATS.verify(path, target, None)


def test_windows_that_cost_nothing_are_told_as_well(learned, target, tmp_path):
    """Larger than the text, so that engines see the same."""
    module, config = learned
    config = dataclasses.replace(config, windows=[500])
    write_files(tmp_path / "x", FORMATS.write("flat", module.state_dict(), config, target, {}, "x"))
    lines = FORMATS.verify(tmp_path / "x", target, None)
    assert any("with windows that move with the slot, as engines serve them" in line for line in lines)


def test_a_vocabulary_of_the_drafts_own(target, trained_block_draft, tmp_path):
    """Its tokens are compared with the target's as such; a head whose rows are others' predicts nothing."""
    part = {"draft_vocab_size": 90, "objective": "lk_hybrid"}
    module, config = trained_block_draft(n_layers=1, intermediate_size=40, **part)
    learn(module, config, target)
    good = tmp_path / "good"
    files = FORMATS.write("speculators", module.state_dict(), config, target, {"step": 60}, "good")
    write_files(good, files)
    said = FORMATS.verify(good, target, None)
    (line,) = (line for line in said if line.startswith("on a text"))
    assert float(line.split("likeliest token in ")[1].split("%")[0]) > 60
    path = folder_of(tmp_path / "rolled", {"trained_by": None}, good)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"].roll(1, 0)}, path / "model.safetensors")
    with pytest.raises(ArtifactError, match="always drafting the commonest one gives"):
        FORMATS.verify(path, target, None)


def test_a_draft_that_predicts_nothing(target, trained_block_draft, tmp_path):
    module, config = trained_block_draft(intermediate_size=40)
    write_files(tmp_path / "x", FORMATS.write("flat", module.state_dict(), config, target, {}, "x"))
    with pytest.raises(ArtifactError, match="always drafting the commonest one gives"):
        FORMATS.verify(tmp_path / "x", target, None)


def test_a_mask_token_without_an_embedding(learned, target, tmp_path):
    module, config = learned
    write_files(tmp_path / "x", FORMATS.write("flat", module.state_dict(), config, target, {}, "x"))
    weight = target.embed_weight
    kept = weight[7].clone()
    try:
        with torch.no_grad():
            weight[7] = 0
        with pytest.raises(ArtifactError, match="the embedding of mask token 7 is zero"):
            FORMATS.verify(tmp_path / "x", target, None)
    finally:
        with torch.no_grad():
            weight[7] = kept
