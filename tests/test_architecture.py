"""The house rules that a machine can check: who imports whom, who may import which package, file length."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "longtrain"

TIERS = [
    {"errors", "former_names", "log", "integrations"},
    {"settings", "files", "tables", "progress"},
    {"folders", "journals", "pickled"},
    {"plots", "assets", "provenance"},
    {"costs"},
    {"kernels", "layers", "losses", "chunked", "data"},
    {"cache"},
    {"targets"},
    {"features"},
    {"decoding"},
    {"methods"},
    {"artifact"},
    {"systems"},
    {"training", "evaluation", "bench"},
    {"config"},
    {"jobs"},
    {"prompt"},
    {"cli"},
    {"__main__"},
]
"""Left (earlier) may not import right (later). A new part needs a place here."""

SAME_TIER = {("layers", "kernels"), ("losses", "kernels")}
"""(importer, imported) pairs of one tier that are allowed; the parts of a tier do not know each other."""

FENCES = {
    "triton": ("kernels",),
    "flash_attn": ("kernels",),
    "liger_kernel": ("losses", "kernels", "targets"),
    "lightning": ("training", "data/packing/module.py"),
    "deepspeed": ("training",),
    "wandb": ("training",),
    "hydra": ("cli", "jobs", "prompt"),
    "omegaconf": ("cli", "config", "prompt"),
    "rich": ("prompt", "jobs", "training", "data", "tables", "progress"),
    "matplotlib": ("plots", "evaluation", "training", "bench"),
    "pydantic": ("settings",),
    "peft": ("methods/lookaheadkv/adapter.py",),
    "datasets": ("data",),
    "huggingface_hub": (
        "artifact",
        "targets",
        "data",
        "integrations/lookaheadkv_kvpress.py",
    ),
    "lm_eval": ("evaluation/lm_harness.py",),
    "starlette": ("jobs/serving/api.py", "jobs/serving/serve.py"),
    "uvicorn": ("jobs/serving/serve.py",),
    "kvpress": ("integrations/lookaheadkv_kvpress.py",),
}
"""Third-party package -> the parts of longtrain that may import it."""

TRANSFORMERS = {
    "targets": None,
    "integrations": None,
    "data": {"PreTrainedTokenizerBase", "AutoTokenizer"},
    "decoding": {"PreTrainedTokenizerBase"},
    "evaluation": {"PreTrainedTokenizerBase"},
    "artifact": {"PreTrainedTokenizerBase"},
    "jobs": {"PreTrainedTokenizerBase"},
    "methods": {"PreTrainedTokenizerBase"},
}
"""Part -> the names of transformers it may use; None: any. Modelling stays in `targets`."""

STANDALONE = {
    "integrations/longspec_vllm.py",
    "integrations/lookaheadkv_kvpress.py",
    "integrations/specontext_sglang.py",
}
"""Files for another library's users, who copy them: they may know its models and nothing of longtrain, and no
file of longtrain imports them."""

FILES = sorted(PACKAGE.rglob("*.py"))


BROUGHT = {"hydra", "omegaconf", "yaml", "tokenizers", "triton"}
"""Packages that a declared one cannot be without: hydra-core, transformers and torch."""


@functools.cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a file's text; parsed once for all checks, so it must not be changed."""
    return ast.parse(text)


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """All nodes of that tree; to walk it takes longer than to parse it."""
    return tuple(ast.walk(parsed(text)))


def part_of(file: Path) -> str:
    """The tier table's name of a file: `targets` of targets/model.py, `cli` of cli.py."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imports_of(text: str) -> list[tuple[str, str]]:
    """(module, name) of every import in a text, wherever it stands; name is empty for `import module`."""
    found = []
    for node in nodes(text):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"relative import in line {node.lineno}: {node.module}; write the whole name"
            )
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


def imports(file: Path) -> list[tuple[str, str]]:
    """What `imports_of` finds in a file."""
    return imports_of(file.read_text(encoding="utf-8"))


def tier(part: str) -> int:
    """Position of a part in the table."""
    return next(i for i, parts in enumerate(TIERS) if part in parts)


def forbidden(importer: str, imported: str) -> str:
    """Why one part may not import another; empty if it may."""
    if importer == imported or (importer, imported) in SAME_TIER:
        return ""
    if tier(imported) < tier(importer):
        return ""
    side = "beside" if tier(importer) == tier(imported) else "right of"
    return f"{importer} imports {imported}, which stands {side} it"


def test_every_part_has_a_place() -> None:
    parts = {part_of(file) for file in FILES} - {"__init__"}
    assert parts == set().union(*TIERS) & parts
    assert all(sum(part in tier_ for tier_ in TIERS) == 1 for part in parts)


def place(file: Path) -> str:
    """A file's path within the package."""
    return str(file.relative_to(PACKAGE))


def refused_imports(file: Path) -> list[str]:
    """Imports of longtrain's own parts that point the wrong way, with the reason."""
    importer, found = part_of(file), []
    for module, name in imports(file):
        if module.split(".")[0] != "longtrain":
            continue
        words = module.split(".")[1:] or [name]
        if words in ([""], ["__version__"]):
            continue  # the bare package: its version
        if importer == "__init__":
            found.append(f"longtrain/__init__.py imports {module}; importing it must cost nothing")
        elif why := forbidden(importer, words[0]):
            found.append(f"{place(file)}: {why} ({module})")
    return found


def unfenced_imports(file: Path) -> list[str]:
    """Imports of third-party packages outside the parts that may have them."""
    where, part, found = place(file), part_of(file), []
    for module, name in imports(file):
        package = module.split(".")[0]
        allowed = FENCES.get(package)
        if allowed is not None and part not in allowed and where not in allowed:
            found.append(f"{where} imports {package}; only {', '.join(allowed)} may")
        if package == "transformers" and where not in STANDALONE:
            names = TRANSFORMERS.get(part, set())
            if names is not None and name not in names:
                found.append(f"{where} imports {module}.{name}: models are built in targets")
    return found


def test_imports_point_left() -> None:
    refused = [line for file in FILES for line in refused_imports(file)]
    assert not refused, "\n".join(refused)


def test_third_party_fences() -> None:
    refused = [line for file in FILES for line in unfenced_imports(file)]
    assert not refused, "\n".join(refused)


def test_packages_that_are_imported_are_declared() -> None:
    """A package that is there because another one asked for it is gone with the other's update."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_").lower() for lines in lists for line in lines}
    known = declared | BROUGHT | sys.stdlib_module_names | {"longtrain"}
    undeclared = [
        f"{place(file)} imports {package}, which pyproject.toml does not name"
        for file in FILES
        if place(file) not in STANDALONE
        for package in sorted({module.split(".")[0] for module, _ in imports(file)} - known)
    ]
    assert not undeclared, "\n".join(undeclared)


def test_standalone_files_stand_alone() -> None:
    names = {f"longtrain.{where.removesuffix('.py').replace('/', '.')}" for where in STANDALONE}
    for file in FILES:
        where = str(file.relative_to(PACKAGE))
        for module, name in imports(file):
            assert {module, f"{module}.{name}"}.isdisjoint(names), f"{where} imports {module}"
            assert where not in STANDALONE or not module.startswith("longtrain"), f"{where} imports {module}"


def test_a_method_never_imports_another() -> None:
    files = list(PACKAGE.glob("methods/*/*.py"))
    assert files
    for file in files:
        own = ("longtrain", "methods", file.parent.name)
        for module, _ in imports(file):
            words = tuple(module.split("."))
            beside = words[:2] == own[:2] and len(words) > 2 and (PACKAGE / "methods" / words[2]).is_dir()
            assert not beside or words[:3] == own, f"{file.relative_to(PACKAGE)} imports {module}"


def test_config_modules_import_no_torch() -> None:
    for file in PACKAGE.glob("methods/*/config.py"):
        heavy = {module.split(".")[0] for module, _ in imports(file)} & {"torch", "transformers", "lightning"}
        assert not heavy, f"{file} imports {heavy}: composing a config must stay light"


@pytest.mark.parametrize("name", ["setup", "eval", "parts", "eval_setup", "features", "train_lock", "demo"])
def test_only_the_entries_of_a_job_take_the_whole_configuration(name: str) -> None:
    tree = ast.parse((PACKAGE / "jobs" / f"{name}.py").read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for one in functions:
        kinds = [
            ast.unparse(arg.annotation) for arg in (*one.args.args, *one.args.kwonlyargs) if arg.annotation
        ]
        assert "RunConfig" not in kinds or one.name in ("run", "check"), f"{name}.{one.name}"


def test_files_hold_one_idea() -> None:
    lines = {place(file): len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    long = {file: count for file, count in lines.items() if count > 400}
    assert not long, f"split these by their ideas: {long}"


def file_imports(file: Path, root: Path = PACKAGE) -> set[Path]:
    """The files of the package that a file imports, wherever the import stands, but not for types alone."""
    text = file.read_text(encoding="utf-8")
    for_types = {
        id(child)
        for node in nodes(text)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for child in ast.walk(statement)
    }
    found = set()
    for node in nodes(text):
        if id(node) in for_types:
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if place_of(name, root) else str(node.module) for name in names]
        found |= {place for name in names if (place := place_of(name, root)) and place != file}
    return found


def place_of(module: str, root: Path = PACKAGE) -> Path | None:
    """The file of a module of the package; None for other packages and for names that are no module."""
    head, *words = module.split(".")
    if head != "longtrain":
        return None
    plain = root.joinpath(*words)
    return next((one for one in (plain.with_suffix(".py"), plain / "__init__.py") if one.is_file()), None)


def circles(edges: dict[Path, set[Path]]) -> list[list[str]]:
    """Groups of files that import each other, by Tarjan's algorithm of strongly connected components."""
    sorter, found, low, stack = iter(range(10**6)), {}, {}, []
    groups: list[list[str]] = []

    def visit(one: Path) -> None:
        found[one] = low[one] = next(sorter)
        stack.append(one)
        for other in edges.get(one, ()):
            if other not in found:
                visit(other)
                low[one] = min(low[one], low[other])
            elif other in stack:
                low[one] = min(low[one], found[other])
        if low[one] == found[one]:
            group = []
            while one not in group:
                group.append(stack.pop())
            if len(group) > 1:
                groups.append(sorted(str(file.relative_to(PACKAGE.parent)) for file in group))

    for one in edges:
        if one not in found:
            visit(one)
    return groups


def test_no_files_import_each_other() -> None:
    assert not circles({file: file_imports(file) for file in FILES})


def class_names(files: list[Path]) -> dict[str, list[str]]:
    """Name of each class -> the files that define it."""
    found: dict[str, list[str]] = {}
    for file in files:
        for node in nodes(file.read_text(encoding="utf-8")):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(file))
    return found


def test_a_class_name_means_one_thing() -> None:
    files = [file for file in FILES if not file.match("methods/*/config.py")]
    assert not {name: places for name, places in class_names(files).items() if len(places) > 1}


def test_no_folder_hides_its_files() -> None:
    folders = {file.parent for file in FILES}
    crowded = {str(one.relative_to(PACKAGE.parent)): len(list(one.glob("*.py"))) for one in folders}
    assert not {name: count for name, count in crowded.items() if count > 20}


def docstrings(file: Path) -> list[tuple[int, str]]:
    """(line, text) of every docstring: of the module, of classes and functions, and below attributes."""
    found = []
    for node in nodes(file.read_text(encoding="utf-8")):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else []:
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                found += [(child.lineno, child.value.value)] if isinstance(child.value.value, str) else []
    return found


CLIPPED = re.compile(r"(Of|That|Those|Whose|None|Theirs)\b")
"""How a docstring opens that a stranger cannot read alone."""


def test_docstrings_can_be_read_alone() -> None:
    found = [
        f"{place(file)}:{line}: {text}"
        for file in FILES
        for line, text in docstrings(file)
        if CLIPPED.match(text.strip())
    ]
    assert not found, "\n".join(found)


def test_packages_say_what_they_hold() -> None:
    for file in PACKAGE.rglob("__init__.py"):
        text = ast.get_docstring(parsed(file.read_text(encoding="utf-8"))) or ""
        assert len(text.split()) >= 4, f"{file}: the docstring '{text}' says nothing that the name does not"
        assert text.strip(" .").lower() != file.parent.name, f"{file} repeats its folder's name"


METHODS = sorted(folder.parent.name for folder in PACKAGE.glob("methods/*/config.py"))
SUITES = {file.stem for file in (PACKAGE.parent / "conf" / "suite").glob("*.yaml")}
"""Names of suites, which users type and which may be those of methods."""
BLIND = sorted([*PACKAGE.glob("bench/**/*.py"), *PACKAGE.glob("jobs/**/*.py")])
"""Files that serve every method and know none by name."""


def named_methods(file: Path) -> list[str]:
    """Where a file names a method: in a string, by looking into a method's config, or by an import."""
    text = file.read_text(encoding="utf-8")
    words = {
        node.value for node in nodes(text) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    said = {line for _, line in docstrings(file)} | SUITES
    found = sorted(word for word in words - said for name in METHODS if re.search(rf"\b{name}\b", word))
    if re.search(r"(hasattr|getattr)\(\s*(self\.)?config\b", text):
        found.append("it looks into a config; ask the method's spec instead")
    own = re.compile(rf"longtrain\.methods\.({'|'.join(METHODS)})\b")
    found += [f"import of {module}" for module, _ in imports(file) if own.match(module)]
    return [f"{place(file)}: {what}" for what in found]


def test_jobs_and_bench_know_no_method() -> None:
    assert BLIND
    found = [line for file in BLIND for line in named_methods(file)]
    assert not found, "\n".join(found)


def test_rules_of_settings_stand_in_annotations() -> None:
    counts = {str(file): file.read_text(encoding="utf-8").count("allowed:") for file in FILES}
    assert sum(counts.values()) <= 90, sorted(counts.items(), key=lambda item: -item[1])[:10]


def test_one_error_for_a_target_without_tokenizer() -> None:
    said = [file for file in FILES if "has no tokenizer, so" in file.read_text(encoding="utf-8")]
    assert [str(file.relative_to(PACKAGE)) for file in said] == ["targets/model.py"]


def test_the_checks_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "right of" in forbidden("cache", "targets")
    assert "beside" in forbidden("training", "evaluation")
    assert not forbidden("jobs", "training")
    file = tmp_path / "x.py"
    file.write_text("def f():\n    import lightning.pytorch\n    from longtrain.jobs import JOBS\n")
    assert imports(file) == [("lightning.pytorch", ""), ("longtrain.jobs", "JOBS")]
    wrong = PACKAGE / "cache" / "x.py"
    wrong_text = "from longtrain.targets import model\nimport hydra\nfrom transformers import AutoModel\n"
    monkeypatch.setattr(Path, "read_text", lambda *args, **keys: wrong_text)
    assert refused_imports(wrong) == [
        "cache/x.py: cache imports targets, which stands right of it (longtrain.targets)"
    ]
    assert len(unfenced_imports(wrong)) == 2
    wrong_text = "from longtrain.methods.eagle3 import spec\nkind = getattr(config, 'eagle3')\n"
    assert len(named_methods(wrong)) == 3
    monkeypatch.undo()
    a, b, c = (PACKAGE / name for name in ("a.py", "b.py", "c.py"))
    assert circles({a: {b}, b: {a}, c: {a}}) == [["longtrain/a.py", "longtrain/b.py"]]
    assert not circles({a: {b}, b: {c}, c: set()})
    file.write_text('class A:\n    """Of them."""\n    b = 1\n    """None: it is."""\n')
    assert [CLIPPED.match(text) is not None for _, text in docstrings(file)] == [True, True]
    assert class_names([file, file])["A"] == [str(file), str(file)]
