"""Reports in a real browser: Chromium, driven by Playwright. `make test-browser` runs these tests, and fails without one.

browser   (session) Chromium
demo      (session) the folder of the demo's runs: runs/arithmetic of this checkout, or one that is run here
opened    opened(file, hash="") -> a page that is drawn; what it says on the console or raises fails the test
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

NAMES = ("chromium", "chromium-browser", "google-chrome")
DEMO = ROOT / "runs/arithmetic"
WIDTH, HEIGHT = 1280, 900
collect_ignore_glob = [] if os.environ.get("HYBRIDFLOW_BROWSER") else ["test_*.py"]


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program, f"none of {', '.join(NAMES)} is installed: apt-get install chromium"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Path:
    if (DEMO / "grpo/done.json").is_file() and (DEMO / "grpo/recording").is_dir():
        return DEMO
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "hybridflow.cli.main", "run"]
    config = str(ROOT / "examples/arithmetic.toml")
    print("the demo is run first: some minutes; `make demo` leaves it for the next time")
    subprocess.run([*command, config], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder / "runs/arithmetic"


@pytest.fixture
def opened(browser):
    said: list[str] = []
    pages = []

    def open_page(address: str | Path, view: str = ""):
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        pages.append(page)
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if other(request.url) else None)
        url = address.resolve().as_uri() if isinstance(address, Path) else address
        page.goto(f"{url}#{view}")
        page.wait_for_selector("[role=tab]")
        return page

    def other(url: str) -> bool:
        return not url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:"))

    yield open_page
    for page in pages:
        page.close()
    assert said == []
