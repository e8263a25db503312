"""Rows that the kvpress wrapper keeps of a share, without kvpress: as many as Longtrain's own budget."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import torch

from longtrain.decoding.evict import Budget


def test_the_press_keeps_as_many_rows_as_a_budget_of_that_share(root, monkeypatch):
    kvpress = ModuleType("kvpress")
    kvpress.ScorerPress = object
    monkeypatch.setitem(sys.modules, "kvpress", kvpress)
    path = root / "longtrain" / "integrations" / "lookaheadkv_kvpress.py"
    spec = importlib.util.spec_from_file_location("press_alone", path)
    press = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "press_alone", press)
    spec.loader.exec_module(press)
    for percent in range(1, 100):
        for length in (3, 100, 4097, 12800):
            keys = torch.arange(float(length)).view(1, 1, length, 1)
            given = SimpleNamespace(budget=None, compression_ratio=(100 - percent) / 100)
            given.score = lambda *_, n=length: torch.arange(float(n)).view(1, 1, n)
            kept, _ = press.LookaheadKVPress.compress(given, None, None, keys, keys, None, {})
            rows = Budget(ratio=percent / 100).of(length)
            assert rows == max(1, percent * length // 100)
            assert torch.equal(kept, keys[:, :, length - rows :])
