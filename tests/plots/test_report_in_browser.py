"""The report's page in a real Chromium, driven as a reader would: no error, and every control does
what it says.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from hostile_names import HOSTILE

import relayquant as rq
from relayquant.plots.build import Report
from relayquant.plots.page import chart_errors, render_report
from relayquant.plots.report_data import Suggestion

webdriver = pytest.importorskip("selenium.webdriver")
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium.webdriver.chrome.service import Service

    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    yield started
    started.quit()


@pytest.fixture
def page(browser, report, tmp_path):
    report.save(tmp_path / "report.html")
    browser.get((tmp_path / "report.html").as_uri())
    yield browser
    assert browser.get_log("browser") == [], "nothing on the console"


def find(page, selector: str):
    return page.find_element("css selector", selector)


def find_all(page, selector: str):
    return page.find_elements("css selector", selector)


def texts(page, selector: str) -> list[str]:
    return [element.text for element in find_all(page, selector) if element.is_displayed()]


def type_text(page, selector: str, text: str) -> None:
    field = find(page, selector)
    field.clear()
    field.send_keys(text)


@pytest.mark.slow
def test_page__hostile_names_are_shown_and_do_nothing(page):
    assert page.title == "<b>hostile"
    names = texts(page, "#ledger tbody th")
    assert set(HOSTILE) <= set(names)


@pytest.mark.slow
def test_page__tables_filter(page, report):
    count = len(report.data.operators)
    assert find(page, "[data-count=ledger]").text == f"{count} of {count} operators"
    type_text(page, "[data-filter=ledger]", "cumsum")
    assert texts(page, "#ledger tbody th") == [HOSTILE[2]]
    assert find(page, "[data-count=ledger]").text == f"1 of {count} operators"
    type_text(page, "[data-filter=ledger]", " ")
    find(page, "#kind option[value=float]").click()
    floating = [row.name for row in report.data.ledger.floating]
    assert texts(page, "#ledger tbody th") == floating


def test_page__tables_sort(page, report):
    column = "#ledger thead th:nth-child(5)"
    find(page, f"{column} button").click()
    assert find(page, column).get_attribute("aria-sort") == "ascending"
    shown = [t for t in texts(page, "#ledger tbody td:nth-child(5)") if t]
    values = [float("inf") if text == "exact" else float(text) for text in shown]
    assert values == sorted(values)
    assert len(values) == len(report.data.compare.rows)
    find(page, f"{column} button").click()
    assert find(page, column).get_attribute("aria-sort") == "descending"
    shown = [t for t in texts(page, "#ledger tbody td:nth-child(5)") if t]
    assert [float("inf") if t == "exact" else float(t) for t in shown] == values[::-1]


def test_page__a_click_on_a_box_opens_its_operator(page, report):
    index = next(i for i, v in enumerate(report.data.operators) if v.row.name == HOSTILE[0])
    box = find(page, f"#network .box[data-index='{index}']")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", box)
    page.execute_script("centre(arguments[0])", box)
    webdriver.ActionChains(page).click(box).perform()
    assert find(page, "#operator").get_attribute("open") is not None
    assert find(page, "#operator-head").text == HOSTILE[0]
    assert "conv2d" in find(page, "#operator-body").text
    assert len(find_all(page, "#operator-body svg.plot")) == 2, "values and weights"
    webdriver.ActionChains(page).send_keys(Keys.ESCAPE).perform()
    assert find(page, "#operator").get_attribute("open") is None


def test_page__the_keyboard_goes_through_the_network(page, report):
    page.execute_script("arguments[0].focus()", find(page, "#network .box[tabindex='0']"))
    webdriver.ActionChains(page).send_keys(Keys.ARROW_DOWN, Keys.ENTER).perform()
    assert find(page, "#operator-head").text == report.data.operators[1].row.name


@pytest.mark.slow
def test_page__the_network_is_searched_coloured_and_zoomed(page, report):
    type_text(page, "#find", "cumsum")
    assert find(page, "#found").text == "1 found"
    (hit,) = find_all(page, "#network .box.hit")
    assert hit.get_attribute("aria-label").startswith(HOSTILE[2])
    for mode in ("dtype", "error", "time"):
        find(page, f"#colour option[value={mode}]").click()
        assert find(page, "#network").get_attribute("data-colour") == mode
        shown = [e for e in find_all(page, "#legend ul") if e.is_displayed()]
        assert [e.get_attribute("data-for") for e in shown] == [mode]
    kinds = {e.get_attribute("data-kind") for e in find_all(page, "#network .box[data-index]")}
    assert kinds == {"int8", "float"} or kinds == {"int8", "wide", "float"}
    before = find(page, "#network").get_dom_attribute("viewBox")
    find(page, "#closer").click()
    assert find(page, "#network").get_dom_attribute("viewBox") != before


def test_page__the_patch_is_copied_or_selected(browser, report, hostile, tmp_path):
    mapping = report.data.ranking.to_mapping(1).to_dict()
    data = replace(report.data, suggestion=Suggestion((HOSTILE[0],), 10.0, 20.0, mapping))
    Report(data, render_report(data)).save(tmp_path / "report.html")
    browser.get((tmp_path / "report.html").as_uri())
    find(browser, "#summary details summary").click()
    find(browser, "[data-copy=patch]").click()
    selenium_wait(lambda: find(browser, "#patch-copied").text)
    shown = find(browser, "#patch").text
    if find(browser, "#patch-copied").text != "copied":
        assert browser.execute_script("return String(getSelection())").strip() == shown
    patch = rq.QConfigMapping.from_dict(json.loads(shown))
    prepared = rq.prepare(hostile[0], None, qconfig_mapping=patch, effort="fast")
    floating = {op.name for op in prepared.plan.operators if not op.quantized}
    assert report.data.ranking.rows[0].name in floating


def selenium_wait(condition) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(None, 10).until(lambda _: condition())


@pytest.mark.slow
def test_page__the_chart_is_sorted_and_says_which_operator_it_is(page, report):
    rows = {row.index: row for row in chart_errors(report.data).rows}
    assert texts(page, "#chart .link") == [row.label for row in rows.values()]
    find(page, "[data-sort=damage]").click()
    shown = [int(e.get_attribute("data-row")) for e in find_all(page, "#chart li")]
    assert [rows[i].damage for i in shown] == sorted(row.damage for row in rows.values())
    assert find(page, "[data-sort=damage]").get_attribute("aria-pressed") == "true"
    item = find(page, "#chart li .track")
    webdriver.ActionChains(page).move_to_element(item).perform()
    assert find(page, "#tip").text.startswith(report.data.operators[shown[0]].row.name)
    for mark in find_all(page, "#chart .mark"):
        assert mark.rect["x"] >= 0
    find(page, "[data-sort=depth]").click()
    assert texts(page, "#chart .link") == [row.label for row in rows.values()]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_page__fits_its_window(page, width):
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    wide = page.execute_script("return document.documentElement.scrollWidth")
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide <= width
