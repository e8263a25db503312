"""Quantised checkpoints: equal to what transformers makes of them, or refused by the method's name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
)

from longtrain.errors import ArtifactError, TargetMismatchError
from longtrain.targets.at_hand import folder_at_hand
from longtrain.targets.loading import load_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.stored.checkpoint import StoredWeights
from longtrain.targets.stored.quantised import Quantisation
from tests.families import usual

SHAPE = {**SHAPES["llama_micro"], "hidden_size": 64, "intermediate_size": 128}
FP8, INT8 = torch.float8_e4m3fn, torch.int8
TOP = {FP8: 448.0, INT8: 127.0}


def grid_of(shape, block):
    """Rows and columns of the scales of a weight: one, one a row, or one a block."""
    if block == "tensor":
        return (1, 1)
    return (
        (shape[0], 1) if block == "channel" else tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    )


def spread(scale, shape):
    """Each scale over the values that share it."""
    down, right = (-(-size // count) for size, count in zip(shape, scale.shape, strict=True))
    return scale.repeat_interleave(down, 0).repeat_interleave(right, 1)[: shape[0], : shape[1]]


def quantise(weight, block, dtype, scale_dtype):
    """A weight as stored, its scales, and what their product is."""
    rng = torch.Generator().manual_seed(weight.numel())
    scale = (0.5 + torch.rand(grid_of(weight.shape, block), generator=rng)) * weight.abs().max() / TOP[dtype]
    scale = scale.to(scale_dtype)
    stored = (weight.float() / spread(scale.float(), weight.shape)).clamp(-TOP[dtype], TOP[dtype])
    stored = (stored.round() if dtype == INT8 else stored).to(dtype)
    return stored, scale


@pytest.fixture
def write(tmp_path, tokenizer_folder):
    """A folder of a small Llama whose projections are quantised."""

    def made(block, dtype, scale_dtype, ends, quantisation, **others):
        torch.manual_seed(0)
        config = AutoConfig.for_model(**SHAPE)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tensors = {}
        for name, weight in model.named_parameters():
            tensors[name] = weight.detach()
            if "_proj" in name:
                tensors[name], scale = quantise(weight.detach(), block, dtype, scale_dtype)
                if block == "tensor":
                    scale = scale.reshape(()) if ends == "_scale_inv" else scale.reshape(1)
                tensors[name + ends] = scale
        for file in tokenizer_folder.glob("tokenizer*"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
        save_file({**tensors, **others}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        values = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        if quantisation is not None:
            values["quantization_config"] = quantisation
        (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path, tensors

    return made


def fp8(block):
    size = None if isinstance(block, str) else list(block)
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": size}


def compressed(dtype, block):
    kind = "int" if dtype == INT8 else "float"
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": False}
    weights |= (
        {"strategy": block} if isinstance(block, str) else {"strategy": "block", "block_structure": block}
    )
    inputs = {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def equals(target, stock):
    for (name, mine), (other, theirs) in zip(
        target.model.named_parameters(), stock.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(mine, theirs), name


@pytest.mark.corners
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", ["tensor", (16, 16), (32, 8)])
def test_fp8_is_what_transformers_makes_of_it(write, block, scale_dtype, dtype):
    pytest.importorskip("accelerate")
    folder, _ = write(block, FP8, scale_dtype, "_scale_inv", fp8(block))
    asked = FineGrainedFP8Config(dequantize=True, weight_block_size=None if isinstance(block, str) else block)
    stock = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), quantization_config=asked
    )
    equals(load_target(folder, dtype=dtype), stock)


@pytest.mark.corners
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", ["tensor", "channel", [16, 16]])
@pytest.mark.parametrize("kind", [FP8, INT8])
def test_compressed_tensors_are_what_transformers_makes_of_them(write, kind, block, scale_dtype, dtype):
    pytest.importorskip("compressed_tensors")
    folder, _ = write(block, kind, scale_dtype, "_scale", compressed(kind, block))
    asked = CompressedTensorsConfig(dequantize=True)
    stock = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), quantization_config=asked
    )
    equals(load_target(folder, dtype=dtype), stock)


@pytest.mark.parametrize(
    ("kind", "ends", "block"),
    [(FP8, "_scale_inv", block) for block in ("tensor", (16, 16))]
    + [(kind, "_scale", block) for kind in (FP8, INT8) for block in ("tensor", "channel", (16, 16))],
)
def test_a_weight_is_the_product(write, kind, ends, block):
    """The same without transformers: fp32 scales, so that no rounding is in it."""
    quantisation = fp8(block) if ends == "_scale_inv" else compressed(kind, block)
    folder, tensors = write(block, kind, torch.float32, ends, quantisation)
    for name, mine in load_target(folder, dtype="float32").model.named_parameters():
        expected = tensors[name].float()
        if "_proj" in name:
            expected = expected * spread(tensors[name + ends].reshape(grid_of(mine.shape, block)), mine.shape)
        assert torch.equal(mine, expected), name


def test_the_last_block_of_a_row_and_column_may_be_smaller(write):
    folder, tensors = write((48, 48), FP8, torch.float32, "_scale_inv", fp8((48, 48)))
    target = load_target(folder, dtype="float32")
    name = "model.layers.1.mlp.up_proj.weight"  # 128 x 64: a grid of 3 x 2
    scale = tensors[name + "_scale_inv"].repeat_interleave(48, 0).repeat_interleave(48, 1)[:128, :64]
    whole = target.model.get_parameter(name)
    assert torch.equal(whole, tensors[name].float() * scale)
    stored = dict(StoredWeights(folder, device=torch.device("cpu"), tied=False))[name]
    for rows in (slice(0, 50), slice(40, 100), slice(97, 128)):  # what a rank holds of it
        assert torch.equal(stored.rows(rows), whole[rows])


def test_scales_of_powers_of_two_and_of_activations(write):
    """Bytes are exponents; scales of activations are not a dequantised model's."""
    mlp = "model.layers.0.mlp.up_proj"
    folder, tensors = write("tensor", FP8, torch.float32, "_scale_inv", fp8("tensor"),
                            **{f"{mlp}.activation_scale": torch.ones(1)})  # fmt: skip
    tensors[f"{mlp}.weight_scale_inv"] = torch.tensor([[120]], dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    mine = load_target(folder, dtype="float32").model.get_parameter(f"{mlp}.weight")
    assert torch.equal(mine, tensors[f"{mlp}.weight"].float() * 2.0**-7)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (
            torch.ones(3, 2),
            r"up_proj.weight has shape \(128, 64\) and scales of shape \(3, 2\); allowed: .*\[128",
        ),
        (torch.ones(128), r"scales of shape \(128,\)"),
        (torch.ones(2, 2, 2), r"scales of shape \(2, 2, 2\)"),
    ],
)
def test_scales_that_are_no_grid_over_their_weight(write, scale, message):
    folder, tensors = write((16, 16), FP8, torch.float32, "_scale_inv", fp8((16, 16)))
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=message) as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ends", ["_scale_inv", "_scale"])
def test_scales_that_no_config_explains_are_refused(write, ends):
    folder, _ = write("tensor", FP8, torch.float32, ends, None)
    with pytest.raises(
        ArtifactError, match=rf"proj\.weight{ends}, and config.json has no quantization_config"
    ):
        load_target(folder)


def test_quantised_weights_without_scales_and_scales_without_weights(write):
    folder, tensors = write("tensor", FP8, torch.float32, "_scale_inv", fp8("tensor"))
    name = "model.layers.0.mlp.up_proj.weight"
    scale = tensors.pop(f"{name}_scale_inv")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"up_proj.weight is stored as float8_e4m3fn without a scale"):
        load_target(folder)
    tensors[f"{name}_scale_inv"] = scale
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"has .*up_proj.weight_scale_inv and no .*up_proj.weight;"):
        load_target(folder)


def test_zero_points_are_refused_where_they_are_not_zero(write):
    points = {"model.layers.0.mlp.up_proj.weight_zero_point": torch.zeros(1, dtype=torch.int8)}
    folder, tensors = write("tensor", INT8, torch.float32, "_scale", compressed(INT8, "tensor"), **points)
    load_target(folder)
    save_file({**tensors, **{name: one + 3 for name, one in points.items()}}, folder / "model.safetensors")
    with pytest.raises(TargetMismatchError, match="compressed-tensors with zero points, which is not read"):
        load_target(folder)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"has blocks of \[0, 128\]"),
        ({"quant_method": "fp8", "weight_block_size": ["a", 128]}, r"has blocks of \['a', 128\]"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": [8]}}},
            r"quantization_config with weights=\[8\]",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": "dense"},
            "quantization_config with sparsity_config='dense'",
        ),
    ],
)
def test_a_quantization_config_that_is_none_is_refused_in_one_line(broken, message):
    with pytest.raises(ArtifactError, match=message) as caught:
        Quantisation.of({"quantization_config": broken}, "FOLDER")
    assert "\n" not in str(caught.value)


METHODS = [
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes int8"),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes nf4"),
    ({"quant_method": "gptq", "bits": 4}, r"GPTQ \(4 bits\)"),
    ({"quant_method": "awq", "bits": 4}, r"AWQ \(4 bits\)"),
    ({"quant_method": "hqq"}, "hqq"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, r"compressed-tensors \(pack-"),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}},
     "compressed-tensors with 4 bits"),
    ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
     r"compressed-tensors \(sparse-24-bitmask\)"),
    ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}},
     r"compressed-tensors \(transforms"),
]  # fmt: skip


@pytest.mark.parametrize(("quantisation", "message"), METHODS)
def test_other_methods_are_refused_by_name(write, quantisation, message):
    folder, _ = write("tensor", FP8, torch.float32, "_scale", quantisation)
    for load in (load_target, lambda folder: folder_at_hand(str(folder))):
        with pytest.raises(
            TargetMismatchError, match=f"quantised with {message}.*which is not read"
        ) as caught:
            load(folder)
        assert "\n" not in str(caught.value)
    assert load_target(folder, weights="random").info.n_layers  # nothing of the file is read


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("up_proj.SCB", "bitsandbytes int8"),
        ("up_proj.weight.absmax", "bitsandbytes 4-bit"),
        ("up_proj.weight.quant_state.bitsandbytes__nf4", "bitsandbytes 4-bit"),
        ("up_proj.qweight", "GPTQ or AWQ"),
        ("up_proj_blocks", "MXFP4"),
        ("up_proj.weight_packed", r"compressed-tensors \(packed\)"),
    ],
)
def test_tensors_of_other_methods_are_refused_by_name_where_no_config_says_it(write, name, method):
    folder, tensors = write("tensor", FP8, torch.float32, "_scale", None)
    plain = {key: one.float().bfloat16() for key, one in tensors.items() if not key.endswith("_scale")}
    save_file({**plain, f"model.layers.0.mlp.{name}": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(TargetMismatchError, match=f"is quantised with {method}.*, which is not read"):
        load_target(folder)


@pytest.mark.parametrize("block", [(24, 12), "channel"])
def test_experts_are_dequantised_one_by_one(block, tmp_path, tokenizer_folder):
    """Each has scales of its own; the model holds all of a layer in one tensor."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**usual("qwen3_moe")), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    tensors, plain = load_file(tmp_path / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if ".experts." in name:
            tensors[name], scale = quantise(weight, block, FP8, torch.float32)
            tensors[f"{name}_scale_inv"] = scale
            plain[name] = tensors[name].float() * spread(scale, weight.shape)
    for file in tokenizer_folder.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": fp8(block)}))
    layer = load_target(tmp_path, dtype="float32").layer_state(1)
    for expert in range(8):
        parts = [plain[f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(layer["mlp.experts.gate_up_proj"][expert], torch.cat(parts))
        down = plain[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]
        assert torch.equal(layer["mlp.experts.down_proj"][expert], down)
