# SPDX-License-Identifier: Apache-2.0
"""The page in a real Chromium: what it shows is what was counted, every control does what it says."""

from __future__ import annotations

import csv
import json
import statistics
import time

import pytest
from page_run import LAYERS, NUM_LOCAL, NUM_RANKS, ROLES, STEPS, opened, row_of
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from rl_insight_hooks.report.main import run

EXPERTS = range(NUM_RANKS * NUM_LOCAL)


def heatmap(browser):
    return browser.execute_script(
        "const t = document.getElementById('heatmap').data[0]; return {z: t.z, x: t.x, y: t.y, details: t.customdata}"
    )


def bars(browser):
    return browser.execute_script("return [...document.getElementById('devices').data[0].y]")


def trend(browser):
    return browser.execute_script(
        "return Object.fromEntries(document.getElementById('trend').data.map(t => [t.name, [...t.y]]))"
    )


def title_of(browser, plot):
    return browser.execute_script(f"return document.querySelector('#{plot} .gtitle').textContent")


def table(browser):
    rows = browser.find_elements(By.CSS_SELECTOR, "#table tbody tr")
    return [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in rows]


def choose(browser, control, text):
    Select(browser.find_element(By.ID, control)).select_by_visible_text(text)


def choose_role(browser, r):
    choose(browser, "role", ROLES[r])


def set_step(browser, index):
    browser.execute_script(
        "const s = document.getElementById('step'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
        index,
    )


def over_mean(values):
    return max(values) / statistics.mean(values)


def on_devices(row):
    return [sum(row[d * NUM_LOCAL : (d + 1) * NUM_LOCAL]) for d in range(NUM_RANKS)]


def test_opens_without_a_network(browser):
    asked = [
        json.loads(entry["message"])["message"]["params"]["request"]["url"]
        for entry in browser.get_log("performance")
        if '"Network.requestWillBeSent"' in entry["message"]
    ]
    assert asked
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    names = browser.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name)"
    )
    assert not [name for name in names if name.startswith("http")]


def test_names_are_text(browser):
    assert browser.find_element(By.ID, "title").text == "A <i>run</i>"
    choose_role(browser, 1)
    assert ROLES[1] in title_of(browser, "heatmap")
    assert ROLES[1] in browser.find_element(By.ID, "table-title").text
    assert not browser.find_elements(By.CSS_SELECTOR, "#verdict b, h1 i, #heatmap b")


def test_verdict_names_each_role(browser):
    texts = [e.text for e in browser.find_elements(By.CSS_SELECTOR, "#verdict > li")]
    for r, role in enumerate(ROLES):
        worst = max(over_mean(on_devices(row_of(r, layer))) for layer in LAYERS)
        (mine,) = (text for text in texts if text.startswith(role))
        assert f"worst {worst:.2f}" in mine


@pytest.mark.parametrize("r", [0, 1])
def test_heatmap_of_all_steps(browser, r):
    choose_role(browser, r)
    shown = heatmap(browser)
    assert shown["y"] == [str(layer) for layer in LAYERS]
    assert shown["x"] == [str(e) for e in EXPERTS]
    assert shown["z"] == [row_of(r, layer) for layer in LAYERS]
    ends = browser.execute_script(
        "const t = document.getElementById('heatmap')._fullData[0]; return [t.zmin, t.zmax]"
    )
    assert ends == [0, max(max(row) for row in shown["z"])]  # dark is no token, not the least


def test_slider_shows_one_step(browser):
    choose_role(browser, 0)
    for index, step in enumerate(STEPS):
        set_step(browser, index)
        assert browser.find_element(By.ID, "step-shown").text == f"step {step}"
        assert not browser.find_element(By.ID, "all-steps").is_selected()
        assert heatmap(browser)["z"] == [row_of(0, layer, [step]) for layer in LAYERS]
        assert f"step {step}" in title_of(browser, "heatmap")
    browser.find_element(By.ID, "all-steps").click()
    assert heatmap(browser)["z"] == [row_of(0, layer) for layer in LAYERS]


def test_rank_selector(browser):
    choose_role(browser, 0)
    choose(browser, "rank", "1")
    missing = [None] * NUM_LOCAL
    assert heatmap(browser)["z"] == [missing + row_of(0, layer, ranks=[1]) for layer in LAYERS]
    # one rank holds a part of the experts: nothing is said of devices then, and gaps have no number
    assert title_of(browser, "trend") == "max / mean over experts, step by step"
    ratios = [[over_mean(row_of(0, la, [s], [1])) for la in LAYERS] for s in STEPS]
    assert trend(browser)["worst layer"] == pytest.approx([max(r) for r in ratios])
    area, dx, dy = cell_place(browser, 4, 1)
    ActionChains(browser).move_to_element_with_offset(area, dx, dy).pause(0.5).perform()
    assert browser.find_element(By.CSS_SELECTOR, "#heatmap .hoverlayer").text == ""
    choose(browser, "rank", "all, merged")
    assert heatmap(browser)["z"] == [row_of(0, layer) for layer in LAYERS]
    assert title_of(browser, "trend") == "max / mean over devices, step by step"


def test_layer_selector_bars_and_trend(browser):
    choose_role(browser, 1)
    total = [
        sum(column) for column in zip(*(on_devices(row_of(1, la)) for la in LAYERS), strict=True)
    ]
    assert bars(browser) == total
    ratios = [[over_mean(on_devices(row_of(1, la, [s]))) for la in LAYERS] for s in STEPS]
    lines = trend(browser)
    assert lines["worst layer"] == pytest.approx([max(r) for r in ratios])
    assert lines["mean over layers"] == pytest.approx([statistics.mean(r) for r in ratios])
    choose(browser, "layer", "4: model.layers.4.mlp.experts")
    assert bars(browser) == on_devices(row_of(1, 4))
    assert trend(browser)["layer 4"] == pytest.approx([r[LAYERS.index(4)] for r in ratios])
    assert "layer 4" in title_of(browser, "devices")
    (chosen,) = browser.find_elements(By.CSS_SELECTOR, "#table tr.chosen")
    assert chosen.find_element(By.TAG_NAME, "td").text == "4"
    chosen.click()  # a row chooses its layer, and gives it back
    assert bars(browser) == total


def test_normalised_logarithmic_sorted(browser):
    choose_role(browser, 0)
    choose(browser, "normalize", "tokens / mean of the layer")
    expected = [[n / statistics.mean(row_of(0, la)) for n in row_of(0, la)] for la in LAYERS]
    for shown, row in zip(heatmap(browser)["z"], expected, strict=True):
        assert shown == pytest.approx(row)
    choose(browser, "normalize", "tokens")
    browser.find_element(By.ID, "log").click()
    from math import log10

    for shown, la in zip(heatmap(browser)["z"], LAYERS, strict=True):
        assert shown == pytest.approx([log10(n + 1) for n in row_of(0, la)])
    browser.find_element(By.ID, "log").click()
    choose(browser, "sort", "by load")
    total = [sum(row_of(0, la)[e] for la in LAYERS) for e in EXPERTS]
    order = sorted(EXPERTS, key=lambda e: -total[e])
    assert heatmap(browser)["x"] == [str(e) for e in order]
    assert heatmap(browser)["z"][0] == [row_of(0, LAYERS[0])[e] for e in order]
    choose(browser, "sort", "by id")


def test_table_sorts(browser):
    choose_role(browser, 0)
    by_layer = {la: row_of(0, la) for la in LAYERS}

    def head(name):
        for button in browser.find_elements(By.CSS_SELECTOR, "#table th button"):
            if button.text.split(" \u2193")[0].split(" \u2191")[0] == name:
                return button
        raise AssertionError(name)

    head("tokens").click()
    shown = table(browser)
    expected = sorted(LAYERS, key=lambda la: -sum(by_layer[la]))
    assert [int(row[0]) for row in shown] == expected
    head("tokens").click()
    assert [int(row[0]) for row in table(browser)] == expected[::-1]
    head("layer").click()
    assert [int(row[0]) for row in table(browser)] == list(LAYERS)
    for row in table(browser):
        counts = by_layer[int(row[0])]
        assert row[1] == f"model.layers.{row[0]}.mlp.experts"
        assert row[2] == f"{sum(counts):,}"
        assert row[3] == f"{over_mean(counts):.3f}"
        assert row[4] == f"{over_mean(on_devices(counts)):.3f}"
        assert row[5] == f"{statistics.pstdev(counts) / statistics.mean(counts):.3f}"
        assert row[6] == str(counts.count(0))
        assert row[7] == str(counts.index(max(counts)))
        assert row[8] == f"{max(counts):,}"


def downloaded(folder, name):
    path = folder / name
    end = time.monotonic() + 20
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_csv_downloads(browser, downloads):
    choose_role(browser, 1)
    set_step(browser, 1)
    browser.find_element(By.ID, "csv-counts").click()
    rows = downloaded(downloads, "counts.csv")
    assert rows == [["layer", "expert", "tokens"]] + [
        [str(la), str(e), str(row_of(1, la, [STEPS[1]])[e])] for la in LAYERS for e in EXPERTS
    ]
    browser.find_element(By.ID, "csv-table").click()
    head, *lines = downloaded(downloads, "layers.csv")
    assert head[:4] == ["layer", "name", "tokens", "max/mean"]
    assert [row[0] for row in lines] == [row[0] for row in table(browser)]
    for row in lines:
        counts = row_of(1, int(row[0]), [STEPS[1]])
        assert int(row[2]) == sum(counts)
        assert float(row[3]) == pytest.approx(over_mean(counts))


def test_csv_leaves_unknown_values_empty_and_quotes_names(browser):
    text = browser.execute_script("return csvOf([['a,b', NaN, 0], ['say \"x\"', 1.5, 2]])")
    assert list(csv.reader(text.splitlines())) == [["a,b", "", "0"], ['say "x"', "1.5", "2"]]


def cell_place(browser, layer, expert):
    """Return where a cell of the heatmap is, in px from the middle of the plot area, and that element."""
    area = browser.find_element(By.CSS_SELECTOR, "#heatmap .nsewdrag")
    size = area.size
    dx = size["width"] * ((expert + 0.5) / len(EXPERTS) - 0.5)
    dy = size["height"] * ((LAYERS.index(layer) + 0.5) / len(LAYERS) - 0.5)
    return area, int(dx), int(dy)


def test_hover_tells_the_exact_count(browser):
    choose_role(browser, 0)
    area, dx, dy = cell_place(browser, 4, 6)
    ActionChains(browser).move_to_element_with_offset(area, dx, dy).pause(0.5).perform()
    text = browser.find_element(By.CSS_SELECTOR, "#heatmap .hoverlayer").text
    row = row_of(0, 4)
    assert "layer 4, expert 6" in text
    assert f"{row[6]:,} tokens, {row[6] / statistics.mean(row):.2f}x the mean" in text


def test_zoom_and_back(browser):
    choose_role(browser, 0)
    full = browser.execute_script("return document.getElementById('heatmap').layout.xaxis.range")
    area, dx, dy = cell_place(browser, 3, 2)
    _, to_x, to_y = cell_place(browser, 4, 5)
    ActionChains(browser).move_to_element_with_offset(area, dx, dy).click_and_hold().move_by_offset(
        to_x - dx, to_y - dy
    ).release().perform()
    near = browser.execute_script("return document.getElementById('heatmap').layout.xaxis.range")
    assert full[0] < near[0] < near[1] < full[1]
    ActionChains(browser).move_to_element_with_offset(area, dx, dy).double_click().pause(
        0.5
    ).perform()
    assert (
        browser.execute_script("return document.getElementById('heatmap').layout.xaxis.range")
        == full
    )


@pytest.mark.parametrize("width", [1400, 620])
def test_nothing_is_cut_off(browser, width, tmp_path):
    browser.set_window_size(width, 1700)
    opened(browser, _path(browser))
    picture = tmp_path / f"page_{width}.png"
    assert browser.save_screenshot(str(picture))
    assert picture.stat().st_size > 20_000
    assert browser.execute_script(
        "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    # the labels of an axis keep clear of one another
    overlaps = browser.execute_script(
        """
        return ['heatmap', 'devices', 'trend'].flatMap(id => ['xtick', 'ytick'].flatMap(kind => {
          const boxes = [...document.querySelectorAll(`#${id} .${kind} text`)].map(t => t.getBoundingClientRect());
          return boxes.slice(1).filter((b, i) => kind === 'xtick' ? b.left < boxes[i].right - 1
            : b.top < boxes[i].bottom - 1 && boxes[i].top < b.bottom - 1);
        })).length"""
    )
    assert overlaps == 0


def _path(browser):
    from pathlib import Path
    from urllib.parse import unquote, urlparse

    return Path(unquote(urlparse(browser.current_url).path))


def test_expert_map_gives_the_devices(chromium, data, tmp_path):
    """Two devices of five slots: experts 0 and 5 have a copy on each."""
    placement = [[0, 1, 2, 3, 5], [4, 0, 5, 6, 7]]
    layers = [
        {
            "layer_id": i,
            "device_count": 2,
            "device_list": [
                {"device_id": d, "device_expert": experts} for d, experts in enumerate(placement)
            ],
        }
        for i in range(len(LAYERS))
    ]
    expert_map = tmp_path / "map.json"
    expert_map.write_text(json.dumps({"moe_layer_count": len(LAYERS), "layer_list": layers}))
    out = tmp_path / "mapped.html"
    assert run(["html", str(data), "-o", str(out), "--map", str(expert_map)]) == 0
    browser = opened(chromium, out)
    choose_role(browser, 0)
    choose(browser, "layer", "6: model.layers.6.mlp.experts")
    row = row_of(0, 6)
    copies = {e: sum(e in experts for experts in placement) for e in EXPERTS}
    assert bars(browser) == pytest.approx(
        [sum(row[e] / copies[e] for e in experts) for experts in placement]
    )
    assert "the expert map" in title_of(browser, "devices")
