"""The pages of `fedvlm deploy watch` in a real browser, over a server and three sites that are real processes."""

import base64
import os
import subprocess
import sys
from io import BytesIO
from zipfile import ZipFile

import httpx
import pytest

from fedvlm.deploy.site.people import add_person
from fedvlm.deploy.site.policy import example_policy
from tests.helpers.browser import open_page

pytestmark = [
    pytest.mark.deployed,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("federation"),
]
STATEMENT = {
    "purpose": "Compare a shared classifier of coloured squares with one per site; nothing is published",
    "contact": "Dr Weber, weber@clinic.example",
}


@pytest.fixture
def watch():
    """Starts `fedvlm deploy watch` for a folder and returns its address."""
    processes = []

    def start(folder):
        command = [sys.executable, "-m", "fedvlm", "deploy", "watch", str(folder)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}))
        return processes[-1].stdout.readline().removeprefix("open ").strip()

    yield start
    for process in processes:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def wait(chrome, script, seconds=120):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(chrome, seconds).until(lambda it: it.execute_script(f"return {script}"))


def state_of(title):
    """The script that reads the state of a card."""
    card = f"[...document.querySelectorAll('.card')].find((card) => card.querySelector('h2').textContent === '{title}')"
    return f"({card}?.querySelector('.state').textContent)"


def take_picture(chrome, name, width=1000, scheme="light"):
    """For docs/pictures, where somebody asks for it (FEDVLM_PICTURES)."""
    if folder := os.environ.get("FEDVLM_PICTURES"):
        chrome.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        open_page(chrome, width, scheme)
        data = chrome.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        with open(f"{folder}/{name}-{width}-{scheme}.png", "wb") as file:
            file.write(base64.b64decode(data["data"]))


def test_people_watch_a_run_and_consent_to_it(federation, start_run, watch, chrome, tmp_path):
    site = federation.site("art")
    policy = example_policy(("*",), plain=True).replace("consent = false", "consent = true")
    (site / "policy.toml").write_text(policy)
    token = add_person(site, "Dr Lee", "approver")
    federation.rules(quorum=1.0)
    settings = federation.settings({"name": "fedot", "rounds": 120, "lr": 1e-3}, **STATEMENT)
    refused = start_run(federation, settings, tmp_path / "run")
    refused.join(300)
    assert "nobody at this site has consented" in str(refused.error)
    server_page, site_page = watch(federation.kit.folder), watch(site)

    open_page(chrome, 1000, "light")
    chrome.get(site_page)
    wait(chrome, f"{state_of('Consent')} === '1 waiting' && {state_of('Site')} === 'connected'")
    chrome.execute_script("document.getElementById('consent').click()")
    wait(chrome, "document.body?.textContent.includes('nothing is published')")
    for width, scheme in ((1000, "light"), (400, "dark")):
        take_picture(chrome, "watch-consent", width, scheme)
    fill = "document.querySelector('input[name={}]').value = arguments[0]"
    chrome.execute_script(fill.format("by"), "Dr Lee")
    chrome.execute_script(fill.format("secret"), token)
    chrome.execute_script("document.querySelector('button.accept').click()")
    wait(chrome, "document.body.textContent.includes('Dr Lee consents until')")

    run = start_run(federation, settings, tmp_path / "run")
    chrome.get(server_page)
    run.wait_for(lambda lines: len(lines) > 20)
    names = ("Site art", "Site photo", "Site sketch")
    wait(chrome, " && ".join(f"{state_of(name)} === 'takes part'" for name in names))
    assert "3 of 3 sites" in chrome.execute_script("return document.body.textContent")
    for width, scheme in ((1000, "light"), (1000, "dark"), (400, "light")):
        take_picture(chrome, "watch-server", width, scheme)
    assert chrome.execute_script(f"return {state_of('Run')}") == "running"
    chrome.get(site_page)
    wait(chrome, f"{state_of('Training')} === 'fedot'")
    for width, scheme in ((1000, "light"), (400, "dark")):
        take_picture(chrome, "watch-site", width, scheme)

    run.join(600)
    assert run.error is None and run.result is not None
    wait(chrome, "document.getElementById('headline').textContent.includes('correct with the federation')")
    link = chrome.execute_script("return document.querySelector('a[href^=\"classifiers/\"]').href")
    reply = httpx.get(link)
    assert reply.status_code == 200 and ZipFile(BytesIO(reply.content)).testzip() is None
    chrome.get(server_page)
    wait(chrome, f"{state_of('Run')} === 'ended' && document.getElementById('report') !== null")
    federation.kill(federation.sites["sketch"])
    wait(chrome, f"{state_of('Site sketch')} === 'not connected'", 150)
    take_picture(chrome, "watch-ended")
    chrome.get("about:blank")
