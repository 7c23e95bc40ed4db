"""Trackers of services, offline, by their real packages: `make test-trackers` runs them in an environment of their own."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("HYBRIDFLOW_TRACKERS") else ["test_*.py"]
