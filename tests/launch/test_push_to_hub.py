"""An export is uploaded with the Hub's own client to a stand-in that speaks the Hub's HTTP API."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from arpo_megatron.cli.main import run_command
from arpo_megatron.errors import UserError
from arpo_megatron.launch.push_to_hub import push_to_hub

REPO = "me/agent"


class Hub(ThreadingHTTPServer):
    """Repositories with their files; large ones come as LFS objects."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()
        self.refuse = self.forgot_token = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def do_PUT(self) -> None:
        self.server.objects[self.path.rpartition("/")[2]] = self._body()
        self._send({})

    def do_GET(self) -> None:
        if self.server.forgot_token and self.path == "/api/whoami-v2":
            return self._send({"error": "Invalid credentials"}, 401)
        return self._send({"id": REPO, "sha": "0" * 40, "siblings": []})

    def do_POST(self) -> None:
        hub, body = self.server, self._body()
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.refuse:
            return self._send({"error": "no write access"}, 403)
        if self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            return self._send({"url": f"{hub.url}/{REPO}"})
        if self.path == "/api/validate-yaml":
            return self._send({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            mode = {True: "lfs", False: "regular"}
            answer = [
                {"path": each["path"], "uploadMode": mode[each["path"].endswith("safetensors")], "shouldIgnore": False}
                for each in files
            ]
            return self._send({"files": answer})
        if self.path.endswith("/info/lfs/objects/batch"):
            found = [
                {**each, "actions": {"upload": {"href": f"{hub.url}/lfs/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return self._send({"transfer": "basic", "objects": found})
        assert "/commit/" in self.path, self.path
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                hub.files[value["path"]] = hub.objects[value["oid"]]
        return self._send({"commitUrl": f"{hub.url}/{REPO}/commit/1", "commitOid": "1" * 40, "success": True})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)  # read from the variable at import
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Agent\n")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    return folder


def test_every_file_of_the_export_arrives(hub: Hub, export: Path) -> None:
    assert push_to_hub(export, REPO, private=True) == f"{hub.url}/{REPO}/commit/1"
    assert hub.files == {path.name: path.read_bytes() for path in export.iterdir()}
    digest = hashlib.sha256((export / "model.safetensors").read_bytes()).hexdigest()
    assert set(hub.objects) == {digest}
    assert hub.created[0]["visibility"] == "private"
    assert hub.tokens >= {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("repo", "token", "forgot", "message"),
    [
        ("a/b/c", "hf_secret", False, "--push-to-hub a/b/c: "),
        ("agent", "hf_secret", False, "--push-to-hub agent: write OWNER/NAME"),
        (REPO, None, False, "no token for the Hub: set HF_TOKEN"),
        (REPO, "hf_old", True, "the Hub refuses me/agent or cannot be reached: "),
    ],
)
def test_upload_that_cannot_succeed_is_refused_before_the_export(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repo: str, token: str | None, forgot: bool, message: str
) -> None:
    def export_checkpoint(*_: object) -> None:
        raise AssertionError("the export has started")

    monkeypatch.setattr("arpo_megatron.launch.job.export_checkpoint", export_checkpoint)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    hub.forgot_token = forgot
    (tmp_path / "config.yaml").write_text("name: test\n")
    with pytest.raises(UserError) as error:
        run_command(["export", str(tmp_path), "--push-to-hub", repo])
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    assert hub.created == []


def test_what_fails_is_one_line(hub: Hub, export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"--push-to-hub a/b/c: .*"):
        push_to_hub(export, "a/b/c", private=True)
    hub.refuse = True
    with pytest.raises(UserError, match=r"the Hub refuses me/agent or cannot be reached: .*403") as error:
        push_to_hub(export, REPO, private=True)
    assert "\n" not in str(error.value)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="set HF_TOKEN"):
        push_to_hub(export, REPO, private=True)
