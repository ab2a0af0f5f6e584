"""The page of `fedvlm serve`, in a browser: an image is chosen, and its class, set and heat map are shown."""

import time

import pytest

from fedvlm.serving import create_app, open_service
from tests.helpers.browser import chrome  # noqa: F401
from tests.helpers.classifiers import export_classifier
from tests.helpers.live_server import running


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the page did not answer"
        time.sleep(0.05)


@pytest.mark.parametrize(("method", "settings"), [("ridge", {}), ("fedotp", {"rounds": 1, "lr": 0.01})])
def test_a_person_chooses_an_image_and_reads_its_class(chrome, tmp_path, method, settings):  # noqa: F811
    folder, images = export_classifier(tmp_path, method, **settings)
    image = next((images / "site-0" / "red").iterdir())
    with running(create_app(open_service(folder), "secret")) as url:
        chrome.get(url)
        chrome.find_element("id", "file").send_keys(str(image))
        status = chrome.find_element("id", "status")
        wait_for(lambda: "token is missing" in status.text)
        chrome.find_element("id", "token").send_keys("secret")
        chrome.find_element("id", "coverage").send_keys("0.9")
        chrome.find_element("id", "file").send_keys(str(images / "site-0" / "red" / image.name))
        chrome.execute_script("document.getElementById('file').dispatchEvent(new Event('change'))")
        wait_for(lambda: "set of classes" in status.text or "Unlike" in status.text)
        cells = [cell.text for cell in chrome.find_elements("css selector", "#rows td")]
        assert {"red", "blue"} <= set(cells) and sum(float(text[:-2]) for text in cells[1::2]) == pytest.approx(100, 1)
        shown = chrome.find_element("id", "image")
        assert shown.is_displayed() and shown.size["width"] > 0
        chrome.save_screenshot(str(tmp_path / "page.png"))
    errors = [entry["message"] for entry in chrome.get_log("browser") if entry["level"] == "SEVERE"]
    assert [message for message in errors if "401" not in message] == []
