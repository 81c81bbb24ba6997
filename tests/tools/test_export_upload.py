"""An exported folder is put on the hub; a local HTTP server stands in for it."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.tools import export


class Hub(ThreadingHTTPServer):
    """Takes models as the hub does: `made` holds the requests that made them, `files` what was committed; `refuses` answers 403."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()
        self.refuses = False
        super().__init__(("127.0.0.1", 0), Door)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Door(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.refuses:
            return self._answer(403, {"error": "no rights"})
        if self.path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            return self._answer(200, {"url": f"{self.server.address}/me/sorter", "name": "me/sorter"})
        if self.path == "/api/models/me/sorter/preupload/main":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        assert self.path == "/api/models/me/sorter/commit/main", self.path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"{self.server.address}/me/sorter/commit/{'1' * 40}"
        return self._answer(200, {"success": True, "commitUrl": url, "commitOid": "1" * 40})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", "hf_mine")
        yield server
        server.shutdown()
        thread.join()


def written(run: Path, out: Path, **options: Any) -> Path:
    """A folder as `export.write` leaves it, without a run."""
    out.mkdir()
    save_file({"model.norm.weight": np.arange(8, dtype=np.float32)}, out / "model.safetensors")
    (out / "config.json").write_text('{"model_type": "qwen3"}\n')
    return out


def test_the_command_uploads_the_folder_that_it_wrote(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "write", written)
    out = tmp_path / "sorter"
    assert export.main(["runs/x", "--out", str(out), "--upload", "me/sorter"]) == 0
    assert f"uploaded to {hub.address}/me/sorter" in capsys.readouterr().out
    assert hub.files == {p.name: p.read_bytes() for p in out.iterdir()} and len(hub.files) == 2
    assert hub.made[0]["name"] == "sorter" and hub.made[0]["organization"] == "me"
    assert hub.made[0].get("private") is True or hub.made[0].get("visibility") == "private"
    assert hub.tokens == {"Bearer hf_mine"}
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "model.safetensors").write_bytes(hub.files["model.safetensors"])
    assert load_file(tmp_path / "back" / "model.safetensors")["model.norm.weight"].tolist() == list(range(8))


def test_a_model_is_public_where_that_is_asked_for(tmp_path: Path, hub: Hub) -> None:
    export.upload(written(tmp_path, tmp_path / "sorter"), "me/sorter", public=True)
    assert hub.made[0].get("private") is False or hub.made[0].get("visibility") == "public"


def test_a_hub_that_refuses_or_is_not_there_leaves_the_folder_and_says_how_to_go_on(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path, tmp_path / "sorter")
    hub.refuses = True
    with pytest.raises(
        OSError, match=r"is written, and could not be uploaded to me/sorter .*no rights.*hf upload me/sorter"
    ):
        export.upload(folder, "me/sorter")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
    with pytest.raises(OSError, match="could not be uploaded"):
        export.upload(folder, "me/sorter")
    assert len(list(folder.iterdir())) == 2
    with pytest.raises(ValueError, match="--upload needs OWNER/NAME"):
        export.upload(folder, "sorter")
