"""Pushing and loading through the real client, against a small Hub on localhost."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import longtrain

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Repositories in memory: what the client asks for when it creates, uploads and downloads."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.stored: dict[str, bytes] = {}
        self.repos: list[str] = []
        self.tokens: set[str] = set()
        self.refuse = False

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args):
        pass

    def reply(self, body=b"", *, code=200, **headers):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_POST(self):
        hub, path, body = self.server, self.path.split("?")[0], self.body()
        hub.tokens.add(self.headers.get("Authorization", ""))
        if hub.refuse:
            return self.reply({"error": "You do not own this name"}, code=403)
        if path == "/api/repos/create":
            asked = json.loads(body)
            hub.repos.append(f"{asked.get('organization', 'me')}/{asked['name']}")
            return self.reply({"url": f"{hub.url}/{hub.repos[-1]}", "id": "1"})
        if path == "/api/validate-yaml":
            return self.reply({"errors": [], "warnings": []})
        if "/preupload/" in path:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self.reply({"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.reply({"objects": objects, "transfer": "basic"})
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.stored[value["oid"]]
            url = f"{hub.url}/{hub.repos[-1]}/commit/{COMMIT}"
            return self.reply({"success": True, "commitOid": COMMIT, "commitUrl": url})
        return self.reply({"error": path}, code=404)

    def do_PUT(self):
        content = self.body()
        assert self.path == f"/lfs/{hashlib.sha256(content).hexdigest()}"
        self.server.stored[self.path.removeprefix("/lfs/")] = content
        self.reply()

    def do_GET(self):
        hub, path = self.server, self.path.split("?")[0]
        if path.startswith("/api/models/") and "/tree/" in path:
            return self.reply(
                [{"type": "file", "path": n, "size": len(c), "oid": n} for n, c in hub.files.items()]
            )
        if path.startswith("/api/models/"):
            siblings = [{"rfilename": name} for name in hub.files]
            return self.reply({"id": "org/draft", "sha": COMMIT, "siblings": siblings})
        name = path.rsplit("/", 1)[-1]
        if "/resolve/" in path and name in hub.files:
            etag = f'"{hashlib.sha256(hub.files[name]).hexdigest()}"'
            return self.reply(hub.files[name], ETag=etag, X_Repo_Commit=COMMIT)
        return self.reply({"error": path}, code=404)

    do_HEAD = do_GET


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def client(code, hub, tmp_path, **environment):
    """Run code in a process of its own: the client reads its settings when it is imported."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    env |= {"PYTHONPATH": str(Path(longtrain.__file__).parent.parent), "HF_HUB_DISABLE_TELEMETRY": "1"}
    env |= environment
    code = f"from longtrain.artifact import Artifact\nfrom longtrain.errors import LongtrainError\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_push_uploads_the_folder_and_it_loads_from_there(hub, folder, tmp_path):
    (folder / "private notes.txt").write_text("stay here")
    (folder / "local.json").write_text(json.dumps({"target": str(tmp_path)}))
    push = f"print(Artifact.load({str(folder)!r}).push('org/draft'))"
    out = client(push, hub, tmp_path, HF_TOKEN="hf_secret")
    assert out.strip().endswith(f"{hub.url}/org/draft/commit/{COMMIT}")
    assert hub.repos == ["org/draft"] and "Bearer hf_secret" in hub.tokens
    mine = ("private notes.txt", "local.json")
    expected = {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in mine}
    assert hub.files == expected
    back = "one = Artifact.load('org/draft'); print(one.method, one.parameters())"
    assert client(back, hub, tmp_path).split() == ["longspec", "27024"]


def test_a_draft_of_another_tool_loads_from_there(hub, tmp_path):
    from longtrain import methods
    from longtrain.methods.eagle3.config import Config
    from longtrain.targets.loading import random_target

    spec, config, target = (
        methods.get("eagle3"),
        Config(layers=[0], draft_vocab_size=0),
        random_target("llama_micro"),
    )
    made = spec.build(config, target.info).state_dict()
    files = spec.formats.write("flat", made, config, target, {}, "draft")
    keys = json.loads(files["config.json"])
    del keys["eagle_aux_hidden_state_layer_ids"], keys["trained_by"]
    hub.files |= {"config.json": json.dumps(keys).encode(), "model.safetensors": files["model.safetensors"]}
    back = "one = Artifact.load('hub:org/draft', trained_by={!r}); print(one.method, one.config['layers'])"
    assert client(back.format("modelopt"), hub, tmp_path).split() == ["eagle3", "[0]"]
    refused = f"try:\n    {back.format('nobody')}\nexcept LongtrainError as error:\n    print(error)"
    assert client(refused, hub, tmp_path).startswith(
        "trained_by=nobody is no trainer that is known; allowed: longtr"
    )


ERROR = """
try:
    print(Artifact.load({folder!r}).push({repo!r}))
except LongtrainError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("repo", "environment", "message"),
    [
        ("org/draft", {}, "ConfigError cannot push to org/draft: not logged in to http"),
        (
            "org/draft",
            {"HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "1"},
            "ConfigError cannot push to org/draft: HF_HUB",
        ),
        ("draft", {"HF_TOKEN": "hf_x"}, "ConfigError push=draft is no repository name; allowed: ORG/NAME"),
        ("org/draft", {"HF_TOKEN": "hf_x"}, "did not take org/draft: "),
    ],
)
def test_push_that_cannot_be(hub, folder, tmp_path, repo, environment, message):
    hub.refuse = True
    out = client(ERROR.format(folder=str(folder), repo=repo), hub, tmp_path, **environment)
    assert message in out and len(out.strip().splitlines()) == 1
    assert not hub.files


@pytest.mark.slow
def test_name_on_no_hub(hub, tmp_path):
    code = "try:\n    Artifact.load('org/none')\nexcept LongtrainError as error:\n    print(error)"
    out = client(code, hub, tmp_path)
    assert "org/none on http" in out and "no longtrain.json" in out
    offline = client(code, hub, tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "other"))
    assert "no artifact 'org/none'" in offline and len(offline.strip().splitlines()) == 1
