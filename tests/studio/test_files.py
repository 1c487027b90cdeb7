"""The files of the page: in the package, sent with a strict policy, and harmless by their own text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import RunningServer, make_fake_lm
from unspool.studio import build_single_page, find_asset
from unspool.studio.files import read_assets
from unspool.studio.single_page import PLACE, join_modules, list_styles

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src/unspool/studio/assets"
MODULES = sorted(name for name in read_assets() if name.endswith(".js"))
# All modules in one process, which takes a fifth of a second to start, and one that is wrong.
PARSE = """
const vm = require("node:vm");
const sources = JSON.parse(require("node:fs").readFileSync("sources.json", "utf8"));
const parse = (name, text) => new vm.SourceTextModule(text, { identifier: name });
for (const [name, text] of Object.entries(sources)) parse(name, text);
let refused = 0;
try { parse("wrong.js", "export const a = ;"); } catch (error) { refused += error instanceof SyntaxError; }
console.log(`${Object.keys(sources).length} parsed, ${refused} refused`);
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer({"fake": make_fake_lm()}, keys=("first-secret-key",)) as running:
        yield running


def test_every_file_is_in_the_package() -> None:
    """The wheel takes what lies in src/unspool and is not ignored by git."""
    on_disk = {str(one.relative_to(FOLDER)) for one in FOLDER.rglob("*") if one.is_file()}
    assert on_disk == set(read_assets()) and "index.html" in on_disk
    assert 'packages = ["src/unspool"]' in (ROOT / "pyproject.toml").read_text()
    ignored = (ROOT / ".gitignore").read_text().split()
    assert not {"*.js", "*.css", "*.html", "*.svg", "assets", "assets/"} & set(ignored)


def test_nothing_is_asked_of_another_server() -> None:
    for name, asset in read_assets().items():
        found = re.findall(rb"https?://[^\s\"'`)]+", asset.content)
        assert set(found) <= {b"http://www.w3.org/2000/svg"}, name


@pytest.mark.parametrize("name", MODULES)
def test_text_never_becomes_markup_or_code(name: str) -> None:
    source = read_assets()[name].content.decode()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert word not in source
    assert 'setAttribute("style"' not in source  # the policy would refuse it


def test_every_import_is_a_file_of_the_page() -> None:
    for name in MODULES:
        for found in re.findall(r'from "\./([\w.-]+)"', read_assets()[name].content.decode()):
            assert find_asset(found) is not None, f"{name} imports {found}"
    assert list_styles() and all(find_asset(name) for name in list_styles())


# --- as it is served ---------------------------------------------------------------------------------------------
def test_the_page_needs_no_key_and_the_routes_do(server: RunningServer) -> None:
    page = server.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    for name in read_assets():
        assert server.get(f"/studio/{name}").content == read_assets()[name].content
    for path in ("/v1/models", "/v1/parameters", "/studio", "/openapi.json"):
        assert server.get(path).status_code == 401, path


@pytest.mark.parametrize("path", ["/", "/studio/main.js", "/studio/base.css", "/studio/kept.html"])
def test_the_policy(server: RunningServer, path: str) -> None:
    headers = server.get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'" and policy["frame-ancestors"] == "'none'"
    assert policy["base-uri"] == policy["form-action"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


def test_files_that_are_not_there(server: RunningServer) -> None:
    for path in ("/studio/", "/studio/nothing.js", "/studio/..%2fpolicy.py", "/studio/../files.py", "/studio/%2e%2e/x"):
        assert server.get(path).status_code in (401, 404), path
    assert server.get("/studio/..%2ffiles.py").json()["error"]["message"] == "the studio has no file of that name"


def test_a_file_that_has_not_changed_is_not_sent_again(server: RunningServer) -> None:
    first = server.get("/studio/main.js")
    again = server.get("/studio/main.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert server.get("/studio/main.js", headers={"if-none-match": '"other"'}).status_code == 200


# --- the page for keeping ----------------------------------------------------------------------------------------
def test_the_single_page_allows_its_own_script_and_nothing_else(server: RunningServer) -> None:
    page = build_single_page()
    assert server.get("/studio/kept.html").text == page
    assert server.get("/studio/kept.html").headers["content-type"].startswith("text/plain")  # it is not shown here
    assert page.count(PLACE) == 1
    script = re.search(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert script and style
    hashes = [base64.b64encode(hashlib.sha256(one[1].encode()).digest()).decode() for one in (script, style)]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and policy[1].startswith("default-src 'none';") and "connect-src" not in policy[1]
    assert [f"script-src 'sha256-{hashes[0]}'" in policy[1], f"style-src 'sha256-{hashes[1]}'" in policy[1]] == [
        True
    ] * 2
    assert "src=" not in page.split("<script", 1)[0] and not re.search(r"^(import|export)\b", script[1], re.MULTILINE)


def test_all_modules_are_joined_once_and_in_order() -> None:
    joined = join_modules("main.js")
    assert joined.count("= (() => {\n") == len(MODULES)
    assert joined.index("class Book") < joined.index("class Studio")


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_modules_parse(tmp_path: Path) -> None:
    sources = {name: read_assets()[name].content.decode() for name in MODULES}
    (tmp_path / "sources.json").write_text(json.dumps({**sources, "joined.js": join_modules("main.js")}))
    (tmp_path / "parse.cjs").write_text(PARSE)
    node = ["node", "--experimental-vm-modules", "--no-warnings", "parse.cjs"]
    done = subprocess.run(node, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{len(MODULES) + 1} parsed, 1 refused\n", "")


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_what_modules_work_out(tmp_path: Path) -> None:
    """The tests of the modules that need no page, in tests/studio/modules.mjs."""
    script = Path(__file__).with_name("modules.mjs").read_text().replace("ASSETS", FOLDER.as_uri())
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "modules.mjs").write_text(script)
    done = subprocess.run(["node", "--test", "modules.mjs"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_whole_page_without_a_browser(server: RunningServer, tmp_path: Path) -> None:
    """Names, focus, keys and tabs, in tests/studio/page.mjs, with this server's table of settings."""
    parameters = server.get("/v1/parameters", headers={"authorization": "Bearer first-secret-key"}).text
    script = Path(__file__).with_name("page.mjs").read_text()
    for word, text in (
        ("ASSETS", FOLDER.as_uri()),
        ("HERE", Path(__file__).parent.as_uri()),
        ("PARAMETERS", parameters),
    ):
        script = script.replace(word, text)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "page.mjs").write_text(script)
    node = ["node", "--test", "--no-warnings", "page.mjs"]
    done = subprocess.run(node, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
