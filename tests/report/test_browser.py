"""The page in a real browser without a network: nothing is asked for, and everything works."""

import base64
import json
from io import BytesIO

import pytest
from PIL import Image

from tests.helpers.browser import open_page


@pytest.fixture
def opened(chrome, bad_page):
    """The page, freshly loaded, 1280 wide and light; afterwards nothing was logged or asked for."""
    open_page(chrome, 1280, "light")
    for kind in ("browser", "performance"):
        chrome.get_log(kind)
    chrome.get(bad_page.as_uri())
    yield chrome
    assert chrome.get_log("browser") == []
    assert requests(chrome) == [bad_page.as_uri()]


def requests(chrome):
    events = [json.loads(event["message"])["message"] for event in chrome.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [event["request"]["url"] for event in sent if event["request"]["url"] != "data:,"]


def column(chrome, place):
    return chrome.execute_script(
        "return [...document.querySelectorAll('#main-table tbody tr')]"
        ".map(row => parseFloat(row.cells[arguments[0]].dataset.sort))",
        place,
    )


def test_names_run_nothing(opened):
    assert opened.execute_script("return window.broken") is None
    text = opened.execute_script("return document.body.textContent")
    assert "</script><script>window.broken=2</script>" in text


def test_press_on_a_heading_sorts_down_then_up(opened):
    before = column(opened, 1)
    button = opened.find_element("css selector", "#main-table th:nth-child(2) button")
    button.click()
    assert column(opened, 1) == sorted(before, reverse=True)
    button.send_keys("\n")  # by the keyboard
    assert column(opened, 1) == sorted(before)
    head = opened.find_element("css selector", "#main-table th:nth-child(2)")
    assert head.get_attribute("aria-sort") == "ascending"


def test_hover_tells_the_numbers_of_the_record(opened, bad_runs):
    from selenium.webdriver import ActionChains

    panel = opened.find_element("css selector", ".panel[data-key=accuracy]")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", panel)
    ActionChains(opened).move_to_element_with_offset(panel, -panel.size["width"] // 2 + 40, 0).perform()
    tip = opened.find_element("id", "tip")
    assert tip.is_displayed()
    assert tip.text.splitlines()[0] == "round 0"
    lines = [line for line in bad_runs[1].rounds if line["round"] == 0]
    mean = 100 * sum(line["accuracy"] for line in lines) / len(lines)
    line = next(line for line in tip.text.splitlines() if line.startswith("fedavg: "))
    assert float(line.split()[1]) == pytest.approx(mean, abs=0.2)
    linked = "return document.querySelectorAll('.rule:not([hidden])').length"
    assert opened.execute_script(linked) > 1
    ActionChains(opened).move_to_element(opened.find_element("css selector", "h1")).perform()
    assert not tip.is_displayed()


def test_arrow_keys_walk_along_a_panel(opened):
    panel = opened.find_element("css selector", ".panel[data-key=accuracy]")
    for number in range(3):
        panel.send_keys("\ue014")  # right
        assert opened.find_element("id", "tip").text.startswith(f"round {number}")
    panel.send_keys("\ue00c")  # escape
    assert not opened.find_element("id", "tip").is_displayed()


def test_a_chosen_seed_and_training_are_drawn(opened, bad_runs):
    line = ".panel[data-key=accuracy] .line[data-run='1']"
    points = f'return document.querySelector("{line}").getAttribute("points")'
    all_points = opened.execute_script(points)
    choose = (
        "const box = document.getElementById(arguments[0]); box.selectedIndex = arguments[1];"
        "box.dispatchEvent(new Event('change'))"
    )
    opened.execute_script(choose, "seed", 2)
    opened.execute_script(choose, "training", 1)
    training = bad_runs[1].manifest["trainings"][0]
    first = float(opened.execute_script(points).split()[0].split(",")[1])
    panel = "document.querySelector('.panel[data-key=accuracy]').dataset"
    y0, y1 = map(float, opened.execute_script(f"return {panel}.y").split())
    _, top, _, base = map(float, opened.execute_script(f"return {panel}.box").split())
    value = y0 + (base - first) / (base - top) * (y1 - y0)
    cell = next(c for c in _curves(bad_runs[1]) if c["seed"] == 1 and c["training"] == training)
    assert value == pytest.approx(cell["accuracy"][0], abs=0.005)
    opened.execute_script(choose, "seed", 0)
    opened.execute_script(choose, "training", 0)
    assert opened.execute_script(points) == all_points


def _curves(run):
    from fedvlm.report.page.model import build_model

    return build_model([run])["runs"][0]["curves"]


def test_a_key_hides_its_run_everywhere(opened):
    opened.find_element("css selector", ".key[data-run='1']").click()
    visible = (
        "return [...document.querySelectorAll('.panel .line[data-run=\"1\"]')]"
        ".filter(one => one.checkVisibility()).length"
    )
    assert opened.execute_script(visible) == 0
    opened.find_element("css selector", ".key[data-run='1']").click()
    assert opened.execute_script(visible) > 0


@pytest.mark.parametrize(
    ("form", "prefix"), [("Markdown", "| method | G |"), ("LaTeX", r"\begin{tabular}{lrrr"), ("CSV", "method,G,P,C,")]
)
def test_table_is_copied(opened, form, prefix):
    opened.find_element("css selector", f"[data-copy=main-table][data-form={form}]").click()
    text = opened.execute_script(
        "return document.querySelector('[data-copy=main-table]').parentNode.querySelector('.said').dataset.text"
    )
    assert text.startswith(prefix)
    assert "fedavg" in text and "level" not in text


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_not_wider_than_the_window_and_follows_the_scheme(opened, width, scheme):
    open_page(opened, width, scheme)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    shot = opened.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    corner = Image.open(BytesIO(base64.b64decode(shot))).convert("L").getpixel((2, 890))
    assert corner > 240 if scheme == "light" else corner < 40


def test_page_is_readable_without_script_and_prints(opened, bad_page):
    opened.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        opened.execute_cdp_cmd("Page.reload", {})
        printed = base64.b64decode(opened.execute_cdp_cmd("Page.printToPDF", {})["data"])
    finally:
        opened.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert printed[:5] == b"%PDF-" and len(printed) > 20_000
    opened.get_log("performance")
    opened.get(bad_page.as_uri())
