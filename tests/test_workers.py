"""How many processes a plain `pytest` takes, which tests/conftest.py says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

FOUND = importlib.util.spec_from_file_location("root_conftest", Path(__file__).with_name("conftest.py"))
assert FOUND is not None and FOUND.loader is not None
conftest = importlib.util.module_from_spec(FOUND)
FOUND.loader.exec_module(conftest)
PATHS, TYPED = pytest.Config.ArgsSource.TESTPATHS, pytest.Config.ArgsSource.ARGS


def asked(source: object = PATHS, **options: object) -> int:
    usual = {"keyword": "", "markexpr": conftest.DEFAULT_MARKS, "collectonly": False}
    config = SimpleNamespace(args_source=source, option=SimpleNamespace(**{**usual, **options}))
    return conftest.pytest_xdist_auto_num_workers(config)


def test_all_tests_take_a_worker_a_core_and_chosen_ones_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    for cores, workers in ((1, 0), (2, 2), (64, 8)):
        monkeypatch.setattr(conftest, "cores", lambda cores=cores: cores)
        assert asked() == workers
        assert asked(TYPED) == asked(keyword="loss") == asked(markexpr="gpu") == asked(markexpr="slow") == 0
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "3")
    assert asked() == 3


def test_the_configuration_asks_for_it(pytestconfig: pytest.Config) -> None:
    words = pytestconfig.getini("addopts")
    assert words[words.index("-n") + 1] == "auto" and words[words.index("-m") + 1] == conftest.DEFAULT_MARKS
