"""LookaheadKV as an adapter folder of `peft`: `export format=peft` writes one, `artifact=FOLDER` reads one.

The folder contains the files that `peft_files` writes into an artifact's `peft/`, and the settings and target
sizes from which the module is rebuilt. The LoRA is read with peft, so an adapter that was trained further and
saved with `PeftModel.save_pretrained` beside the other files can be read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor

from longtrain.errors import ConfigError, missing_package
from longtrain.methods.lookaheadkv.config import FORMATS as NAMES
from longtrain.methods.lookaheadkv.config import Config
from longtrain.methods.lookaheadkv.modules import LookaheadKV
from longtrain.methods.lookaheadkv.peft_files import EMBEDDINGS, FOLDER, PREFIX, peft_files
from longtrain.methods.spec import Formats, Imported
from longtrain.methods.written_folders import read_written, record_of, shown_target

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo, TargetSketch
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
        ConfigError: there is no LoRA that peft could load.
    """
    if not config.linears():
        raise ConfigError(
            f"format={form}: the module was trained with method.lora_targets=none and has no LoRA; "
            "leave format out"
        )


def adapter_files(
    form: str, tensors: Mapping[str, Tensor], config: Config, target: Target, facts: dict[str, Any], name: str
) -> dict[str, bytes]:
    """Return the files of an exported folder, relative path -> content (`Formats.write`).

    Raises:
        ConfigError: the module has no LoRA, or peft is not installed.
    """
    refuse(form, config, target.info)
    _peft()
    kept = peft_files(tensors, config, target.info)
    files = {path.removeprefix(f"{FOLDER}/"): content for path, content in kept.items()}
    record = record_of(config, target.info, facts, {ROWS: files[ROWS]})
    return {**files, RECORD: record, "README.md": _card(name, target.info).encode()}


def read_folder(folder: Path, trained_by: str | None) -> Imported:
    """Read the module in a folder, to be used like an artifact's.

    Raises:
        ConfigError: `trained_by` is given, or peft is not installed.
        ArtifactError: a file is missing or damaged, or the adapter uses options that LookaheadKV does not
            support.
    """
    peft = _peft()

    def build(method: dict[str, Any], sketch: TargetSketch) -> tuple[Config, dict[str, Tensor]]:
        config = _config(peft, folder, Config(**method))
        tensors = {**load_file(folder / ROWS), **_lora(peft, folder)}
        module = LookaheadKV(config, sketch)
        tensors = {key: tensor for key, tensor in tensors.items() if not _idle(key, sketch)}
        module.load_state_dict(tensors)
        return config, tensors

    return read_written(folder, FORM, trained_by, RECORD, (ROWS,), build)


def verify_folder(folder: Path, target: Target | None, trained_by: str | None) -> list[str]:
    """Read a folder with `peft`, and compare its sizes with a target's.

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
    """Import the package `peft`."""
    try:
        import peft
    except ImportError:
        raise missing_package(f"format={FORM}", "peft") from None
    return peft


def _config(peft: ModuleType, folder: Path, config: Config) -> Config:
    """Return the module's settings, with rank, alpha and linears from the current `adapter_config.json`."""
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
    """Return A and B of every linear, under their names in `LookaheadKV`.

    Raises:
        ValueError: the file is missing (peft would search for it on the Hub).
    """
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{WEIGHTS} is missing")
    weights = peft.load_peft_weights(str(folder), device="cpu")
    return {key.removeprefix(PREFIX): tensor for key, tensor in weights.items()}


def _idle(key: str, info: TargetInfo) -> bool:
    """Return True for LoRA that the scores of no layer depend on (`LookaheadKV`), and so is unused."""
    last = info.full_layers[-1]
    unused = (f"layers.{index}." for index in range(last + 1, info.n_layers))
    return key.startswith((f"layers.{last}.mlp.", f"layers.{last}.self_attn.o_proj.", *unused))


def _card(name: str, info: TargetInfo) -> str:
    """Return the README.md of a folder."""
    target = shown_target(info)
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
