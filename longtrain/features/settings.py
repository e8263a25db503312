"""The settings `features.*`: whether the target runs during training, and how its outputs are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longtrain.settings import Count, CountOrZero, Text, check, wrong

FormName = Literal["bf16", "int8"]


@dataclass(frozen=True)
class FeatureSettings:
    """Settings that decide how training obtains the target's features (`conf/features`).

    Args:
        mode: online: the target runs in every step and nothing is stored; fill: features that are not stored
            yet are computed, stored and used as they were stored; offline: everything is read, and the
            target's layers are not loaded.
        folder: folder of the stored features; None: online.
        form: bf16, or int8: 8 bits with a scale for each token (and head). None: as the folder has it.
        top_k: number of most probable tokens of the target's distribution that are stored in place of the LM
            head's input; 0: the input itself. None: as the folder has it.
        shard_mib: approximate size of a shard in MiB.
        dump: folder of hidden states that SpecForge or speculators dumped for the same documents and target;
            `fill` stores them before it computes the rest. None: there is none.
        dump_layers: layers in the dump other than the last one, lowest first (0-based, of their outputs).
    """

    mode: Literal["online", "fill", "offline"] = "online"
    folder: Text | None = None
    form: FormName | None = None
    top_k: CountOrZero | None = None
    shard_mib: Count = 256
    dump: Text | None = None
    dump_layers: tuple[CountOrZero, ...] = ()

    def __post_init__(self) -> None:
        check(self, "features")
        if self.dump is not None and (self.mode != "fill" or self.top_k):
            raise wrong("features.dump", self.dump, "null, or a folder with features=fill features.top_k=0")
