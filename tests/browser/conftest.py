# SPDX-License-Identifier: Apache-2.0
"""A real headless Chromium, and a page of known counts."""

from __future__ import annotations

import os
import shutil

import pytest
from page_run import opened, write_data
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from rl_insight_hooks.report.main import run

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_data(root)
    return root


@pytest.fixture(scope="session")
def page(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "load.html"
    assert run(["html", str(data), "-o", str(out), "--title", "A <i>run</i>"]) == 0
    return out


@pytest.fixture(scope="session")
def downloads(tmp_path_factory):
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="session")
def chromium(tmp_path_factory, downloads):
    binary = os.environ.get("RLIH_CHROMIUM") or shutil.which("chromium")
    driver = os.environ.get("RLIH_CHROMEDRIVER") or shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("chromium and chromedriver are not on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.add_argument("--window-size=1400,1700")
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    yield browser
    browser.quit()


@pytest.fixture
def browser(chromium, page):
    chromium.set_window_size(1400, 1700)
    yield opened(chromium, page)
    assert [e for e in chromium.get_log("browser") if e["level"] != "INFO"] == []
