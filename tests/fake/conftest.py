"""These tests register a device with PyTorch for the whole process, so they run apart: `make test-fake`."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("HYBRIDFLOW_FAKE") else ["test_*.py"]
