"""html-validate and axe, which `make page-tools` installs below `build`, for pages that people read."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

MODULES = Path(__file__).parents[2] / "build" / "page-tools" / "node_modules"
HTML_RULES = {"extends": ["html-validate:recommended"], "rules": {"no-trailing-whitespace": "off"}}


def require_page_tools():
    if not shutil.which("node") or not (MODULES / "axe-core").exists() or not (MODULES / "html-validate").exists():
        reason = "html-validate or axe is missing; `make page-tools` installs them"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


def html_findings(html, folder):
    """What html-validate says of a page, one line each."""
    (folder / "page.html").write_text(html)
    (folder / "rules.json").write_text(json.dumps(HTML_RULES))
    program = MODULES / "html-validate" / "bin" / "html-validate.mjs"
    command = ["node", str(program), "--config", str(folder / "rules.json"), "--formatter", "json"]
    done = subprocess.run([*command, str(folder / "page.html")], capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    messages = [message for page in json.loads(done.stdout) for message in page["messages"]]
    return [f"{message['line']}: {message['ruleId']}: {message['message']}" for message in messages]


def axe_findings(chrome):
    """What axe says of the page that is open, one line each."""
    chrome.execute_script((MODULES / "axe-core" / "axe.min.js").read_text())
    result = chrome.execute_async_script(
        "axe.run().then(arguments[0], (error) => arguments[0]({error: String(error)}))"
    )
    assert "error" not in result, result
    assert result["passes"]  # it has looked at something
    return [f"{found['id']}: {node['html'][:120]}" for found in result["violations"] for node in found["nodes"]]
