"""`save_pretrained(push_to_hub=True)`, against as much of a hub as its client asks for."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

PROGRAM = """
import sys
from unspool import GenerationConfig

config = GenerationConfig(max_new_tokens=50, do_sample=True, top_k=50)
config.save_pretrained("my_account/my_model", push_to_hub=True, token="hf_x", commit_message="Calmer")
config.save_pretrained("folder", "creative.json", push_to_hub=True, repo_id="owner/other", private=True)
try:
    config.save_pretrained("folder", push_to_hub=True, repo_id="owner/forbidden")
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[0])
try:
    config.save_pretrained("folder", push_to_hub=True, repo_id="a/b/c")
except Exception as error:
    print(type(error).__name__)
"""


class Hub(BaseHTTPRequestHandler):
    seen: ClassVar[list[tuple[str, Any, str | None]]] = []

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        lines = [json.loads(line) for line in body.splitlines()]
        self.seen.append((self.path, lines, self.headers.get("Authorization")))
        code, answer = 200, {}
        if self.path == "/api/repos/create":
            owner = lines[0].get("organization")
            code = 403 if lines[0]["name"] == "forbidden" else 200
            answer = {"url": f"http://{self.headers['Host']}/{owner}/{lines[0]['name']}"}
        elif "/preupload/" in self.path:
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in lines[0]["files"]]
            answer = {"files": files}
        elif "/commit/" in self.path:
            repository = "/".join(self.path.split("/")[3:5])
            url = f"http://{self.headers['Host']}/{repository}/commit/1"
            answer = {"commitUrl": url, "commitOid": "1" * 40, "success": True}
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(data)


def test_settings_are_pushed(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    own = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}"}
    own |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": "hf_own", "NO_PROXY": "127.0.0.1"}
    own |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    try:
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=kept | own, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert result.returncode == 0, result.stderr
    commits = [(path, lines, token) for path, lines, token in Hub.seen if "/commit/" in path]
    assert [path.split("/commit/")[0] for path, _, _ in commits] == [
        "/api/models/my_account/my_model",
        "/api/models/owner/other",
    ]
    assert [token for _, _, token in commits] == ["Bearer hf_x", "Bearer hf_own"]
    header, file = commits[0][1]
    assert header["value"]["summary"] == "Calmer" and file["value"]["path"] == "generation_config.json"
    assert json.loads(base64.b64decode(file["value"]["content"]))["top_k"] == 50
    assert commits[1][1][1]["value"]["path"] == "creative.json"
    created = [lines[0] for path, lines, _ in Hub.seen if path == "/api/repos/create"]
    assert created[1].get("private") is True or created[1].get("visibility") == "private"
    assert (tmp_path / "my_account" / "my_model" / "generation_config.json").is_file()
    refused, wrong = result.stdout.splitlines()
    assert refused.startswith("InputError") and "was written, and not pushed" in refused
    assert wrong == "SettingError"
