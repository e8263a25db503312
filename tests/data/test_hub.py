"""Manifests read through a small server that answers as the Hub does, in a process of its own."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from .test_mds import shard

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MANIFESTS = """
name: sft
hub: some/chats
licence: MIT
format: jsonl
files: [rows.jsonl]
adapter: longspec_sft
"""
MDS = """
name: books
hub: some/books
licence: none
format: mds
adapter: text
source_tokenizer: some/tokenizer
files: ["book/*.mds"]
kind: book
"""
READ = """
import json, sys
from longtrain.data.config import SourceConfig
from longtrain.data.read.sources import documents, inputs
source = SourceConfig("manifest", sys.argv[1], rows=int(sys.argv[2]))
found = inputs(source)
docs = [(d.name, d.kind, d.text or d.messages[1]["content"]) for d in documents(source, found)]
print(json.dumps({"commit": found["parts"][0]["commit"], "docs": docs}))
"""


class Hub(http.server.BaseHTTPRequestHandler):
    files: dict[str, bytes]
    asked: list[str]

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        path = self.path.split("?")[0]
        self.asked.append(path)
        if "/resolve/" in path:
            repo, name = path.strip("/").split("/resolve/")
            return self.answer(self.files.get(f"{repo}/{name.split('/', 1)[1]}"), body)
        repo = "/".join(path.removeprefix("/api/").split("/")[:3])
        names = [name.removeprefix(f"{repo}/") for name in self.files if name.startswith(f"{repo}/")]
        if "/tree/" in path:
            items = [{"type": "file", "path": n, "size": 1, "oid": COMMIT} for n in names]
            return self.answer(json.dumps(items).encode(), body)
        info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
        return self.answer(json.dumps(info).encode(), body)

    def answer(self, content, body):
        self.send_response(404 if content is None else 200)
        content = content or b""
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tokenizer_folder, tokenizer):
    rows = [{"source": "gov-report", "report": f"R{i}", "summary": f"S{i}"} for i in range(5)]
    ids = [np.array(tokenizer(text)["input_ids"]) for text in ("First book.", "Second one.", "Third.")]
    ends = np.cumsum([0, *map(len, ids)])
    one = {
        "domain": "book",
        "indices": np.stack([ends[:2], ends[1:3]], 1),
        "input_ids": np.concatenate(ids[:2]),
        "length": 1,
    }
    two = {"domain": "book", "indices": np.array([[0, len(ids[2])]]), "input_ids": ids[2], "length": 1}
    Hub.asked = []
    Hub.files = {
        "datasets/some/chats/rows.jsonl": "\n".join(map(json.dumps, rows)).encode(),
        "datasets/some/books/book/a.mds": shard([one]),
        "datasets/some/books/book/b.mds": shard([two]),
        "datasets/some/books/web/c.mds": shard([two]),
        "some/tokenizer/tokenizer.json": (tokenizer_folder / "tokenizer.json").read_bytes(),
    }
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def read(hub, tmp_path, manifest, rows):
    path = tmp_path / "manifest.yaml"
    path.write_text(manifest)
    env = {
        k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")
    }
    env |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    made = subprocess.run(
        [sys.executable, "-c", READ, path, str(rows)], env=env, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


def test_a_jsonl_file_of_a_dataset(hub, tmp_path):
    got = read(hub, tmp_path, MANIFESTS, 3)
    assert got["commit"] == COMMIT
    assert got["docs"] == [[f"rows.jsonl:{i + 1}", "summary", f"S{i}"] for i in range(3)]


def test_shards_are_decoded_and_fetched_only_as_far_as_needed(hub, tmp_path):
    got = read(hub, tmp_path, MDS, 2)
    assert [text for _, _, text in got["docs"]] == ["First book.", "Second one."]
    assert not any("b.mds" in path or "c.mds" in path for path in Hub.asked)
    assert [text for _, _, text in read(hub, tmp_path, MDS, 9)["docs"]][2:] == ["Third."]


def test_rows_are_drawn_from_a_buffer(hub, tmp_path):
    drawn = MANIFESTS + "shuffle_buffer: 3\n"
    first, some = (read(hub, tmp_path, drawn, n)["docs"] for n in (9, 2))
    names = [name for name, _, _ in first]
    assert sorted(names) == [f"rows.jsonl:{i + 1}" for i in range(5)] != names
    assert some == first[:2]  # the same draws, however many are taken
    other = read(hub, tmp_path, drawn + "shuffle_seed: 4\n", 9)["docs"]
    assert sorted(other) == sorted(first) and other != first


def test_a_file_that_is_not_there_is_named(hub, tmp_path):
    with pytest.raises(AssertionError, match=r"has no file like poems/\*"):
        read(hub, tmp_path, MDS.replace("book/*.mds", "poems/*"), 1)
