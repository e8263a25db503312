"""Code of an installed environment: which packages are taken, and what the manifest says of them."""

import hashlib
import json

import pytest

from longtrain.data.config import SourceConfig
from longtrain.data.packing.prepare import prepare
from longtrain.data.read import sources
from longtrain.data.read.licences import permissive
from longtrain.data.read.sources import documents, inputs
from longtrain.errors import DataError
from tests.data.test_preparation import config


def install(base, name, metadata, *, record=True, version="1.0"):
    """A package with two modules, as pip installs it."""
    modules = {
        f"{name}/__init__.py": f"'''{name}, a package.'''\n",
        f"{name}/work.py": f"def {name}():\n    pass\n",
    }
    for path, text in modules.items():
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / path).write_text(text)
    info = base / f"{name}-{version}.dist-info"
    if metadata is not None:
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{metadata}\n"
        )
        if record:
            (info / "RECORD").write_text("".join(f"{path},sha256=x,1\n" for path in modules))


@pytest.fixture
def packages(tmp_path):
    base = tmp_path / "site-packages"
    install(base, "free", "License-Expression: MIT")
    install(base, "bound", "License-Expression: GPL-3.0-only")
    install(base, "silent", "Summary: says nothing")
    install(base, "bare", None)
    install(base, "unlisted", "License-Expression: MIT", record=False)
    return base


def read(where, **options):
    source = SourceConfig("jsonl", str(where), kind="code", **options)
    found = inputs(source)
    return [document.name for document in documents(source, found)], found


def test_permissive_packages_are_taken_and_no_others(packages):
    names, found = read(packages)
    assert names == ["free/__init__.py", "free/work.py"]
    assert found["packages"] == [
        {"name": "bound", "version": "1.0", "licence": "GPL-3.0-only", "permissive": False, "files": 2},
        {"name": "free", "version": "1.0", "licence": "MIT", "permissive": True, "files": 2},
        {"name": "silent", "version": "1.0", "licence": "", "permissive": False, "files": 2},
    ]


def test_any_takes_every_package(packages):
    names, found = read(packages, licences="any")
    assert len(names) == 10 and "packages" not in found


def test_a_virtual_environment_is_searched_for_its_packages_and_other_code_is_read(packages, tmp_path):
    (tmp_path / "mine.py").write_text("x = 1\n")
    names, _ = read(tmp_path)
    assert names == ["mine.py", "site-packages/free/__init__.py", "site-packages/free/work.py"]


def test_a_source_tree_has_no_licence_to_ask_for(tmp_path):
    (tmp_path / "mine.py").write_text("x = 1\n")
    names, found = read(tmp_path)
    assert names == ["mine.py"] and "packages" not in found


def test_an_environment_without_any_metadata_is_no_source_tree(tmp_path):
    base = tmp_path / "lib" / "site-packages"
    install(base, "bare", None)
    for where in (base, tmp_path):
        with pytest.raises(DataError, match="2 files of no package are left out"):
            read(where)
    (tmp_path / "mine.py").write_text("x = 1\n")
    assert read(tmp_path)[0] == ["mine.py"]


def test_an_environment_without_a_permissive_package_is_refused(tmp_path):
    install(tmp_path, "bound", "License: GPL")
    with pytest.raises(DataError, match=r"no file of a package .* permissive licence .*licences: any"):
        read(tmp_path)


def test_the_manifest_lists_every_file_with_its_hash(packages, tokenizer, tmp_path):
    asked = config(sources=[{"jsonl": str(packages), "kind": "code"}], min_doc_tokens=2)
    folder = prepare(asked, tokenizer, home=tmp_path)
    (source,) = json.loads((folder / "manifest.json").read_text())["sources"]
    expected = {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in (packages / "free").iterdir()
    }
    assert {file["path"]: file["sha256"] for file in source["inputs"]["files"]} == expected
    assert [one["name"] for one in source["inputs"]["packages"] if one["permissive"]] == ["free"]


@pytest.mark.parametrize(
    ("metadata", "taken"),
    [
        ("License-Expression: Apache-2.0 AND MIT", True),
        ("License-Expression: Apache-2.0 AND Apache-2.0 WITH LLVM-exception AND BSL-1.0", True),
        ("License-Expression: GPL-2.0-only OR MIT", True),
        ("License-Expression: MIT AND (GPL-2.0-only OR LGPL-3.0-only)", False),
        ("License-Expression: MIT AND (GPL-2.0-only OR BSD-3-Clause)", True),
        ("License-Expression: MPL-2.0 AND MIT", False),
        ("License-Expression: LicenseRef-Own", False),
        ("License: MIT", True),
        ("License: MIT License", True),
        ("License: The MIT License (MIT)", True),
        ("License: Apache 2.0", True),
        ("License: Apache License, Version 2.0", True),
        ("License: Apache 2.0 License", True),
        ("License: BSD 3-Clause License", True),
        ("License: BSD 2-CLAUSE LICENSE", True),
        ("License: 3-Clause BSD License", True),
        ("License: MIT OR Apache-2.0", True),
        ("License: MPL-2.0 AND MIT", False),
        ("License: GPLv2", False),
        ("License: LICENCE.txt", False),
        ("License: UNKNOWN", False),
        ("License: NVIDIA Proprietary Software", False),
        ("Classifier: License :: OSI Approved :: MIT License", True),
        ("Classifier: License :: OSI Approved :: BSD License", True),
        ("Classifier: License :: OSI Approved :: Apache Software License", True),
        ("Classifier: License :: OSI Approved :: ISC License (ISCL)", True),
        ("Classifier: License :: OSI Approved :: Python Software Foundation License", True),
        ("Classifier: License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)", False),
        ("Classifier: License :: OSI Approved :: GNU General Public License v2 (GPLv2)", False),
        ("Classifier: License :: OSI Approved", False),
        ("Classifier: License :: Other/Proprietary License", False),
        ("License: UNKNOWN\nClassifier: License :: OSI Approved :: ISC License (ISCL)", True),
        (
            "License: Copyright (c) 2001 X.\n        All rights reserved.\n"
            "Classifier: License :: OSI Approved :: BSD License",
            True,
        ),
        ("License: MIT License\n        Permission is hereby granted to any person.", True),
        ("License: GNU GENERAL PUBLIC LICENSE\n        Version 3", False),
        ("License: GPL\nClassifier: License :: OSI Approved :: MIT License", False),
        (
            "Classifier: License :: OSI Approved :: MIT License\n"
            "Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)",
            False,
        ),
        ("Summary: MIT", False),
    ],
)
def test_what_metadata_say(metadata, taken):
    assert permissive(f"Metadata-Version: 2.1\nName: x\n{metadata}\n")[1] is taken


def test_a_file_of_a_package_that_is_no_text_is_left_out(packages, tokenizer, tmp_path):
    (packages / "free" / "work.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    asked = config(sources=[{"jsonl": str(packages), "kind": "code"}], min_doc_tokens=2)
    manifest = json.loads((prepare(asked, tokenizer, home=tmp_path) / "manifest.json").read_text())
    assert manifest["counts"]["documents"] == 1 and manifest["read"]["bad"] == 1


def test_the_paths_of_a_record_may_begin_with_a_dot_and_only_metadata_are_read(packages, monkeypatch):
    record = packages / "free-1.0.dist-info" / "RECORD"
    record.write_text("./" + record.read_text())
    names, found = read(packages)
    assert names == ["free/__init__.py", "free/work.py"]
    monkeypatch.setattr(sources, "sha256_file", None)
    plain = inputs(SourceConfig("jsonl", str(packages), kind="code"), hashed=False)
    assert plain["files"] == [{"path": item["path"]} for item in found["files"]]
    assert plain["packages"] == found["packages"]
