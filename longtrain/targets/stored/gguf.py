"""Converts a GGUF file to a target folder, dequantised once by transformers' reader, in the Hub's cache."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from longtrain.errors import ArtifactError, ConfigError, LongtrainError, first_line, is_failure, refusal
from longtrain.files import as_json, lock, write_files
from longtrain.folders import FolderKind, replaced_folder
from longtrain.log import get_logger
from longtrain.targets.config_file import read_object
from longtrain.targets.info import check_supported

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = get_logger(__name__)

RECORD = "gguf.json"
"""File in the folder that records which GGUF file it was made of."""
FORM = 2
"""Version of the folder's form; folders of another version are made anew."""
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with the factors of the rotary frequencies, if their type is llama3."""
LLAMA3_FACTORS = (8.0, 32.0)
"""Factors of the Llama 3.1 to 3.3 models, which the file does not name."""
EXPERTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
"""Weights of all experts of a layer in transformers -> in a file."""
SHARD_BYTES = 1 << 30
DEQUANTISED = FolderKind(
    "a dequantised GGUF file",
    (RECORD, "config.json"),
    ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"),
)


def dequantised(file: Path) -> Path:
    """Return the target folder of a GGUF file: config, fp32 weights and tokenizer, made on first use.

    The weights are stored in fp32, since few products of a quantised number and its scales are bf16 numbers.

    Args:
        file: the GGUF file, whole.

    Raises:
        ConfigError: the package gguf is missing.
        ArtifactError: the file is damaged, one of several parts, or has something transformers' reader skips.
        TargetMismatchError: the model is not supported.
        LongtrainError: the folder cannot be written.
    """
    folder, digest = _place(file)
    with lock(folder.with_name(f"{folder.name}.lock"), wait=True):
        if not (folder / RECORD).is_file():
            if find_spec("gguf") is None:
                raise ConfigError(
                    f"target.path={file} is a GGUF file, and the package gguf is missing: "
                    "pip install 'longtrain[gguf]'"
                )
            log.info("dequantising=%s folder=%s", file, folder)
            with replaced_folder(folder, DEQUANTISED) as fresh:
                _write(file, digest, fresh)
    _tell(str(file), str(folder))
    return folder


def is_dequantised(file: Path) -> bool:
    """Return True if the target folder of a GGUF file exists; making it takes minutes."""
    return (_place(file)[0] / RECORD).is_file()


def _place(file: Path) -> tuple[Path, str]:
    """Return the target folder of a GGUF file, and the file's SHA-256."""
    from huggingface_hub import cached_assets_path, constants

    status = file.stat()
    digest = _sha256(file, status.st_size, status.st_mtime_ns)
    places = cached_assets_path("longtrain", "gguf", f"v{FORM}", assets_dir=constants.HF_ASSETS_CACHE)
    return places / digest[:32], digest


def record_of(folder: Path) -> dict[str, str]:
    """Return name, SHA-256 and quantisation of the GGUF file that a folder was made of.

    Raises:
        ArtifactError: the record is damaged.
    """
    values = read_object(folder / RECORD)
    return {key: str(values.get(key)) for key in ("gguf", "sha256", "quantisation")}


@lru_cache
def _sha256(file: Path, size: int, changed_ns: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@lru_cache
def _tell(file: str, folder: str) -> None:
    """Warn once per process that the weights are rounded."""
    record = record_of(Path(folder))
    log.warning(
        "target=%s has the weights rounded to %s, expanded; results hold for them (sha256=%s), not for the "
        "model that was published; folder=%s",
        file,
        record["quantisation"],
        record["sha256"][:12],
        folder,
    )


def _write(file: Path, digest: str, folder: Path) -> None:
    """Write the target folder of a file; see `dequantised`."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import __version__

    try:
        reader = GGUFReader(file)
        quantisation = _quantisation(reader)
        _refuse_parts(reader, file)
        with TemporaryDirectory() as empty:
            alone = Path(empty) / file.name  # the reader would take tokenizer files beside the file
            alone.symlink_to(file.absolute())
            config = _config(reader, alone, file)
            model, tokenizer = _load(alone, config, file)
        _refuse_left_out(reader, model, file)
    except LongtrainError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ArtifactError(
            f"{file} cannot be read as a target ({first_line(error)}); get it again if it was cut short, "
            "else pass one of a Llama, Qwen2, Qwen3, Qwen3-MoE, Mistral or Gemma 3 model, or its folder"
        ) from error
    index: dict[str, str] = {}
    for number, part in enumerate(_shards(model)):
        name = f"model-{number:05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(part, name)
    values = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(key, None)
    values |= {"dtype": "float32", "architectures": [type(model).__name__]}
    _name_ends(reader, tokenizer)
    tokenizer.save_pretrained(folder)
    record = {"gguf": file.name, "sha256": digest, "quantisation": quantisation, "transformers": __version__}
    written = {
        "model.safetensors.index.json": {"weight_map": index},
        "config.json": values,
        "generation_config.json": _ends(reader, tokenizer),
        RECORD: record,
    }
    files = {name: as_json(content) for name, content in written.items()}
    if licence := _value(reader, "general.license"):
        files["README.md"] = f"---\nlicense: {json.dumps(licence)}\n---\n\nMade of {file.name}.\n".encode()
    write_files(folder, files)


def _load(alone: Path, config: Any, file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model (fp32) and tokenizer with transformers from a file that is `alone` in its folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(alone.parent), "gguf_file": alone.name}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **where, config=config, dtype=torch.float32, output_loading_info=True
    )
    model, report = loaded
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if lacking := sorted(set(report["missing_keys"]) - tied):
        raise ArtifactError(f"{file} lacks {len(lacking)} tensors, the first is {lacking[0]}; get it again")
    return model, AutoTokenizer.from_pretrained(**where)


def _config(reader: GGUFReader, alone: Path, file: Path) -> Any:
    """Return the model's config, with the file's settings that transformers' reader skips."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(alone.parent), gguf_file=alone.name)
    arch = _value(reader, "general.architecture")
    config.rms_norm_eps = float(str(np.float32(getattr(config, "rms_norm_eps", 1e-6))))  # stored in fp32
    if head_dim := _value(reader, f"{arch}.attention.key_length"):
        config.head_dim = head_dim
    if width := _value(reader, f"{arch}.expert_feed_forward_length"):
        config.moe_intermediate_size = width
    turned = _value(reader, f"{arch}.rope.dimension_count")
    if turned and turned != (whole := getattr(config, "head_dim", turned)):
        raise ArtifactError(f"{file} rotates {turned} of {whole} dims of each head, which is not supported")
    if hasattr(config, "sliding_window"):
        config.sliding_window = _value(reader, f"{arch}.attention.sliding_window")
    _mend_rope(config, reader, arch, file)
    check_supported(config, str(file))
    return config


def _mend_rope(config: Any, reader: GGUFReader, arch: str, file: Path) -> None:
    """Set the rotary scaling, which transformers' reader skips."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)  # windows of Gemma 3 are not scaled
    scaling = f"{arch}.rope.scaling"
    kind = _value(reader, f"{scaling}.type") or "none"
    factors = next((tensor for tensor in reader.tensors if tensor.name == ROPE_FACTORS), None)
    if factors is not None:
        config.rope_parameters = _llama3(
            rope, config.head_dim, np.array(factors.data, dtype=np.float32), file
        )
    elif kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": float(_value(reader, f"{scaling}.factor"))}
        if kind == "yarn":
            before = _value(reader, f"{scaling}.original_context_length") or config.max_position_embeddings
            rope["original_max_position_embeddings"] = int(before)
    elif kind != "none":
        said = f"{file} has rotary scaling of type '{kind}'"
        raise refusal(ArtifactError, said, "none, linear, yarn, llama3")


def _llama3(rope: dict[str, Any], head_dim: int, stored: np.ndarray, file: Path) -> dict[str, Any]:
    """Return the llama3 parameters that give the frequency factors in a file."""
    known = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    frequency = rope["rope_theta"] ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    share = np.clip((8192 * frequency / (2 * math.pi) - 1.0) / 3.0, 0, 1)  # share of the unscaled frequency
    for factor in LLAMA3_FACTORS:
        if np.allclose(1 / (share + (1 - share) / factor), stored, rtol=1e-4):
            return {"rope_type": "llama3", "rope_theta": rope["rope_theta"], "factor": factor, **known}
    raise ArtifactError(
        f"{file} has rotary factors ({ROPE_FACTORS}) that are not those of Llama 3.1 to 3.3; pass the "
        "model's folder, whose config.json names its rotary type"
    )


def _refuse_parts(reader: GGUFReader, file: Path) -> None:
    if (parts := _value(reader, "split.count")) and parts > 1:
        raise ArtifactError(
            f"{file} is one of {parts} parts; join them first: llama-gguf-split --merge {file.name} ALL.gguf"
        )


def _refuse_left_out(reader: GGUFReader, model: PreTrainedModel, file: Path) -> None:
    """Refuse tensors that transformers' reader skipped, since the model would be another without them."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = _value(reader, "general.architecture")
    kind = next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(kind, model.config.num_hidden_layers)
    read = set()
    for name, _ in model.named_parameters():
        stem, _, leaf = name.rpartition(".")
        if leaf in EXPERTS:
            read |= {f"blk.{stem.split('.')[2]}.{part}.weight" for part in EXPERTS[leaf]}
        else:
            read.add(f"{names.get_name(stem)}.{leaf}")
    stored = {tensor.name for tensor in reader.tensors} - {ROPE_FACTORS}
    if left := sorted(stored - read):
        raise ArtifactError(
            f"{file} has {left[0]} ({len(left)} such tensors), which transformers' reader of a "
            f"{model.config.model_type} model leaves out; pass the model's folder"
        )


def _quantisation(reader: GGUFReader) -> str:
    """Return the file's own name of its quantisation (Q4_K_M), else the most frequent type of its weights."""
    from gguf import LlamaFileType

    try:
        return LlamaFileType(_value(reader, "general.file_type")).name.removeprefix("MOSTLY_")
    except ValueError:
        counts: dict[str, int] = {}
        for tensor in reader.tensors:
            counts[tensor.tensor_type.name] = counts.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
        return max(counts, key=counts.__getitem__)


def _name_ends(reader: GGUFReader, tokenizer: Any) -> None:
    """Set the tokenizer's first and last token by the file: transformers 5.17 confuses them."""
    for name in ("bos", "eos"):
        if (id_ := _value(reader, f"tokenizer.ggml.{name}_token_id")) is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(id_)))


def _ends(reader: GGUFReader, tokenizer: Any) -> dict[str, Any]:
    """Return the generation config: all tokens that end a text, as the file names them."""
    found = [_value(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ends = sorted({int(one) for one in (tokenizer.eos_token_id, *found) if one is not None})
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": ends,
    }
    return {key: value for key, value in ids.items() if value not in (None, [])}


def _shards(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield the model's weights in parts of about a gigabyte, without a tied head."""
    part: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if part and sum(one.nbytes for one in part.values()) + weight.nbytes > SHARD_BYTES:
            yield part
            part = {}
        part[name] = weight.detach().contiguous()
    yield part


def _value(reader: GGUFReader, key: str) -> Any:
    """Return a value of the file's metadata; None if there is none of this name."""
    field = reader.get_field(key)
    return None if field is None else field.contents()
