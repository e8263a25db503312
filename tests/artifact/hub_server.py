"""A small Hub on localhost, which the real client talks to."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
COLLECTION = {
    "owner": {},
    "lastUpdated": "2026-01-01T00:00:00.000Z",
    "position": 0,
    "theme": "x",
    "upvotes": 0,
}


class Hub(ThreadingHTTPServer):
    """Repositories in memory: what the client asks for when it creates, uploads and downloads."""

    def __init__(self, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.files: dict[str, bytes] = {}
        self.stored: dict[str, bytes] = {}
        self.repos: dict[str, bool] = {}
        self.collections: dict[str, dict] = {}
        self.put: list[str] = []
        self.tokens: set[str] = set()
        self.refuse = False
        self.one_upload = threading.Lock()
        self.second_upload = lambda: None

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
            said = f"You with {self.headers['Authorization']} do not own this; see {hub.url}/x?signature=s3"
            return self.reply({"error": said}, code=403, X_Error_Message=said)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            code = 409 if name in hub.repos else 200
            hub.repos.setdefault(name, asked.get("private") or asked.get("visibility") == "private")
            return self.reply({"url": f"{hub.url}/{name}", "id": "1"}, code=code)
        if path == "/api/collections":
            asked = json.loads(body)
            slug = f"{asked['namespace']}/{asked['title'].lower().replace(' ', '-')}-{'0' * 24}"
            code = 409 if slug in hub.collections else 200
            hub.collections.setdefault(slug, {**COLLECTION, **asked, "slug": slug, "items": []})
            return self.reply(hub.collections[slug], code=code)
        if path.startswith("/api/collections/"):
            found = hub.collections[path.removeprefix("/api/collections/").removesuffix("/items")]
            asked = json.loads(body)["item"]
            new = asked["id"] not in [item["id"] for item in found["items"]]
            found["items"] += [{**asked, "_id": "1", "position": 0}] if new else []
            return self.reply(found, code=200 if new else 409)
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
                {**one}
                if one["oid"] in hub.stored
                else {**one, "actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.reply({"objects": objects, "transfer": "basic"})
        if "/commit/" in path:
            files = {}
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.stored[value["oid"]]
            hub.files = {**hub.files, **files}  # a commit is there as a whole
            url = f"{hub.url}/{path.removeprefix('/api/models/').partition('/commit/')[0]}/commit/{COMMIT}"
            return self.reply({"success": True, "commitOid": COMMIT, "commitUrl": url})
        return self.reply({"error": path}, code=404)

    def do_PUT(self):
        content, hub = self.body(), self.server
        assert self.path == f"/lfs/{hashlib.sha256(content).hexdigest()}"
        with hub.one_upload:
            if hub.put:
                hub.second_upload()
            hub.put.append(self.path.removeprefix("/lfs/"))
            hub.stored[hub.put[-1]] = content
        self.reply()

    def do_GET(self):
        hub, path = self.server, self.path.split("?")[0]
        if path.startswith("/api/collections/"):
            return self.reply(hub.collections[path.removeprefix("/api/collections/")])
        if path.endswith("/revision/v9"):
            return self.reply({"error": "Invalid rev id: v9"}, code=404, X_Error_Code="RevisionNotFound")
        if "/none" in path:
            return self.reply({"error": "Not found"}, code=404, X_Error_Code="RepoNotFound")
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
