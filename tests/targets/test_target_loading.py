import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from longtrain.decoding.engine import Engine
from longtrain.errors import ArtifactError, ConfigError, TargetMismatchError
from longtrain.targets.attention import attend
from longtrain.targets.info import TargetInfo, check_supported
from longtrain.targets.loading import load_target, random_target
from longtrain.targets.shapes import SHAPES
from tests.helpers import target_from_model


def tokenizer(words):
    core = Tokenizer(
        models.WordLevel({"<unk>": 0, **{w: i + 1 for i, w in enumerate(words)}}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A bf16 Qwen3-shaped model with tied embeddings and its tokenizer, as transformers saves them."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SHAPES["qwen3_micro"], "tie_word_embeddings": True})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer(["fox", "dog"]).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def edit_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_folder_loads_with_the_very_weights_and_facts(folder):
    target = load_target(folder)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (name, mine), (_, theirs) in zip(
        target.model.named_parameters(), stock.named_parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    assert target.dtype == torch.float32 and target.device.type == "cpu"
    assert target.head_weight is target.model.model.embed_tokens.weight
    info = target.info
    assert (info.family, info.n_layers, info.n_heads, info.n_kv_heads, info.head_dim) == (
        "qwen3",
        2,
        4,
        2,
        32,
    )
    assert (info.hidden_size, info.vocab_size, info.qk_norm, info.attention_bias) == (48, 97, True, False)
    assert info.eos_ids == (1, 7) and info.name == str(folder)
    assert target.tokenizer.encode("dog fox") == [2, 1]
    assert TargetInfo.from_json(json.loads(json.dumps(info.to_json()))) == info


def test_identity_does_not_depend_on_dtype_and_does_on_weights(folder):
    wide, half = load_target(folder), load_target(folder, dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    assert wide.info.weights_hash == half.info.weights_hash
    wide.info.check(half.info)
    stored = load_file(folder / "model.safetensors")
    small = {name: 1e-4 * tensor for name, tensor in stored.items()}  # fp16 rounds many of these
    save_file(small, folder / "model.safetensors", metadata={"format": "pt"})
    of_small = load_target(folder).info
    for layers in (True, False):
        rounded = load_target(folder, dtype="float16", layers=layers)
        of_small.check(rounded.info)
    assert of_small.weights_hash != wide.info.weights_hash
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    in_memory = target_from_model(AutoModelForCausalLM.from_pretrained(folder))
    assert in_memory.info.weights_hash == wide.info.weights_hash

    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.25
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    other = load_target(folder)
    with pytest.raises(TargetMismatchError, match="weights_hash"):
        wide.info.check(other.info)


def test_another_tokenizer_is_another_target(folder):
    before = load_target(folder).info
    tokenizer(["dog", "fox"]).save_pretrained(folder)
    with pytest.raises(TargetMismatchError, match="tokenizer_hash"):
        before.check(load_target(folder).info)


def test_int8_rows_expand_to_their_bf16_products(folder):
    weights = load_file(folder / "model.safetensors")
    packed, expected = {}, {}
    for name, tensor in weights.items():
        if tensor.dim() == 2:
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            packed[name] = (tensor.float() / scale).round().to(torch.int8)
            packed[f"{name}.scale"] = scale.half()
            expected[name] = (packed[name].float() * scale.half()).bfloat16()
        else:
            packed[name] = expected[name] = tensor
    (folder / "model.safetensors").unlink()
    save_file(packed, folder / "weights.int8.safetensors")
    target = load_target(folder)
    for name, mine in target.model.named_parameters():
        assert torch.equal(mine, expected[name].float()), name
    assert load_target(folder, dtype="bfloat16").info.weights_hash == target.info.weights_hash


def test_tiny_is_the_bundled_folder(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("longtrain.targets.at_hand.asset_dir", lambda name: tmp_path / name)
    with pytest.raises(ConfigError, match="target_tiny"):
        load_target("tiny")
    shutil.copytree(saved, tmp_path / "bundled" / "tiny")
    assert load_target("tiny").info.name == "tiny"


def test_shards_and_legacy_files_load_the_same(folder):
    whole = load_target(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(
        {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)},
        folder / "pytorch_model.bin",
    )
    legacy = load_target(folder)
    (folder / "pytorch_model.bin").unlink()

    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({key: weights[key] for key in keys}, folder / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = load_target(folder)
    assert whole.info.weights_hash == legacy.info.weights_hash == sharded.info.weights_hash

    (folder / "b.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"lacks b\.safetensors"):
        load_target(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ArtifactError, match="not a weight index"):
        load_target(folder)


def test_a_missing_folder_names_the_folder_and_the_hub(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="does not exist"):
        load_target(tmp_path / "nowhere")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no such folder here .*/org/no-such-model\).*model hub") as caught:
        load_target("org/no-such-model")
    assert "\n" not in str(caught.value)
    assert "pass target.path=FOLDER" in str(caught.value) and "target.path=FILE.gguf" in str(caught.value)


def test_a_folder_without_its_files(folder):
    (folder / "model.safetensors").rename(folder / "kept")
    with pytest.raises(ArtifactError, match="has no weights"):
        load_target(folder)
    (folder / "kept").rename(folder / "model.safetensors")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match="has no tokenizer"):
        load_target(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ArtifactError, match=r"has no config\.json"):
        load_target(folder)


@pytest.mark.parametrize("keep", [0, 4, 200, 0.5, -1])
def test_truncated_weights(folder, keep):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)] if isinstance(keep, float) else data[:keep])
    with pytest.raises(ArtifactError, match=r"model\.safetensors is damaged or truncated") as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)


def test_garbled_legacy_weights(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    with pytest.raises(ArtifactError, match=r"pytorch_model\.bin is damaged"):
        load_target(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "no_such_family"}', '{"hidden_size": 3}'])
def test_a_config_that_is_none(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"config\.json") as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)


def test_weights_that_do_not_fit_the_config(folder):
    edit_config(folder, intermediate_size=81)
    with pytest.raises(
        TargetMismatchError, match=r"mlp\.\w+\.weight has shape .*\b80\b.*, config\.json says .*\b81\b"
    ):
        load_target(folder)
    edit_config(folder, intermediate_size=80, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ArtifactError, match=r"lacks \d+ tensors, the first is model\.layers\.2"):
        load_target(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "llama", "layer_types": ["chunked_attention", "full_attention"],
          "num_hidden_layers": 2}, "chunked_attention"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "later tokens"),
        ({"model_type": "gemma3_text", "num_hidden_layers": 4}, "no layer that sees the whole text"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "softcap"),
        ({"model_type": "gemma3_text", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2,
          "rope_parameters": {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}},
         "dynamic"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
         r"has num_experts_per_tok=5 \(allowed: 1 to 4, its experts\)"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ({"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 9}, "allowed: 1 to 8"),
        ({"model_type": "glm4_moe", "n_routed_experts": 8, "n_group": 2, "topk_group": 3},
         r"has topk_group=3 \(allowed: 1 to 2, n_group\)"),
        ({"model_type": "glm4_moe", "n_routed_experts": 8, "topk_group": 0}, r"topk_group=0 \(allowed"),
        ({"model_type": "glm4_moe", "n_routed_experts": 8, "n_group": 3}, "n_group=3, and 8 experts"),
        ({"model_type": "glm4_moe", "n_routed_experts": 8, "n_group": 8}, r"n_group=8, .*2 or more"),
        ({"model_type": "glm4_moe", "n_routed_experts": 8, "n_group": 0}, "n_group=0,"),
        ({"model_type": "glm4_moe", "n_routed_experts": 8, "n_group": 4, "num_experts_per_tok": 3},
         r"has num_experts_per_tok=3 \(allowed: 1 to 2, the experts of topk_group groups\)"),
        ({"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 9}, "allowed: 1 to 8"),
        ({"model_type": "deepseek_v3"}, "MLA"),
        ({"model_type": "gemma2"}, "softcap"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "granite"}, "family"),
        ({"model_type": "llama", "max_position_embeddings": 64,
          "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)  # fmt: skip
def test_attention_that_the_hook_would_get_wrong_is_refused(values, message):
    with pytest.raises(TargetMismatchError, match=message) as caught:
        check_supported(AutoConfig.for_model(**values), "some/target")
    assert "llama, qwen2, qwen3, mistral" in str(caught.value)


def test_refusal_comes_before_weights_are_read(folder):
    edit_config(folder, partial_rotary_factor=0.5)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(TargetMismatchError, match="partial_rotary_factor"):
        load_target(folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type="gpt2", n_layer=1, n_embd=12))
    with pytest.raises(TargetMismatchError, match="gpt2"):
        target_from_model(model)


def test_windows_that_are_not_in_use_are_no_reason():
    for values in (
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 4096},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64},
        {"model_type": "llama", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    ):
        check_supported(AutoConfig.for_model(**values), "some/target")


def test_a_window_of_the_whole_context_reads_as_none():
    for positions, windows in ((64, 0), (65, 2)):
        info = random_target(
            {**SHAPES["mistral_micro"], "sliding_window": 64, "max_position_embeddings": positions}
        ).info
        assert sum(info.layer(index).window == 64 for index in range(2)) == windows
        assert bool(info.layers) == bool(windows) and info.layer(1).kind == ("window" if windows else "full")
    target = random_target({**SHAPES["mistral_micro"], "sliding_window": 64, "max_position_embeddings": 64})
    plain = random_target({**SHAPES["mistral_micro"], "max_position_embeddings": 64})
    prompts = [[3, 4, 5, 6, 7]]
    made = [Engine(one).generate(prompts, max_new_tokens=50).tokens for one in (target, plain)]
    assert made[0] == made[1]


@pytest.mark.parametrize("extra", [{"softcap": 50.0}, {"of_the_future": 1}])
def test_attention_of_another_kind_is_never_computed_as_plain(extra):
    heads = torch.zeros(1, 2, 1, 4)
    with pytest.raises(TargetMismatchError, match=next(iter(extra))):
        attend(torch.nn.Module(), heads, heads, heads, None, dropout=0.0, **extra)
    with pytest.raises(ConfigError, match="called directly"):  # keywords that change nothing go through
        attend(torch.nn.Module(), heads, heads, heads, None, sliding_window=None, use_cache=False)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dtype": "int4"}, "target.dtype=int4"),
        ({"dtype": torch.int8}, "target.dtype"),
        ({"device": "gpu0"}, "target.device=gpu0"),
        pytest.param(
            {"device": "cuda"},
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_dtypes_and_devices_that_are_none(folder, keys, message):
    with pytest.raises(ConfigError, match=message):
        load_target(folder, **keys)


def test_random_targets_are_told_by_their_seed_and_published_shapes_are_right():
    assert random_target("llama_micro").info == random_target("llama_micro").info
    assert (
        random_target("llama_micro").info.weights_hash
        != random_target("llama_micro", seed=1).info.weights_hash
    )
    with pytest.raises(ConfigError, match="llama31_8b"):
        random_target("llama_9b")
    with pytest.raises(ConfigError, match="model_type"):
        random_target({"hidden_size": 8})
    sizes = {}
    for name in ("llama31_8b", "qwen3_8b"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name]))
        sizes[name] = sum(p.numel() for p in model.parameters())
    assert sizes == {"llama31_8b": 8_030_261_248, "qwen3_8b": 8_190_735_360}


def test_context_and_chat_template_may_be_overridden(folder):
    edit_config(folder, max_position_embeddings=64)
    own = load_target(folder)
    other = load_target(folder, max_positions=256, chat_template="chatml")
    assert (own.info.max_positions, other.info.max_positions) == (64, 256)
    own.info.check(other.info)  # not a part of who it is
    assert own.tokenizer.chat_template is None and "<|im_start|>" in other.tokenizer.chat_template
    with pytest.raises(ConfigError, match=r"chat_template=absent .*chatml, harmony, llama3, qwen25"):
        load_target(folder, chat_template="absent")


def test_a_tokenizer_that_needs_sentencepiece_says_what_to_install(folder, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("`tiktoken` is required to read a `tiktoken` file")

    monkeypatch.setattr("longtrain.targets.loading.AutoTokenizer.from_pretrained", refuse)
    monkeypatch.setattr("longtrain.targets.tokenizer._installed", lambda name: name != "sentencepiece")
    with pytest.raises(ArtifactError, match=r"needs sentencepiece: pip install 'longtrain\[legacy\]'"):
        load_target(folder)


def test_a_target_without_a_tokenizer_says_so_once_asked(folder):
    assert load_target(folder).require_tokenizer().encode("fox") == [1]
    with pytest.raises(ConfigError, match=r"target llama_micro has no tokenizer, .*tokenizer\.json"):
        random_target("llama_micro").require_tokenizer()


def test_random_weights_that_do_not_fit_are_refused_before_memory_is_taken(monkeypatch):
    monkeypatch.setattr("longtrain.targets.loading.free_bytes", lambda device: 20 * 2**30)
    with pytest.raises(
        ConfigError, match=r"random weights of llama31_8b take 29.9 GiB and 20.0 GiB are free on cpu"
    ):
        random_target("llama31_8b")
    assert random_target("llama_micro").info.n_layers
