"""Writes a retrieval head as a folder for SGLang's sparsity framework: weights, settings and a class.

SGLang passes its algorithms the tokens of a step but no hidden states, and uses one set per layer. So only
heads that read embeddings alone, and whose KV heads share a set, are supported.

Source: `sglang/srt/mem_cache/sparsity` of SGLang 0.5.23.
Shapes: L layers, G KV heads, V vocabulary, E hidden dim.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from longtrain import integrations
from longtrain.errors import ArtifactError, ConfigError
from longtrain.files import as_json
from longtrain.methods.rope import rotary_of
from longtrain.methods.spec import Formats, Imported
from longtrain.methods.specontext.config import EMBEDDING, Config, key_offset
from longtrain.methods.specontext.config import FORMATS as NAMES
from longtrain.methods.specontext.modules import RetrievalHead
from longtrain.methods.written_folders import read_written, record_of, shown_target

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo, TargetSketch
    from longtrain.targets.model import Target

(FORM,) = NAMES
ABOUT, WEIGHTS, CODE = "specontext.json", "model.safetensors", "specontext_sglang.py"
RECORD = "longtrain/record.json"
EMBEDDINGS, FREQUENCIES = "embed_tokens.weight", "inv_freq"
ONE_SET = "train with method.sets=1 method.n_kv_heads=1 method.mapping=calibrated"


def refuse(form: str, config: Config, info: TargetInfo | None) -> None:
    """Refuse a head that SGLang's interface does not support.

    Raises:
        TargetMismatchError: the target has sliding windows.
        ConfigError: it reads hidden states, or gives each KV head a set of its own.
    """
    if info is not None:
        info.require_full_layers(f"format={form}")
    if config.variant != EMBEDDING:
        raise ConfigError(
            f"format={form}: SGLang gives its selection algorithms tokens and no hidden states, and "
            f"method.variant={config.variant} reads the target's; {ONE_SET} method.variant={EMBEDDING}"
        )
    if config.mapping == "identity" and info is not None and info.n_kv_heads > 1:
        raise ConfigError(
            f"format={form}: SGLang reads one set in all KV heads of a layer, and method.mapping=identity "
            f"gives each of {info.n_kv_heads} its own; {ONE_SET}"
        )


def sglang_files(
    form: str, tensors: Mapping[str, Tensor], config: Config, target: Target, facts: dict[str, Any], name: str
) -> dict[str, bytes]:
    """Return the files of an exported folder, relative path -> content (`Formats.write`).

    Raises:
        ConfigError: SGLang's interface does not support the head.
    """
    info = target.info
    refuse(form, config, info)
    head = RetrievalHead(config, info)
    head.load_state_dict(dict(tensors))
    head = head.to(target.dtype)
    rotary = rotary_of(config, info)
    embed_VE = target.embed(torch.arange(info.vocab_size, device=target.device)).detach()
    about = {
        "set_of_layer": _set_of_layer(form, head.table_LG),
        "groups_of_layers": head.sets,
        "key_groups": head.key_sets,
        "heads": head.heads[0],
        "kv_heads": head.heads[1],
        "head_dim": head.dim,
        "rms_norm_eps": head.input_layernorm.eps,
        "shift": key_offset(config),
        "rope_scaling": rotary.scaling,
    }
    kept = {**head.state_dict(), EMBEDDINGS: embed_VE, FREQUENCIES: rotary.frequencies}
    weights = {key: tensor.detach().cpu().contiguous() for key, tensor in kept.items()}
    files = {
        ABOUT: as_json(about),
        WEIGHTS: save(weights, metadata={"format": "pt"}),
        CODE: (Path(integrations.__file__).parent / CODE).read_bytes(),
    }
    record = record_of(config, info, facts, files)
    return {**files, RECORD: record, "README.md": _card(name, config, info).encode()}


def verify_folder(folder: Path, target: Target | None, trained_by: str | None) -> list[str]:
    """Compare a folder with its record, and with a target.

    Raises:
        ArtifactError: a file is missing or changed, or the embeddings are another target's.
    """
    found = read_folder(folder, trained_by)
    said = [f"{len(found.tensors)} tensors as they were exported", "SGLang's interface serves the head"]
    if target is not None:
        found.target.check(target.info)
        embed_VE = load_file(folder / WEIGHTS)[EMBEDDINGS]
        own_VE = target.embed(torch.arange(target.info.vocab_size, device=target.device)).detach().cpu()
        if not torch.allclose(embed_VE.float(), own_VE.float(), rtol=1e-2, atol=1e-3):
            raise ArtifactError(f"{folder / WEIGHTS}: {EMBEDDINGS} is no copy of {target.info.name}'s")
        said.append("embeddings are the target's")
    return said


def read_folder(folder: Path, trained_by: str | None) -> Imported:
    """Read the head in a folder, to be used like an artifact's.

    Raises:
        ConfigError: `trained_by` is given.
        ArtifactError: the folder is damaged, or was changed after the export.
    """

    def build(method: dict[str, Any], sketch: TargetSketch) -> tuple[Config, dict[str, Tensor]]:
        config = Config(**method)
        refuse(FORM, config, sketch)
        tensors = load_file(folder / WEIGHTS)
        embed, _ = tensors.pop(EMBEDDINGS), tensors.pop(FREQUENCIES)
        if embed.shape != (sketch.vocab_size, sketch.hidden_size):
            raise ValueError(f"{EMBEDDINGS} is {tuple(embed.shape)}")
        RetrievalHead(config, sketch).load_state_dict(tensors)
        return config, tensors

    return read_written(folder, FORM, trained_by, RECORD, (ABOUT, WEIGHTS, CODE), build)


def _set_of_layer(form: str, table_LG: Tensor) -> list[int]:
    """Return the set that all KV heads of each layer read."""
    for layer, sets_G in enumerate(table_LG.tolist()):
        if len({*sets_G}) > 1:
            raise ConfigError(
                f"format={form}: SGLang reads one set in all KV heads of a layer, and those of layer {layer} "
                f"read sets {', '.join(map(str, sorted({*sets_G})))}; {ONE_SET}"
            )
    return [sets_G[0] for sets_G in table_LG.tolist()]


def _card(name: str, config: Config, info: TargetInfo) -> str:
    """Return the README.md of a folder."""
    target = shown_target(info)
    settings = {"algorithm": "specontext", "backend": "fa3", "page_size": 1, "top_k": 2048}
    settings |= {"min_sparse_prompt_len": 4096, "sinks": config.sinks, "window": config.window}
    settings |= {"head": name}
    return f"""---
tags: [specontext, sparse-attention, longtrain]
library_name: sglang
---
# {name}

A retrieval head for **{target}** ({info.n_layers} layers, hidden {info.hidden_size}), trained with
longtrain: it says before each decoding step which tokens of the text the attention reads. It works with that
target only.

`{CODE}` is an algorithm of SGLang's sparsity framework (`sglang.srt.mem_cache.sparsity`):

```python
import specontext_sglang

specontext_sglang.register()  # the factory now knows "specontext"
```

Its settings, as `--hisparse-config` takes them:

```json
{json.dumps(settings)}
```

SGLang 0.5.23 has the framework, and no attention backend of it asks the coordinator: serving needs a build
that calls `SparseCoordinator.attention_begin` and `attention_end` around attention. Without CUDA graphs.

`longtrain export verify={name}` compares the folder with its record.
"""


FORMATS = Formats(
    names=(FORM,),
    patterns=(ABOUT, WEIGHTS, CODE, "longtrain/*"),
    reads=lambda folder: (folder / ABOUT).is_file(),
    read=read_folder,
    refuse=refuse,
    write=sglang_files,
    verify=verify_folder,
    serves={FORM: "SGLang's sparsity framework"},
)
