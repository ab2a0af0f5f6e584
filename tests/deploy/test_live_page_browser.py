"""The live page in a real browser: a light changes while somebody looks."""

import base64
import os

import pytest

from fedvlm.deploy.operations.events import EventLog
from fedvlm.deploy.operations.live_page import create_app
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.people import add_person
from tests.helpers.browser import open_page
from tests.helpers.live_server import running


def wait(chrome, script, seconds=30):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(chrome, seconds).until(lambda it: it.execute_script(f"return {script}"))


@pytest.fixture
def live_page(chrome, place):
    """The server's page; afterwards nothing was complained of."""
    place.run()
    hosts = set()
    with running(create_app(place.kit.folder, "word", hosts)) as url:
        hosts.add(url.removeprefix("http://"))
        open_page(chrome, 1000, "light")
        chrome.get_log("browser")
        chrome.get(f"{url}/?token=word")
        yield chrome
        assert chrome.get_log("browser") == []
        chrome.get("about:blank")


def test_a_light_changes_when_a_site_goes_missing_and_the_round_goes_on(live_page, place):
    wait(live_page, "document.querySelectorAll('.light.answers').length === 3")
    log_event = EventLog(place.kit.folder)
    log_event("begun", method="fedot", training="all", rounds=9, sites=["art", "photo", "sketch"])
    log_event("missing", round=4, site="photo", why="it did not answer <b>in time</b>")
    log_event("round", round=4, rounds=9, answered=2, asked=3, there=["art", "sketch"], share=0.5)
    wait(live_page, "document.querySelectorAll('.light.missing').length === 1")
    text = live_page.execute_script("return document.body.textContent")
    assert "round 4 of 9" in text and "<b>in time</b>" in text
    assert "1 of 3 sites do not take part" in text
    picture(live_page, "watch-server")


def test_a_person_at_a_site_reads_what_is_asked_and_accepts_it_in_the_page(chrome, place):
    place.asks_for_consent("photo")
    place.run()
    folder, hosts = place.site("photo"), set()
    token = add_person(folder, "A. Person", "approver")
    with running(create_app(folder, "word", hosts)) as url:
        hosts.add(url.removeprefix("http://"))
        open_page(chrome, 1000, "light")
        chrome.get(f"{url}/?token=word")
        wait(chrome, "document.body.textContent.includes('What for: a test of consent')")
        picture(chrome, "watch-site")
        chrome.execute_script("document.getElementById('by').value = 'A. Person'")
        chrome.execute_script("document.getElementById('secret').value = arguments[0]", token)
        chrome.execute_script("document.getElementById('accept').click()")
        wait(chrome, "!document.body.textContent.includes('What for: a test of consent')")
        chrome.get("about:blank")
    assert [line["by"] for line in Ledger(folder).read().lines if line["direction"] == "consent"] == ["A. Person"]


def picture(chrome, name):
    """For docs/pictures, where somebody asks for it."""
    if place_of_pictures := os.environ.get("FEDVLM_PICTURES"):
        data = chrome.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        with open(f"{place_of_pictures}/{name}.png", "wb") as file:
            file.write(base64.b64decode(data["data"]))
