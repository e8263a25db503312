"""Targets from GGUF files: what transformers reads of them, kept in a folder that is made once."""

from __future__ import annotations

import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from longtrain.assets import asset_dir
from longtrain.errors import ArtifactError, ConfigError, TargetMismatchError
from longtrain.targets.at_hand import folder_at_hand, folder_of, licence_of
from longtrain.targets.loading import load_target
from longtrain.targets.stored import gguf as reader
from longtrain.targets.tokenizer import read_tokenizer

gguf = pytest.importorskip("gguf")

V, E, F, L, H, G, D = 300, 64, 96, 2, 4, 2, 16
TEMPLATE = "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"


def write(file, *, arch="llama", head=False, drop=(), more=None, **metadata):
    """A GGUF file of a small model, in Q8_0 and fp32, with a byte-level BPE."""
    writer, rng = gguf.GGUFWriter(file, arch), np.random.default_rng(0)
    writer.add_name("small")
    writer.add_license("apache-2.0")
    writer.add_context_length(256)
    writer.add_block_count(L)
    writer.add_embedding_length(E)
    writer.add_feed_forward_length(F)
    writer.add_head_count(H)
    writer.add_head_count_kv(G)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(D)
    writer.add_vocab_size(V)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    bpe = json.loads((asset_dir("bundled") / "tiny" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)[:V]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (V - 4))
    writer.add_token_merges([pair for pair in pairs if pair.replace(" ", "") in set(tokens)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for key, value in metadata.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(key.replace("__", "."), value)
    shapes = {"token_embd.weight": (V, E), "output_norm.weight": (E,)}
    if head:
        shapes["output.weight"] = (V, E)
    for i in range(L):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (E,),
            f"blk.{i}.ffn_norm.weight": (E,),
            f"blk.{i}.attn_q.weight": (H * D, E),
            f"blk.{i}.attn_k.weight": (G * D, E),
            f"blk.{i}.attn_v.weight": (G * D, E),
            f"blk.{i}.attn_output.weight": (E, H * D),
            f"blk.{i}.ffn_gate.weight": (F, E),
            f"blk.{i}.ffn_up.weight": (F, E),
            f"blk.{i}.ffn_down.weight": (E, F),
        }
    for name, shape in shapes.items():
        if name in drop:
            continue
        values = rng.normal(0.0 if len(shape) == 2 else 1.0, 0.2, shape).astype(np.float32)
        if len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    return tmp_path / "assets"


def test_files_of_another_model_beside_it_are_not_read(cache, tmp_path):
    clean, mixed = tmp_path / "clean", tmp_path / "mixed"
    clean.mkdir()
    mixed.mkdir()
    wanted = AutoTokenizer.from_pretrained(str(clean), gguf_file=write(clean / "small.gguf").name)
    shutil.copy(clean / "small.gguf", mixed)
    (mixed / "config.json").write_text('{"model_type": "qwen2", "hidden_size": 8}')
    (mixed / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    shutil.copy(asset_dir("bundled") / "tiny" / "tokenizer.json", mixed)
    (mixed / "chat_template.jinja").write_text("other")
    folder = folder_of(mixed / "small.gguf")
    found = AutoTokenizer.from_pretrained(folder)
    assert len(found) == len(wanted) == V and found.eos_token == "<|end|>"  # as the file says
    assert found.chat_template == TEMPLATE
    assert not any(str(tmp_path) in file.read_text() for file in folder.glob("*.json"))


@pytest.mark.parametrize("head", [False, True])
def test_it_is_what_transformers_reads(cache, tmp_path, head, caplog):
    file = write(tmp_path / "small.gguf", head=head)
    with caplog.at_level("WARNING", logger="longtrain"):
        target = load_target(file)
    told = [record.getMessage() for record in caplog.records if "rounded to Q8_0" in record.getMessage()]
    assert len(told) == 1 and "not for the model that was published" in told[0]
    stock = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=file.name, dtype=torch.float32)
    for (name, mine), (_, theirs) in zip(
        target.model.named_parameters(), stock.named_parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    ids = target.encode("the quick brown fox")
    assert (
        ids
        == AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=file.name)("the quick brown fox").input_ids
    )
    info = target.info
    assert (info.rms_norm_eps, info.eos_ids, info.max_positions, info.head_dim) == (1e-6, (2, 3), 256, D)
    assert (target.head_weight is target.embed_weight) is not head
    assert target.tokenizer.chat_template == TEMPLATE and target.tokenizer.eos_token_id == 3
    digest = reader._sha256(file, file.stat().st_size, file.stat().st_mtime_ns)
    assert info.source == {"gguf": "small.gguf", "sha256": digest, "quantisation": "Q8_0"}
    assert licence_of(str(file)) == "apache-2.0"
    tokenizer, context = read_tokenizer(str(file))
    assert context == 256 and tokenizer("the quick").input_ids == target.encode("the quick")


def test_the_folder_is_made_once_and_by_what_the_file_holds(cache, tmp_path, monkeypatch):
    file = write(tmp_path / "small.gguf")
    folder = folder_of(file)
    monkeypatch.setattr(reader, "_write", lambda *_: pytest.fail("made again"))
    monkeypatch.setattr(reader, "find_spec", lambda name: None)  # the package is not needed any more
    copied = shutil.copy(file, tmp_path / "other.gguf")
    assert folder_of(copied) == folder == folder_of(file) == folder_at_hand(str(file))
    assert load_target(copied).info.weights_hash == load_target(folder).info.weights_hash
    assert not [path for path in folder.parent.iterdir() if path.name.endswith((".new", ".old"))]


def test_two_at_once_make_one_folder(cache, tmp_path, monkeypatch):
    """The lock is on the file system, and keeps threads apart as it does processes."""
    file, made, slow = write(tmp_path / "small.gguf"), [], reader._write

    def counted(*args):
        made.append(args)
        slow(*args)

    monkeypatch.setattr(reader, "_write", counted)
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(folder_of, [file] * 3))
    assert len(made) == len(folders) == 1 and load_target(folders.pop()).info.n_layers == L


def test_what_fails_leaves_no_folder(cache, tmp_path):
    file = write(tmp_path / "small.gguf", drop=("blk.1.ffn_up.weight",))
    with pytest.raises(
        ArtifactError, match=r"small\.gguf lacks 1 tensors, the first is model.layers.1.mlp.up_proj"
    ):
        folder_of(file)
    assert [path.suffix for path in (cache / "longtrain" / "gguf" / "v2").iterdir()] == [".lock"]


def test_a_wrong_word_is_told_before_a_file_is_dequantised(cache, tmp_path, monkeypatch, run):
    def dequantise(*_):
        raise AssertionError("a wrong word costs nobody minutes")

    file = write(tmp_path / "x.gguf")
    monkeypatch.setattr("longtrain.targets.stored.gguf._write", dequantise)
    done = run("generate", f"target.path={file}", "artifact=absent", "prompt=x")
    assert done.returncode == 1 and "no artifact 'absent'" in done.stderr
    done = run("train", "+recipe=longspec_local", f"target.path={file}", "optim.lr=-1", "data.stages=[]")
    assert "optim.lr=-1; allowed" in done.stderr and "data.stages is empty" in done.stderr


def test_without_the_package_it_says_what_to_install(cache, tmp_path, monkeypatch):
    file = write(tmp_path / "small.gguf")
    monkeypatch.setattr(reader, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the package gguf is missing: pip install 'longtrain\[gguf\]'"):
        load_target(file)


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        ({"arch": "gemma3"}, TargetMismatchError, "family|sliding-window|not supported|cannot be read"),
        ({"split__count": 3}, ArtifactError, "is one of 3 parts; join them first: llama-gguf-split --merge"),
        ({"llama__rope__scaling__type": "longrope"}, ArtifactError, "rotary scaling of type 'longrope'"),
        ({"llama__attention__key_length": 32}, ArtifactError, "rotates 16 of 32 dims"),
        ({"more": {"rope_freqs.weight": np.full(D // 2, 3.0, np.float32)}}, ArtifactError, "rotary factors"),
        ({"more": {"blk.0.attn_q.bias": np.ones(H * D, np.float32)}}, ArtifactError,
         r"blk.0.attn_q.bias \(1 such tensors\), which transformers' reader of a llama model leaves out"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_a_target(cache, tmp_path, keys, kind, message):
    file = write(tmp_path / "small.gguf", **keys)
    with pytest.raises((kind, ArtifactError), match=message) as caught:
        folder_of(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model" * 9])
def test_files_that_are_no_gguf(cache, tmp_path, content):
    file = tmp_path / "small.gguf"
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"small\.gguf cannot be read as a target") as caught:
        folder_of(file)
    assert "\n" not in str(caught.value)
    with pytest.raises(
        ConfigError, match=r"absent\.gguf does not exist; allowed: a target folder, a \.gguf file"
    ):
        folder_of("models/absent.gguf")


def test_rotary_scaling_is_read(cache, tmp_path):
    linear = write(tmp_path / "a.gguf", llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert load_target(linear).info.rope == {"factor": 4.0, "rope_theta": 10000.0, "rope_type": "linear"}
    yarn = {"type": "yarn", "factor": 2.0, "original_context_length": 128}
    file = write(tmp_path / "b.gguf", **{f"llama__rope__scaling__{key}": one for key, one in yarn.items()})
    assert load_target(file).info.rope == {
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "rope_type": "yarn",
    }


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_factors_of_llama_3_are_its_rotary_type(cache, tmp_path, factor):
    """The factors as llama.cpp's converter makes them of config.json."""
    low, high, before, factors = 1.0, 4.0, 8192, []
    for frequency in 1.0 / (10000.0 ** (torch.arange(0, D, 2, dtype=torch.float32) / D)):
        wavelength = 2 * math.pi / frequency
        if wavelength < before / high:
            factors.append(1.0)
        elif wavelength > before / low:
            factors.append(factor)
        else:
            smooth = (before / wavelength - low) / (high - low)
            factors.append(float(1 / ((1 - smooth) / factor + smooth)))
    file = write(tmp_path / "a.gguf", more={"rope_freqs.weight": np.array(factors, np.float32)})
    rope = load_target(file).info.rope
    assert rope["rope_type"] == "llama3" and rope["factor"] == factor


def test_scaling_is_that_of_the_full_layers_where_there_are_two_tables(tmp_path, monkeypatch):
    file = write(tmp_path / "small.gguf", arch="gemma3", rope__unused=1)
    stored = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    monkeypatch.setattr(reader, "_value", lambda _reader, key: stored.get(key))
    config = AutoConfig.for_model("gemma3_text")
    reader._mend_rope(config, gguf.GGUFReader(file), "gemma3", file)
    tables = config.rope_parameters
    assert tables["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert tables["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}


def test_experts_are_read_and_their_weights_sum_to_one(cache, tmp_path):
    """No GGUF file says so; transformers' own default is that they do not."""
    rng, n_experts, moe = np.random.default_rng(1), 4, 32
    shapes = {"ffn_gate_inp": (n_experts, E), "attn_q_norm": (D,), "attn_k_norm": (D,)}
    shapes |= {"ffn_gate_exps": (n_experts, moe, E), "ffn_up_exps": (n_experts, moe, E)}
    shapes["ffn_down_exps"] = (n_experts, E, moe)
    more = {
        f"blk.{i}.{name}.weight": rng.normal(0, 0.2, shape).astype(np.float32)
        for i in range(L)
        for name, shape in shapes.items()
    }
    sizes = {"expert_count": n_experts, "expert_used_count": 2, "expert_feed_forward_length": moe}
    sizes |= {"attention__key_length": D, "attention__value_length": D}
    target = load_target(
        write(
            tmp_path / "small.gguf",
            arch="qwen3moe",
            drop=[f"blk.{i}.ffn_{part}.weight" for i in range(L) for part in ("gate", "up", "down")],
            more=more,
            **{f"qwen3moe__{key}": value for key, value in sizes.items()},
        )
    )
    assert target.model.config.norm_topk_prob is True
    block = target.model.model.layers[1].mlp
    with torch.no_grad():
        weights = block.gate(torch.randn(5, E))[1]
    torch.testing.assert_close(weights.sum(-1), torch.ones(5))
    gate, up, down = (
        torch.from_numpy(more[f"blk.1.ffn_{part}_exps.weight"]) for part in ("gate", "up", "down")
    )
    assert torch.equal(block.experts.gate_up_proj, torch.cat((gate, up), 1))
    assert torch.equal(block.experts.down_proj, down)
