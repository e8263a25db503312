"""Shared by all tests: no network, one thread a process, no writing outside a test's own folder.

All tests together are spread over the cores, one worker each; a folder, a file or tests of a GPU are run in
one process.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    MPLBACKEND="Agg",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "LONGTRAIN_HOME", "HYDRA_FULL_ERROR"):
    os.environ.pop(name, None)

gc.set_threshold(10_000, 20, 50)  # each full round walks all imported libraries: by default, 15 % of the time

import pytest  # noqa: E402 (the environment comes first)
import torch  # noqa: E402

HERE = Path(__file__).parent
DEFAULT_MARKS = "not slow and not gpu"
"""The tests that pyproject.toml chooses where the command line has no `-m`."""
QUICK: dict[str, tuple[str, ...]] = {
    "decoding/test_evict.py": ("test_speculation_on_an_evicted_cache_changes_nothing",),
    "decoding/test_selector.py": ("test_speculation_repeats_the_text",),
    "decoding/test_verify.py": (),
    "e2e/test_exactness.py": (),
    "methods/dspark/test_dspark_runtime.py": ("test_greedy_output_is_the_targets_own",),
    "methods/eagle3/test_eagle3_runtime.py": ("test_greedy_output_is_the_targets_own",),
    "methods/longspec/test_runtime.py": ("test_greedy_output_is_the_targets_own",),
    "methods/magicdec/test_magicdec.py": ("test_the_text_is_the_targets_own",),
    "methods/prompt_lookup/test_prompt_lookup.py": (),
    "methods/quantspec/test_quantspec.py": ("test_batches_sampled_and_greedy_are_exact",),
    "test_first_words.py": (),
}
"""Tests of `pytest -m quick`, a first look: the exactness of each way of decoding, one whole method, and the
command line. File -> the functions of it; none: all of them."""
LONGEST = ("test_interpreted.py", "test_readme.py")
"""Files with tests of half a minute and more, which come first: at the end the other workers would wait."""
MOST_WORKERS = 8
"""Each worker imports torch and transformers anew, and holds 1 to 2 GB."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many workers `-n auto` means, which pyproject.toml says; `-n NUMBER` of the command line wins.

    One worker a core for all tests. None for chosen ones, since each would begin with seconds of imports;
    none for marked ones (`-m gpu`, `-m slow`), which want a GPU, or all cores, for themselves.
    """
    chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.keyword
    marked = config.option.markexpr != DEFAULT_MARKS
    if chosen or marked or config.option.collectonly:
        return 0
    workers = int(os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") or min(cores(), MOST_WORKERS))
    return workers if workers > 1 else 0


def cores() -> int:
    """Cores that this process may use: those it is bound to, or a container's limit."""
    from longtrain.cli import granted_cores

    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(bound, granted_cores(Path("/sys/fs/cgroup/cpu.max")) or bound)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Without a GPU its generators are not looked for, which takes a thousandth of a second each time."""
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session", autouse=True)
def _mounted_once() -> Iterator[None]:
    """`cli.mount()` reads all recipes, which takes longer than to compose one: not twice in a row.

    Where the words of a command differ, only recipes of which Hydra's store has another text are read again.
    """
    from longtrain import cli, methods
    from longtrain.prompt import store

    mount, read, last = cli.mount, store._read, []
    held: dict[str, tuple[Path, str]] = {}

    def once(words: Sequence[str] | None = None) -> None:
        now = [words, *methods.__path__]
        if words is not None or now != last:
            last.clear()
            mount(words)
            last[:] = now

    def read_once(folder: Path, name: str, suite: str) -> None:
        if held.get(name) != (folder, suite):
            read(folder, name, suite)
            held[name] = folder, suite

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "mount", once)
        patch.setattr(store, "_read", read_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _composed_once() -> Iterator[None]:
    """Hydra merges the groups of each command anew, which takes longer than most tests: here only once.

    Values that are typed come after that. A command with files of the user's own is composed as ever, and so
    is one after Hydra's store of recipes and methods has changed.
    """
    from hydra._internal import config_loader_impl
    from hydra._internal.defaults_list import DefaultsList
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    loader, usual = config_loader_impl.ConfigLoaderImpl, config_loader_impl.create_defaults_list
    merge, store = loader._compose_config_from_defaults_list, ConfigStore.store
    Plugins.instance()  # registers the reader of files
    reader: Any = SourcesRegistry.instance().resolve("file")
    read = reader.load_config
    folder = str(HERE.parent / "conf")
    shipped = {"pkg://hydra.conf", "structured://", f"file://{folder}"}
    files: dict[str, Any] = {}
    stored: dict[tuple[Any, str], Any] = {}
    lists: dict[Any, DefaultsList] = {}
    merged: dict[int, Any] = {}

    def read_once(self: Any, config_path: str) -> Any:
        if self.path != folder:
            return read(self, config_path)
        if config_path not in files:
            files[config_path] = read(self, config_path)
        return copy.deepcopy(files[config_path])

    def noted_store(self: ConfigStore, name: str, node: Any, group: str | None = None, **rest: Any) -> None:
        stored[group, name] = node if isinstance(node, type) else str(node)
        store(self, name, node, group, **rest)

    def chosen(override: Any, repo: Any) -> bool:
        group = repo.group_exists(override.key_or_group) and not isinstance(override.value(), dict)
        return override.is_sweep_override() or group

    def defaults_of(repo: Any, config_name: Any, overrides_list: Any, **rest: Any) -> DefaultsList:
        if not {source.full_path() for source in repo.get_sources()} <= shipped:
            return usual(repo, config_name, overrides_list, **rest)
        groups = [override for override in overrides_list if chosen(override, repo)]
        lines = tuple(override.input_line for override in groups)
        key = (config_name, lines, *sorted(rest.items()), frozenset(stored.items()))
        found = lists.get(key)
        if found is None:
            found = lists[key] = usual(repo, config_name, overrides_list, **rest)
        values = [override for override in overrides_list if override not in groups]
        return dataclasses.replace(found, config_overrides=values)

    def merged_of(self: Any, defaults: Any, repo: Any) -> Any:
        if not any(found.defaults is defaults for found in lists.values()):
            return merge(self, defaults, repo)
        if id(defaults) not in merged:
            merged[id(defaults)] = merge(self, defaults, repo)
        return copy.deepcopy(merged[id(defaults)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "load_config", read_once)
        patch.setattr(ConfigStore, "store", noted_store)
        patch.setattr(config_loader_impl, "create_defaults_list", defaults_of)
        patch.setattr(loader, "_compose_config_from_defaults_list", merged_of)
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return Path(__file__).parent.parent


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., CompletedProcess[str]]:
    """`run(*words)`: what `longtrain` with these words says, and its exit code, in this process."""
    from longtrain import cli

    def call(*words: str) -> CompletedProcess[str]:
        out, err, code = io.StringIO(), io.StringIO(), 0
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(tmp_path)
            patch.setattr(sys, "argv", ["longtrain", *words])
            try:
                cli.main()
            except SystemExit as stop:
                code = int(stop.code or 0)
        return CompletedProcess(words, code, out.getvalue(), err.getvalue())

    return call


def pytest_collection_finish() -> None:
    """Benchmarks collect garbage before each measurement: without the libraries, which stay anyway."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries that check at exit what is left find it collected."""
    gc.unfreeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the other files out of `pytest -m quick`: to import all of them takes as long as its tests."""
    if config.option.markexpr != "quick" or not collection_path.name.startswith("test_"):
        return None
    return None if _is_quick(collection_path) else True


def _is_quick(path: Path, name: str | None = None) -> bool:
    """Whether a file of tests, or the function of this name in it, is one of `QUICK`."""
    if not path.is_relative_to(HERE):
        return False
    names = QUICK.get(path.relative_to(HERE).as_posix())
    return names is not None and (name is None or not names or name in names)


def _mark_beyond_corners(items: list[pytest.Item]) -> None:
    """Mark as slow those of a product of parameters whose values all stand in others of it.

    It is for functions marked `corners`. The first of a product runs always, then whichever has most values
    that have not been seen, until none is left.
    """
    products: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("corners") and not any(map(item.get_closest_marker, ("slow", "gpu"))):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for product in products.values():
        values = {item: _values(item) for item in product}
        missing = set().union(*values.values())
        while missing:
            chosen = max(values, key=lambda item: len(missing & values[item]))
            missing -= values.pop(chosen)
        for item in values:
            item.add_marker(pytest.mark.slow)


def _values(item: pytest.Item) -> set[tuple[str, tuple[int, ...]]]:
    """What stands for the values of a test: one of each `parametrize` and of each fixture with parameters."""
    if not hasattr(item, "callspec"):
        raise pytest.UsageError(f"{item.nodeid} has no parameters, of which `corners` could leave any out")
    params: dict[str, object] = dict(item.callspec.params)
    marks = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [
        [name.strip() for name in names.split(",")] if isinstance(names, str) else names for names in marks
    ]
    groups += [[name] for name in params.keys() - {name for names in groups for name in names}]
    return {(",".join(names), tuple(id(params[name]) for name in names)) for names in groups}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tests, and slow ones; skip GPU tests, saying why, where there is no CUDA device.

    The longest ones come first.
    """
    _mark_beyond_corners(items)
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        name = getattr(item, "originalname", item.name)
        if _is_quick(item.path, name) and not any(map(item.get_closest_marker, ("slow", "gpu"))):
            item.add_marker(pytest.mark.quick)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
