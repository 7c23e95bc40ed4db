"""Takes the pictures of the demo's report that docs/seeing-a-run.md and the README show.

    python ci/screenshots.py [RUNS]        default: runs/arithmetic, which `make demo` leaves

It needs Chromium, and the extra `browser`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from hybridflow.report.building import write_report

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
NAMES = ("chromium", "chromium-browser", "google-chrome")
VIEWS = {
    "report-overview": ("tab=overview", 900),
    "report-samples": ("tab=samples&run=0&view=group&colour=rollout_logprobs&row=8", 620),
    "report-time": ("tab=time&run=0&step=12", 1250),
}
"""Name of the picture -> what the page shows, and its height in pixels."""
WIDTH = 1200


def main() -> int:
    runs = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs/arithmetic"
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        print(f"none of {', '.join(NAMES)} is installed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = write_report([runs], Path(folder) / "report.html")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, (view, height) in VIEWS.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": height})
            page.goto(f"{file.as_uri()}#{view}")
            page.wait_for_selector("[role=tab][aria-selected=true]")
            page.wait_for_timeout(300)
            page.screenshot(path=str(DOCS / f"{name}.png"))
            page.close()
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
