"""LookaheadKV as an adapter folder of `peft`: `export format=peft` writes one, `artifact=FOLDER` reads one.

The folder holds what `peft_files` puts into an artifact's `peft/`, and the settings and target facts that a
module is rebuilt from. The LoRA is read by peft itself, so an adapter that was trained further and saved with
`PeftModel.save_pretrained` beside the other files is read too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from longtrain.errors import ArtifactError, ConfigError, LongtrainError
from longtrain.files import as_json, read_bytes, read_json
from longtrain.methods.lookaheadkv.config import FORMATS as NAMES
from longtrain.methods.lookaheadkv.config import Config
from longtrain.methods.lookaheadkv.modules import LookaheadKV
from longtrain.methods.lookaheadkv.peft_files import EMBEDDINGS, FOLDER, PREFIX, peft_files
from longtrain.methods.spec import Formats, Imported
from longtrain.targets.info import TargetSketch

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo
    from longtrain.targets.model import Target

(FORM,) = NAMES
ADAPTER, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ROWS, RECORD = f"{EMBEDDINGS}.safetensors", "longtrain/lookaheadkv.json"
OWN_KEYS = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_alpha", "lora_dropout", "peft_type",
    "peft_version", "r", "revision", "target_modules", "task_type",
}  # fmt: skip
"""Keys of `adapter_config.json` that may have any value: LookaheadKV has settings for them, or they do not
change what a trained adapter computes."""


def refuse(form: str, config: Config, info: TargetInfo | None) -> None:
    """Refuse a module without LoRA.

    Raises:
        ConfigError: there is nothing that peft could load.
    """
    if not config.linears():
        raise ConfigError(
            f"format={form}: the module was trained with method.lora_targets=none and has no LoRA; "
            "leave format out"
        )


def adapter_files(
    form: str, tensors: Mapping[str, Tensor], config: Config, target: Target, facts: dict[str, Any], name: str
) -> dict[str, bytes]:
    """The files of a folder, by their path in it.

    Args:
        form: `peft`.
        tensors: the module's state, by name.
        config: hyperparameters.
        target: the frozen target; only its facts are used.
        facts: provenance of the training run.
        name: the folder's name.

    Raises:
        ConfigError: the module has no LoRA, or peft is not installed.
    """
    refuse(form, config, target.info)
    _peft()
    kept = peft_files(tensors, config, target.info)
    files = {path.removeprefix(f"{FOLDER}/"): content for path, content in kept.items()}
    record = {
        "method": vars(config),
        "target": target.info.to_json(),
        "steps": facts.get("step"),
        "files": {ROWS: hashlib.sha256(files[ROWS]).hexdigest()},
    }
    return {**files, RECORD: as_json(record), "README.md": _card(name, target.info).encode()}


def read_folder(folder: Path, trained_by: str | None) -> Imported:
    """The module in a folder, to be run in an artifact's place.

    Raises:
        ConfigError: a trainer is named, or peft is not installed.
        ArtifactError: a file is missing or damaged, or the adapter uses what LookaheadKV cannot compute.
    """
    if trained_by is not None:
        raise ConfigError(f"trained_by={trained_by}: {folder} was written by longtrain; leave trained_by out")
    peft = _peft()
    try:
        record = read_json(folder / RECORD)
        if hashlib.sha256(read_bytes(folder / ROWS)).hexdigest() != record["files"][ROWS]:
            raise ValueError(f"{ROWS} is not what was exported (sha256 differs)")
        sketch = TargetSketch.from_json(record["target"])
        config = _config(peft, folder, Config(**record["method"]))
        tensors = {**load_file(folder / ROWS), **_lora(peft, folder)}
        module = LookaheadKV(config, sketch)
        tensors = {key: tensor for key, tensor in tensors.items() if not _idle(key, sketch)}
        module.load_state_dict(tensors)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError, LongtrainError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ArtifactError(f"{folder} cannot be read: {said}; export it again, or copy it whole") from None
    about = {"format": FORM, "trained_by": "longtrain", "folder": folder.name}
    return Imported(vars(config), tensors, sketch, about)


def verify_folder(folder: Path, target: Target | None, trained_by: str | None) -> list[str]:
    """Read a folder as `peft` does, and compare its facts with a target.

    Raises:
        ArtifactError: see `read_folder`.
        TargetMismatchError: the target has another size or vocabulary.
    """
    found = read_folder(folder, trained_by)
    said = [f"{len(found.tensors)} tensors, the LoRA as peft reads it"]
    if target is not None:
        found.target.check(target.info)
        said.append(f"shapes are those of {target.info.name}")
    return said


def _peft() -> ModuleType:
    """The package `peft`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError(
            f"format={FORM} needs the package peft; run: pip install 'longtrain[peft]'"
        ) from None
    return peft


def _config(peft: ModuleType, folder: Path, config: Config) -> Config:
    """The settings of the module, with rank, alpha and linears as `adapter_config.json` has them now.

    Raises:
        ValueError: an option of peft that LookaheadKV's rows do not compute, such as DoRA.
    """
    if not (folder / ADAPTER).is_file():
        raise ValueError(f"{ADAPTER} is missing")
    adapter = peft.PeftConfig.from_pretrained(str(folder)).to_dict()
    usual = peft.LoraConfig().to_dict()
    for key, value in adapter.items():
        if key not in OWN_KEYS and value != usual.get(key) and value:
            raise ValueError(f"{ADAPTER} has {key}={value}, which LookaheadKV does not compute")
    kind, names = adapter["peft_type"], adapter["target_modules"]
    if kind != "LORA" or not isinstance(names, list | set):
        raise ValueError(f"{ADAPTER} has peft_type={kind} and target_modules={names}; allowed: LORA, a list")
    linears = sorted(name.removesuffix("_proj") for name in names)
    alpha = float(adapter["lora_alpha"])
    return replace(config, lora_rank=adapter["r"], lora_alpha=alpha, lora_targets=linears)


def _lora(peft: ModuleType, folder: Path) -> dict[str, Tensor]:
    """A and B of every linear, by their names in `LookaheadKV`.

    Raises:
        ValueError: the file is missing; peft would look for it on the Hub.
    """
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{WEIGHTS} is missing")
    weights = peft.load_peft_weights(str(folder), device="cpu")
    return {key.removeprefix(PREFIX): tensor for key, tensor in weights.items()}


def _idle(key: str, info: TargetInfo) -> bool:
    """Whether a tensor is the LoRA of the last layer behind its attention scores, which nothing reads."""
    last = f"layers.{info.n_layers - 1}."
    return key.startswith((f"{last}mlp.", f"{last}self_attn.o_proj."))


def _card(name: str, info: TargetInfo) -> str:
    """The README.md of a folder."""
    target = Path(info.name).name if Path(info.name).is_dir() else info.name or "TARGET"
    return f"""---
tags: [lookaheadkv, kv-cache-eviction, lora, longtrain]
library_name: peft
---
# {name}

Lookahead tokens and their LoRA for **{target}** ({info.n_layers} layers, hidden {info.hidden_size}): they
predict which tokens of a prompt the answer will attend to, so that the others can be evicted from the KV
cache. The LoRA is for the lookahead tokens alone; merged into the model it would change every token.

```python
from peft import PeftModel

model = PeftModel.from_pretrained(base_model, "{name}")  # for the prompt: with model.disable_adapter()
```

`{ROWS}` holds the lookahead tokens' embeddings. longtrain runs the folder as it is:

```sh
longtrain generate artifact={name} target.path={target} evict.budget_tokens=128 prompt=TEXT
```

`longtrain export verify={name}` reads it as peft does.
"""


FORMATS = Formats(
    names=NAMES,
    patterns=(ADAPTER, WEIGHTS, ROWS, "longtrain_eviction.json", "longtrain/*"),
    reads=lambda folder: (folder / RECORD).is_file(),
    read=read_folder,
    refuse=refuse,
    write=adapter_files,
    verify=verify_folder,
    serves={FORM: "peft"},
)
