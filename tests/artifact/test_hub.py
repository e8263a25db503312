"""Pushing and loading through the real client, against a small Hub on localhost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from hub_server import COMMIT, Hub

import longtrain
from longtrain.artifact import Artifact
from longtrain.errors import ArtifactError, ConfigError

TOKEN = "a_token_of_no_known_form"


SERVER = """
import json, os, sys
import huggingface_hub.hf_api, lightning.pytorch, matplotlib.pyplot
from huggingface_hub import constants
from longtrain.artifact import Artifact
from longtrain.artifact.found import find
from longtrain.artifact.inspection import inspect
from longtrain.errors import LongtrainError
for line in sys.stdin:
    code, folder, out, err = json.loads(line)
    process = os.fork()
    if not process:
        os.chdir(folder)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        try:
            exec(code)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""
"""Runs each code that it gets in a copy of itself, so that only one process imports everything."""


def free_port():
    """One that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.fixture(scope="module")
def port():
    """The Hub's, which the client reads when it is imported."""
    return free_port()


@pytest.fixture
def hub(port):
    server = Hub(port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where the client keeps what it has downloaded."""
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def server(home, port):
    """A process of its own: the client reads its settings when it is imported."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    env |= {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    env |= {"PYTHONPATH": str(Path(longtrain.__file__).parent.parent), "HF_HUB_DISABLE_TELEMETRY": "1"}
    env |= {"HF_HUB_VERBOSITY": "debug", "HF_ENDPOINT": f"http://127.0.0.1:{port}"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER], env=env, **pipes) as process:
        yield process
        process.stdin.close()


def ran(server, code, tmp_path, meanwhile=lambda process: None):
    """The exit code of a process that runs code, and what it prints; `meanwhile` gets its number."""
    out, err = tmp_path / "out.txt", tmp_path / "err.txt"
    for path in (out, err):
        path.unlink(missing_ok=True)
    server.stdin.write(json.dumps([code, *map(str, (tmp_path, out, err))]) + "\n")
    server.stdin.flush()
    meanwhile(int(server.stdout.readline()))
    done = int(server.stdout.readline())
    printed = [path.read_text() for path in (out, err)]
    assert TOKEN not in "".join(printed)
    return done, *printed


def client(server, code, tmp_path):
    """What the code prints."""
    done, out, err = ran(server, code, tmp_path)
    assert done == 0, err
    return out


SAID = """
def said(what, *words, **keys):
    try:
        print('->', what(*words, **keys))
    except LongtrainError as error:
        print(type(error).__name__, error)
"""

JOURNEY = """
one = Artifact.load({folder!r})
print(one.push('org/draft', collection='org/Long drafts'))
one.push('org/draft', collection='org/Long drafts')
for where in ('org/draft', 'hub:org/draft@v1'):
    back = Artifact.load(where)
    print(where, back.method, back.parameters(), back.folder)
found = inspect('hub:org/draft')
print(found.facts['method'].split()[0], found.fault or 'verifies')
said(Artifact.load, 'hub:org/draft@v9')
said(Artifact.load, 'hub:org/none')
"""


def test_an_interrupted_push_goes_on_and_comes_back_equal(server, hub, home, folder, tmp_path):
    """Killed between two files; then the same push sends the other file alone, and the Hub gives all back."""
    (folder / "private notes.txt").write_text("stay here")
    (folder / "local.json").write_text(json.dumps({"target": str(tmp_path)}))
    code = f"constants.HF_DEBUG = True; Artifact.load({str(folder)!r}).push('org/draft')"

    def kill_later(process):
        hub.second_upload = lambda: os.kill(process, signal.SIGKILL)

    done, *_ = ran(server, code, tmp_path, kill_later)
    assert done == -9 and len(hub.put) <= 2 and not hub.files
    hub.second_upload, first = (lambda: None), set(hub.put[:1])
    hub.stored, hub.put = {oid: hub.stored[oid] for oid in first}, []

    out = client(server, SAID + JOURNEY.format(folder=str(folder)), tmp_path)
    lines = [line for line in out.splitlines() if not line.startswith("DEBUG")]
    assert lines[0] == f"{hub.url}/org/draft/commit/{COMMIT}" and f"Bearer {TOKEN}" in hub.tokens
    assert first and len(hub.put) == 1 and not first & set(hub.put)
    assert hub.repos == {"org/draft": True}, "private unless it is asked for"
    (collection,) = hub.collections.values()
    assert collection["private"] and [item["id"] for item in collection["items"]] == ["org/draft"]
    mine = ("private notes.txt", "local.json")
    assert hub.files == {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in mine}
    assert "artifact=hub:org/draft" in (folder / "README.md").read_text()
    for line, where in zip(lines[1:3], ("org/draft", "hub:org/draft@v1"), strict=True):
        assert line.startswith(f"{where} longspec 27024 ")
        back = Path(line.split(" ", 3)[3])
        for name in ("model.safetensors", "golden.safetensors", "longtrain.json"):
            assert (back / name).read_bytes() == (folder / name).read_bytes()
    assert lines[3] == "longspec verifies"
    told = f"{hub.url} did not give it"
    assert lines[4:] == [
        f"ArtifactError no artifact 'org/draft@v9': {told}: the repository has no such revision",
        f"ArtifactError no artifact 'org/none': {told}: it has no such repository, or one that this login "
        "may not read",
    ]

    for file in (*tmp_path.rglob("*"), *home.rglob("*")):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file
    assert not any(TOKEN.encode() in content for content in hub.files.values())


@pytest.mark.slow
def test_a_draft_of_another_tool_loads_from_there(server, hub, tmp_path):
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
    back = "one = Artifact.load('hub:org/other', trained_by={!r}); print(one.method, one.config['layers'])"
    assert client(server, back.format("modelopt"), tmp_path).split() == ["eagle3", "[0]"]
    refused = f"try:\n    {back.format('nobody')}\nexcept LongtrainError as error:\n    print(error)"
    assert client(server, refused, tmp_path).startswith(
        "trained_by=nobody is no trainer that is known; allowed: longtr"
    )


PUSHES = """
def pushed(repo, **keys):
    said(Artifact.load({folder!r}).push, repo, **keys)
pushed('draft')
pushed('org/draft', collection='drafts')
pushed('org/draft')
os.environ['HF_ENDPOINT'] = constants.ENDPOINT = {gone!r}
pushed('org/draft')
said(Artifact.load, 'hub:org/none')
"""


def test_push_that_cannot_be(server, hub, folder, tmp_path):
    """Each is told in one line, without the token, though the Hub's own answer repeats it.

    So is a Hub that cannot be reached, for a push and for a load.
    """
    gone = f"http://127.0.0.1:{free_port()}"
    hub.refuse, code = True, SAID + PUSHES.format(folder=str(folder), gone=gone)
    out = client(server, code, tmp_path).splitlines()
    lines = [line for line in out if line.startswith(("ArtifactError", "C"))]
    assert len(lines) == 5
    assert lines[0] == "ConfigError push=draft is no repository name; allowed: ORG/NAME"
    assert lines[1].startswith("ConfigError collection=drafts is no collection; allowed: ORG/TITLE")
    assert lines[2].startswith(
        f"ArtifactError {hub.url} did not take org/draft: 403 Forbidden: You with Bearer ***"
    )
    assert "signature" not in lines[2] and lines[2].endswith("the same command goes on") and not hub.files
    assert lines[3].startswith(f"ArtifactError {gone} did not take org/draft: ")
    assert lines[3].endswith("the same command goes on")
    assert lines[4].startswith(f"ArtifactError no artifact 'org/none': {gone} did not give it: ")


@pytest.mark.parametrize(
    ("environment", "message"), [({}, "not logged in"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB")]
)
def test_nobody_is_asked_without_login_or_network(folder, tmp_path, monkeypatch, environment, message):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x" if environment else None)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: bool(environment))
    with pytest.raises(ConfigError, match=f"cannot push to org/draft: {message}"):
        Artifact.load(folder).push("org/draft")


def test_an_artifact_that_is_not_here_is_one_line_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ArtifactError, match=r"no artifact 'org/none': .* did not give it") as error:
        Artifact.load("hub:org/none", home=tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(ArtifactError, match="no artifact 'hub:none': a repository is hub:ORG/NAME"):
        Artifact.load("hub:none", home=tmp_path)


def test_addresses_of_requests_are_no_lines_of_a_log(root):
    """An upload's address is signed: who has the line could use it."""
    config = yaml.safe_load((root / "conf/hydra/job_logging/longtrain.yaml").read_text())
    levels = {name: one["level"] for name, one in config["loggers"].items()}
    assert levels["httpx"] == levels["httpx2"] == "WARNING"
