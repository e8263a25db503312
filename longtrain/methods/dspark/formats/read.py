"""Reads block drafts trained by speculators, DeepSpec or longtrain.

A missing key takes the format's documented default. If engines disagree about a default, the folder alone
does not determine what was trained, and `trained_by` must be given.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from longtrain.layers import shapes_alone
from longtrain.methods.draft_folders import CONFIG, matching, read_config, read_tensors
from longtrain.methods.dspark.config import SELECTOR, Config
from longtrain.methods.dspark.formats.names import (
    DFLASH2,
    DSPARK,
    FILL_IN,
    FLAT,
    OPTIONS,
    SPECULATORS,
    BlockKind,
    kind_of,
)
from longtrain.methods.dspark.formats.write import MASK
from longtrain.methods.dspark.modules import DSparkDraft
from longtrain.methods.folder_keys import (
    Keys,
    LayerInputs,
    LayerOutputs,
    building,
    described_layer,
    layer_sizes,
    sketch_of,
    trainer_of,
)
from longtrain.methods.spec import Imported
from longtrain.methods.vocabulary import IDS, MARKS, OFFSETS, read_vocabulary
from longtrain.settings import Count, CountOrZero
from longtrain.targets.info import TargetSketch
from longtrain.targets.rotary import Rotary

TRAINERS = ("longtrain", "speculators", "deepspec")
"""Known trainers, the values of `trained_by=`."""
COPIES = {"embed_tokens.weight": "embed_weight", "lm_head.weight": "head_weight"}
"""Tensors of a folder that must be copies of the target's -> the target's attribute; the LM head of a
draft with a vocabulary of its own is none."""
LEFT_OUT = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight", MARKS, OFFSETS)
"""Tensors of a folder that are not part of the draft; nor is an LM head over the whole vocabulary."""
ONLY: dict[str, tuple[Any, tuple[str, ...]]] = {
    "false or 0": (
        False,
        (
            *("attention_bias", "add_swa_attention_sink_bias", "attention_sink_bias"),
            *("final_logit_softcapping", "use_gemma_norm", "use_swa"),
        ),
    ),
    "true": (True, ("is_neox_style", "rope_is_neox_style", "use_aux_hidden_state")),
    "1": (1, ("logit_scale", "output_multiplier", "partial_rotary_factor")),
    "vanilla": ("vanilla", ("markov_head_type",)),
    "null": (None, ("attention_value_scale", "mrope_section", "projector_type")),
}
"""What longtrain's draft computes -> value, besides null, of keys that can say something else."""


@dataclasses.dataclass(frozen=True)
class BlockKeys:
    """Interprets the keys of one folder.

    Args:
        folder: the folder, for messages.
        kind: its format, and the kind of draft.
        raw: its `config.json`.
        layer: the keys that describe the layers: `raw`, or a part of it.
        nested: `dflash_config`, which engines read first.
        trainer: the trainer; None: unknown.
    """

    folder: Path
    kind: BlockKind
    raw: Keys
    layer: Keys
    nested: Keys
    trainer: str | None

    @classmethod
    def of(cls, folder: Path, trained_by: str | None) -> BlockKeys:
        """Read the keys of a folder.

        Raises:
            ConfigError: `trained_by` is not a known trainer.
            ArtifactError: no such draft, the folder names an unknown trainer, or does not describe its
                layers.
        """
        kind, raw = kind_of(folder), Keys(folder / CONFIG, read_config(folder))
        if kind is None:
            raise raw.error(f"describes no DSpark or DFlash draft; allowed: {SPECULATORS}, {FLAT} folders")
        trainer = trainer_of(raw, trained_by, TRAINERS)
        layer = described_layer(raw, kind.form == SPECULATORS)
        return cls(folder, kind, raw, layer, raw.part("dflash_config"), trainer)

    def config(self) -> Config:
        """Return the hyperparameters."""
        self._refuse_others()
        raw, layer = self.raw, self.layer
        anchor, rows = self.sample_from_anchor(), self.one("block_size", Count)
        counts_anchor = not anchor and (self.kind.form == SPECULATORS or self.kind.draft in FILL_IN)
        rank = raw.get("markov_rank", CountOrZero, 0) if self.kind.draft == DSPARK else 0
        confident = bool(rank) and raw.get("enable_confidence_head", bool, False)
        words = "none" if not rank else "markov_confidence" if confident else "markov"
        heads = {"heads": words, "markov_rank": rank or Config.markov_rank}
        whole = layer.get("vocab_size", Count)
        heads = self.options(whole) if self.kind.draft == DFLASH2 else heads
        size = raw.get("draft_vocab_size", Count, whole)
        if size > whole:
            raise raw.wrong("draft_vocab_size", f"1 to {whole}, the target's tokens (vocab_size)")
        return Config(
            layers=self.layers(),
            block_size=rows - counts_anchor,
            n_layers=layer.get("num_hidden_layers", Count),
            windows=self.windows(),
            sample_from_anchor=anchor,
            draft_vocab_size=0 if size == whole else size,
            objective=Config.objective if size == whole else "lk_hybrid",
            mask_token=self.one("mask_token_id", CountOrZero),
            **heads,
            **layer_sizes(raw, layer),
        )

    def options(self, whole: int) -> dict[str, Any]:
        """Return the hyperparameters of DFlash2's convolutions and selector, by name; `whole`: all tokens."""
        taps, group, rank, top = (self.one(key, Count) for key in OPTIONS)
        if top > whole:
            said = self.nested if self.nested.has("selector_top_k") else self.raw
            raise said.wrong("selector_top_k", f"1 to {whole}, the target's tokens (vocab_size)")
        own = {"conv_taps": taps, "conv_group": group, "selector_top": top}
        return {"heads": SELECTOR, "markov_rank": rank, **own}

    def sketch(self, config: Config) -> TargetSketch:
        """Return the target's sizes as stated in the folder."""
        assert config.layers is not None
        return sketch_of(
            self.raw,
            self.layer,
            config,
            n_layers=max(config.layers) + 2,
            qk_norm=True,
            bias=False,
            positions=32768,
        )

    def one(self, key: str, kind: Any) -> Any:
        """Return a key that engines look for in `dflash_config` first; both places must agree."""
        found = [part.get(key, kind) for part in (self.nested, self.raw) if part.has(key)]
        if not found:
            raise self.raw.wrong(key, "a whole number")
        if found[0] != found[-1]:
            raise self.raw.error(f"{key}={found[-1]}, and {found[0]} in dflash_config; make them equal")
        return found[0]

    def layers(self) -> list[int]:
        """Return the target layers whose outputs are read."""
        if self.kind.form == SPECULATORS:
            return [one - 1 for one in self.raw.get("aux_hidden_state_layer_ids", LayerInputs)]
        outputs = self.one("target_layer_ids", LayerOutputs)
        inputs = self.raw.get("eagle_aux_hidden_state_layer_ids", LayerInputs | None)
        if inputs is not None and [one - 1 for one in inputs] != outputs:
            raise self.raw.error(
                f"eagle_aux_hidden_state_layer_ids={inputs} counts inputs of layers, target_layer_ids="
                f"{outputs} outputs: they must differ by one; vLLM reads the former, SGLang the latter"
            )
        return list(outputs)

    def sample_from_anchor(self) -> bool:
        """Return True if the anchor's row predicts.

        Raises:
            ArtifactError: engines disagree on what a missing key means, or a DFlash draft says true.
        """
        fills_in = self.kind.draft in FILL_IN
        places = (self.nested, self.raw) if self.kind.form == FLAT and fills_in else (self.raw,)
        for keys in places:
            if keys.has("sample_from_anchor"):
                said = keys.get("sample_from_anchor", bool)
                if said and fills_in:
                    raise keys.wrong("sample_from_anchor", "false: engines read DFlash as fill-in alone")
                return bool(said)
        if fills_in or self.trainer in ("speculators", "deepspec"):
            return self.kind.draft == DSPARK
        raise self.raw.error(
            "sample_from_anchor is missing: vLLM reads a speculators folder as false, its class and all "
            "others as true, and acceptance falls to nearly nothing with the wrong one; say who trained "
            "it, trained_by=speculators or trained_by=deepspec (true), or add the key"
        )

    def windows(self) -> list[int | None] | None:
        """Return the tokens before a block that each layer sees."""
        types = self.layer_types()
        if "sliding_attention" not in types:
            return None
        size = self.layer.get("sliding_window", Count)
        seen = size - 1 if self.kind.form == FLAT else size
        return [seen if one == "sliding_attention" else None for one in types]

    def layer_types(self) -> list[str]:
        """Return the kind of each layer's attention."""
        count = self.layer.get("num_hidden_layers", Count)
        types = self.layer.get("layer_types", list[str], ["full_attention"] * count)
        if len(types) != count or not {*types} <= {"full_attention", "sliding_attention"}:
            raise self.layer.wrong("layer_types", f"full_attention or sliding_attention for {count} layers")
        return types

    def trained_causal(self) -> list[bool]:
        """Return for each layer whether a block's rows see only those before them, as it was trained."""
        slides = [one == "sliding_attention" for one in self.layer_types()]
        if self.kind.form == FLAT:
            return self.served_causal()
        whole = self.raw.get("sliding_window_non_causal", bool, self.kind.draft == DFLASH2)
        return [one and not whole for one in slides]

    def served_causal(self) -> list[bool]:
        """Return the same as vLLM 0.33 serves it; SGLang 0.5.23 reads flat folders alike."""
        slides = [one == "sliding_attention" for one in self.layer_types()]
        said = self.layer.get("is_causal", bool | None)
        if said is None and self.kind.form == FLAT:
            said = self.nested.get("causal", bool | None)
        if said is None and self.kind.form == SPECULATORS and self.kind.draft in FILL_IN:
            said = not self.raw.get("sliding_window_non_causal", bool, True)
        return slides if said is None else [said] * len(slides)

    def _refuse_others(self) -> None:
        """Refuse drafts that compute something else than longtrain's."""
        for keys in (self.raw, self.layer, self.nested, self.layer.part("rope_parameters")):
            for key in OPTIONS if self.kind.draft != DFLASH2 else ():
                if keys.has(key) and keys.values[key]:
                    raise keys.wrong(key, "0, or no such key: engines ignore it but in DFlash2")
            for word, (value, names) in ONLY.items():
                for key in names:
                    if keys.has(key) and keys.values[key] != value:
                        raise keys.wrong(key, word)
        if self.raw.get("enable_confidence_head", bool, False) and not self.raw.get(
            "confidence_head_with_markov", bool, False
        ):
            raise self.raw.wrong("confidence_head_with_markov", "true, where there is a confidence head")
        if any(self.trained_causal()):
            raise self.raw.error(
                "the rows of a block see only those before them in some layers, and longtrain's see all; "
                "nothing but the engine runs such a draft (is_causal, sliding_window_non_causal)"
            )


def left_out(name: str, *, own_head: bool) -> bool:
    """Return True for a tensor that is not part of a draft with or without an LM head of its own."""
    copied = name == "lm_head.weight" and not own_head
    return copied or name in LEFT_OUT or name.endswith("rotary_emb.inv_freq")


def read_folder(folder: Path, trained_by: str | None) -> Imported:
    """Read the draft in a folder of either format; `trained_by` is needed where that does not say enough.

    Raises:
        ConfigError: the trainer is unknown.
        ArtifactError: the folder is damaged, holds another kind of draft, or is ambiguous without
            `trained_by`.
    """
    keys = BlockKeys.of(folder, trained_by)
    with building(keys.raw):
        config = keys.config()
        sketch = keys.sketch(config)
        with shapes_alone():
            module = DSparkDraft(config, sketch)
        Rotary(sketch.rope, head_dim=sketch.head_dim, max_positions=sketch.max_positions)
    mask = config.mask_token or 0
    if mask >= sketch.vocab_size:
        raise keys.raw.wrong("mask_token_id", f"0 to {sketch.vocab_size - 1}, the target's tokens")
    shapes = {name: tuple(part.shape) for name, part in module.state_dict().items()}
    expected = {name: shape for name, shape in shapes.items() if name not in (MASK, IDS)}
    found = {name: (name.removeprefix("model."), part) for name, part in read_tensors(folder).items()}
    size, own = config.draft_vocab_size, {MASK: torch.tensor([mask])}
    if size:
        maps = dict(found.values())
        own[IDS] = read_vocabulary(maps, size=size, whole=sketch.vocab_size, where=folder)
    named = [
        (outer, name, x) for outer, (name, x) in found.items() if not left_out(name, own_head=bool(size))
    ]
    tensors = matching(folder, expected, named) | own
    about = {"format": keys.kind.form, "trained_by": keys.trainer or "not stated", "folder": folder.name}
    return Imported(dataclasses.asdict(config), tensors, sketch, about)
