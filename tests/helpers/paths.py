"""Where things lie."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
DOCS = ROOT / "docs"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
"""Real data, read where it is; tests of it are skipped elsewhere."""
