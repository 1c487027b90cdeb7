"""`save_pretrained(push_to_hub=True)` and `push_to_hub()`, against as much of a hub as its client asks for."""

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
config.push_to_hub("owner/settings", commit_message="Settings", revision="side")
again = GenerationConfig.from_pretrained("owner/settings")
print(again.top_k, again.do_sample)
for given in ({"commit_mesage": "x"}, {"repo": "y"}):
    try:
        config.push_to_hub("owner/settings", **given)
    except Exception as error:
        print(type(error).__name__, error)
"""
DETECTOR = """
import torch, unspool
from unspool import BayesianDetectorConfig, BayesianDetectorModel

config = BayesianDetectorConfig(watermarking_depth=3)
config.set_detector_information("owner/model", {"ngram_len": 5, "keys": [1, 2, 3]})
made = BayesianDetectorModel(config)
torch.nn.init.normal_(made.likelihood_model_watermarked.delta)
made.push_to_hub("owner/detector", commit_message="Trained", private=True)
made.save_pretrained("owner/second", push_to_hub=True)
for name in ("owner/detector", "owner/second"):
    found = BayesianDetectorModel.from_pretrained(name)
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in made.state_dict().items())
    print(found.config.model_name, found.config.watermarking_config["keys"], found.training)
wrong = ("owner/absent", {}), ("owner/detector", {"revison": "x"}), ("nowhere", {"local_files_only": True})
for name, options in wrong:
    try:
        BayesianDetectorModel.from_pretrained(name, **options)
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
"""


class Hub(BaseHTTPRequestHandler):
    seen: ClassVar[list[tuple[str, Any, str | None]]] = []
    kept: ClassVar[dict[str, bytes]] = {}  # the files of every repository

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
            for line in lines[1:]:
                place = f"{repository}/{line['value']['path']}"
                self.kept[place] = base64.b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/{repository}/commit/1"
            answer = {"commitUrl": url, "commitOid": "1" * 40, "success": True}
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        owner, name, _, _, *file = self.path.strip("/").split("/")
        data = self.kept.get("/".join((owner, name, *file)))
        self.send_response(404 if data is None else 200)
        self.send_header("Content-Length", str(len(data or b"")))
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("X-Error-Code" if data is None else "ETag", f'"{hashlib.sha1(data or b"").hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data or b"")

    def do_HEAD(self) -> None:
        self.do_GET()


def run_beside_a_hub(program: str, folder: Path) -> str:
    """What a program prints whose hub is the one above, which has seen and kept nothing yet."""
    Hub.seen.clear()
    Hub.kept.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    own = {"HF_HOME": str(folder / "home"), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}"}
    own |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": "hf_own", "NO_PROXY": "127.0.0.1"}
    own |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    try:
        result = subprocess.run(
            [sys.executable, "-c", program], env=kept | own, cwd=folder, capture_output=True, text=True, timeout=120
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_settings_are_pushed(tmp_path: Path) -> None:
    told = run_beside_a_hub(PROGRAM, tmp_path)
    commits = [(path, lines, token) for path, lines, token in Hub.seen if "/commit/" in path]
    assert [path.split("/commit/")[0] for path, _, _ in commits] == [
        "/api/models/my_account/my_model",
        "/api/models/owner/other",
        "/api/models/owner/settings",
    ]
    assert [token for _, _, token in commits] == ["Bearer hf_x", "Bearer hf_own", "Bearer hf_own"]
    assert commits[2][0].startswith("/api/models/owner/settings/commit/side")
    header, file = commits[0][1]
    assert header["value"]["summary"] == "Calmer" and file["value"]["path"] == "generation_config.json"
    assert json.loads(base64.b64decode(file["value"]["content"]))["top_k"] == 50
    assert commits[1][1][1]["value"]["path"] == "creative.json"
    created = [lines[0] for path, lines, _ in Hub.seen if path == "/api/repos/create"]
    assert created[1].get("private") is True or created[1].get("visibility") == "private"
    assert (tmp_path / "my_account" / "my_model" / "generation_config.json").is_file()
    refused, wrong, again, *unknown = told.splitlines()
    assert again == "50 True"
    assert unknown == [f"SettingError push_to_hub(): {name!r} is not known" for name in ("commit_mesage", "repo")]
    assert refused.startswith("InputError") and "was written, and not pushed" in refused
    assert wrong == "SettingError"


def test_a_detector_is_pushed_and_read_back(tmp_path: Path) -> None:
    told = run_beside_a_hub(DETECTOR, tmp_path).splitlines()
    assert told[:2] == ["owner/model [1, 2, 3] False"] * 2
    assert told[2].startswith("ModelNotFoundError config.json of owner/absent is neither here nor found on the hub")
    assert told[3] == "SettingError from_pretrained() does not know 'revison'; did you mean 'revision'?"
    assert told[4].startswith("ModelNotFoundError config.json of nowhere is neither here nor found on the hub")
    commits = [lines for path, lines, _ in Hub.seen if "/commit/" in path]
    assert [line["value"]["path"] for line in commits[0][1:]] == ["config.json", "model.safetensors"]
    assert commits[0][0]["value"]["summary"] == "Trained" and len(commits) == 2
