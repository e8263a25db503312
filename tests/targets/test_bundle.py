"""The reference target: training forward against transformers' own attention, int8 rows, the folder."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from longtrain.errors import ArtifactError, ConfigError
from longtrain.targets.bundle import (
    LlamaShape,
    build_llama,
    packed_hidden,
    quantise_rows,
    save_bundle,
)
from longtrain.targets.loading import load_target
from longtrain.targets.tokenizer import train_tokenizer


def expanded_rows(packed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of int8 rows times their scales, bf16."""
    return {
        name: (row.float() * packed.get(f"{name}.scale", torch.ones(1))).to(torch.bfloat16)
        for name, row in packed.items()
        if not name.endswith(".scale")
    }


SHAPE = LlamaShape(280, 48, 2, 4, 2, 16, 64, max_positions=256)


def test_packed_documents_see_themselves_only_and_give_gradients() -> None:
    model = build_llama(SHAPE)
    ids_T = torch.arange(40) * 7 % 280
    pos_T = torch.cat([torch.arange(25), torch.arange(15)])
    hidden_TE = packed_hidden(model, ids_T, pos_T, (0, 25, 40))
    hidden_TE.square().sum().backward()
    assert all(value.grad is not None and value.grad.any() for value in model.parameters())
    model.set_attn_implementation("eager")
    alone = [model.model(piece[None]).last_hidden_state[0] for piece in ids_T.split([25, 15])]
    torch.testing.assert_close(hidden_TE, torch.cat(alone), atol=1e-5, rtol=1e-4)


def test_init_depends_on_the_seed_alone() -> None:
    first, again, other = (build_llama(SHAPE, seed=seed).lm_head.weight for seed in (1, 1, 2))
    assert first.equal(again) and not first.equal(other)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="n_kv_heads=3"):
        build_llama(replace(SHAPE, n_kv_heads=3))


def test_int8_rows_are_within_half_a_step() -> None:
    weight = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1.0], [10], [0.1], [1], [0]]
    )
    packed = quantise_rows({"w": weight, "norm": torch.ones(3)})
    expanded = expanded_rows(packed)
    assert packed["w"].dtype == torch.int8 and expanded["norm"].dtype == torch.bfloat16
    step = weight.abs().amax(1, keepdim=True) / 127
    rounding = weight.abs().amax(1, keepdim=True) * 2**-8
    assert ((expanded["w"].float() - weight).abs() <= step / 2 + rounding).all()


def test_the_folder_loads_as_the_expanded_weights(tmp_path: Path) -> None:
    train_tokenizer(
        ["the old man and the sea and the boat; the theory of it\n"] * 3, tmp_path / "tok", size=280
    )
    model = build_llama(SHAPE)
    size = save_bundle(model, tmp_path / "tok", tmp_path / "tiny")
    assert size == sum(file.stat().st_size for file in (tmp_path / "tiny").iterdir())
    target = load_target(tmp_path / "tiny", dtype="float32")
    expanded = expanded_rows(quantise_rows(model.state_dict()))
    for name, value in target.model.named_parameters():
        assert value.equal(expanded[name].float()), name
    assert target.info.eos_ids == (3,) and target.info.max_positions == 256
    assert target.info.rope["rope_theta"] == SHAPE.rope_base
    assert AutoModelForCausalLM.from_config(target.model.config).lm_head.weight.shape == (280, 48)


def test_a_missing_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="tokenizer"):
        save_bundle(build_llama(SHAPE), tmp_path, tmp_path / "tiny")
