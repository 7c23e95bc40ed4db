"""What the tests in this folder share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the ranks import the helpers by these names
