"""The keys of `features`: whether the target runs, and what is kept of what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longtrain.settings import Count, CountOrZero, Text, check, wrong

FormName = Literal["bf16", "int8"]


@dataclass(frozen=True)
class FeatureSettings:
    """How training gets the target's features (`conf/features`).

    Args:
        mode: online: the target runs in every step and nothing is kept; fill: what is not stored yet is
            computed, stored and used as it was stored; offline: everything is read, and the target's layers
            are not loaded.
        folder: of the stored features; None: online.
        form: bf16, or int8: 8 bits with a scale for each token (and head). None: as the folder has it.
        top_k: likeliest tokens of the target's law that are kept in the place of the LM head's input; 0: the
            input itself. None: as the folder has it.
        shard_mib: MiB of features in a file, about.
        dump: folder of hidden states that SpecForge or speculators dumped for the same documents and target;
            `fill` stores them before it computes the rest. None: there is none.
        dump_layers: layers that the dump holds beside the last one, lowest first (0-based, of their outputs).
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
