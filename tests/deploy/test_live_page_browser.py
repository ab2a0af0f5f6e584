"""The live page and the consent page in a real browser, while somebody looks, and what html-validate and axe say."""

import base64
import os

import pytest

from fedvlm.deploy.operations.events import EventLog
from fedvlm.deploy.operations.live_page import create_app
from fedvlm.deploy.site.consent import waiting_requests
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.people import add_person
from tests.helpers.browser import open_page
from tests.helpers.live_server import running
from tests.helpers.page_checks import axe_findings, html_findings, require_page_tools


def wait(chrome, script, seconds=30):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(chrome, seconds).until(lambda it: it.execute_script(f"return {script}"))


@pytest.fixture
def served(chrome):
    """Opens a page of a folder; afterwards nothing was complained of."""
    servers = []

    def open_folder(folder, path="/", width=1000, scheme="light"):
        hosts = set()
        server = running(create_app(folder, "word", hosts))
        url = server.__enter__()
        servers.append(server)
        hosts.add(url.removeprefix("http://"))
        open_page(chrome, width, scheme)
        chrome.get_log("browser")
        chrome.get(f"{url}{path}?token=word")
        return chrome

    yield open_folder
    assert chrome.get_log("browser") == []
    chrome.get("about:blank")
    for server in servers:
        server.__exit__(None, None, None)


def body(chrome):
    return chrome.execute_script("return document.body.textContent")


def test_a_card_changes_when_a_site_goes_missing_and_the_round_goes_on(served, place):
    place.run()
    page = served(place.kit.folder)
    wait(page, "document.querySelectorAll('.card.good').length === 4")
    log_event = EventLog(place.kit.folder)
    log_event("begun", method="fedot", training="all", rounds=9, sites=["art", "photo", "sketch"])
    log_event("missing", round=4, site="photo", why="it did not answer <b>in time</b>")
    log_event("round", round=4, rounds=9, answered=2, asked=3, there=["art", "sketch"], share=0.5, kB=1.0, seconds=2.0)
    wait(page, "[...document.querySelectorAll('.card.bad h2')].some((title) => title.textContent === 'Site photo')")
    assert "4 of 9" in body(page) and "<b>in time</b>" in body(page) and "about 10 s" in body(page)
    assert page.execute_script("return document.querySelectorAll('main b').length") == 0
    assert "1 of 3 sites do not take part" in body(page)


def test_a_person_at_a_site_reads_what_is_asked_and_accepts_it_in_the_page(served, place):
    place.asks_for_consent("photo")
    folder = place.site("photo")
    token = add_person(folder, "A. Person", "approver")
    page = served(folder)
    place.run()
    wait(page, "[...document.querySelectorAll('nav a')].some((link) => link.textContent === 'Consent (1)')")
    page.execute_script("document.getElementById('consent').click()")
    wait(page, "document.body.textContent.includes('a test of consent')")
    secret = "document.querySelector('input[name=secret]').value"
    page.execute_script("document.querySelector('input[name=by]').value = 'A. Person'")
    page.execute_script(f"{secret} = 'wrong'; document.querySelector('button.accept').click()")
    wait(page, "document.getElementById('answer').textContent.includes('is wrong; try again')")
    assert waiting_requests(folder)
    page.get_log("browser")  # the browser notes the refusal itself
    page.execute_script(f"{secret} = arguments[0]; document.querySelector('button.accept').click()", token)
    wait(page, "document.body.textContent.includes('No request waits')")
    assert "A. Person consents until" in body(page)
    assert [line["by"] for line in Ledger(folder).read().lines if line["direction"] == "consent"] == ["A. Person"]


def test_a_person_refuses_in_the_page(served, place):
    place.asks_for_consent("photo")
    place.run()
    folder = place.site("photo")
    token = add_person(folder, "A. Person", "operator")
    page = served(folder, "/consent")
    page.execute_script("document.querySelector('input[name=by]').value = 'A. Person'")
    page.execute_script("document.querySelector('input[name=secret]').value = arguments[0]", token)
    page.execute_script("document.querySelector('button[value=refuse]').click()")
    wait(page, "document.body.textContent.includes('has refused, and the request is deleted')")
    assert waiting_requests(folder) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_axe_and_html_validate_find_nothing(served, place, tmp_path, width, scheme):
    require_page_tools()
    place.asks_for_consent("photo")
    place.run()
    add_person(place.site("photo"), "A. Person", "approver")
    log_event = EventLog(place.kit.folder)
    log_event("missing", round=3, site="photo", why="a reason that is long enough to be broken over lines " * 4)
    log_event("failed", why="x" * 200)
    for folder, path in (
        (place.kit.folder, "/"),
        (place.site("art"), "/"),
        (place.site("photo"), "/"),
        (place.site("photo"), "/consent"),
        (place.site("art"), "/consent"),
    ):
        page = served(folder, path, width, scheme)
        wait(page, "document.readyState === 'complete'")
        assert axe_findings(page) == [], (folder, path)
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
        html = page.execute_script("return fetch(location.href).then((reply) => reply.text())")
        assert html_findings(html, tmp_path) == [], (folder, path)


def picture(chrome, name):
    """For docs/pictures, where somebody asks for it."""
    if place_of_pictures := os.environ.get("FEDVLM_PICTURES"):
        data = chrome.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        with open(f"{place_of_pictures}/{name}.png", "wb") as file:
            file.write(base64.b64decode(data["data"]))
