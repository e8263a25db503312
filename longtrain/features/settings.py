"""The settings `features.*`: whether the target runs during training, and how its outputs are stored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longtrain.errors import ConfigError
from longtrain.settings import Count, CountOrZero, Text, check, wrong

FormName = Literal["bf16", "int8"]


@dataclass(frozen=True)
class FeatureSettings:
    """Settings that decide how training obtains the target's features (`conf/features`).

    Args:
        mode: online: the target runs in every step and nothing is stored; fill: features that are not stored
            yet are computed, stored and used as they were stored; offline: everything is read, and the
            target's layers are not loaded; engine: as offline, from hidden states that a serving engine
            wrote.
        folder: folder of the stored features, or of the engine's files; None: online.
        form: bf16, or int8: 8 bits with a scale for each token (and head). None: as the folder has it.
        top_k: number of most probable tokens of the target's distribution that are stored in place of the LM
            head's input; 0: the input itself. None: as the folder has it.
        shard_mib: approximate size of a shard in MiB.
        dump: folder of hidden states that SpecForge or speculators dumped for the same documents and target;
            `fill` stores them before it computes the rest. None: there is none.
        dump_layers: layers in the dump other than the last one, lowest first (0-based, of their outputs).
        layer_ids: with `engine`, the layers in its files by vLLM's ids: 0 is the embeddings, k the output of
            the k-th layer. None: those that the method reads, and the last layer's.
    """

    mode: Literal["online", "fill", "offline", "engine"] = "online"
    folder: Text | None = None
    form: FormName | None = None
    top_k: CountOrZero | None = None
    shard_mib: Count = 256
    dump: Text | None = None
    dump_layers: tuple[CountOrZero, ...] = ()
    layer_ids: tuple[CountOrZero, ...] | None = None

    def __post_init__(self) -> None:
        check(self, "features")
        if self.dump is not None and (self.mode != "fill" or self.top_k):
            raise wrong("features.dump", self.dump, "null, or a folder with features=fill features.top_k=0")
        if self.mode != "engine":
            if self.layer_ids is not None:
                raise wrong("features.layer_ids", [*self.layer_ids], "null, or ids with features=engine")
        elif self.form is not None or self.top_k:
            raise ConfigError(
                "features=engine reads states as the engine wrote them; leave features.form and "
                "features.top_k out"
            )

    @property
    def without_layers(self) -> bool:
        """True if the target's layers are not loaded."""
        return self.mode in ("offline", "engine")

    def check_states(self) -> None:
        """Refuse a folder without an engine's files; other modes pass.

        Raises:
            ConfigError: there is no folder, or no safetensors file in it.
        """
        if self.mode == "engine" and not any(Path(str(self.folder)).expanduser().rglob("*.safetensors")):
            raise ConfigError(
                f"features.folder={self.folder} holds no hidden states of an engine (*.safetensors); pass "
                "features=engine:FOLDER, the shared_storage_path of vLLM or --output of speculators"
            )
