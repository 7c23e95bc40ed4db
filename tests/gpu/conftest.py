"""These tests need a GPU (`make test-gpu`), which CI has not: elsewhere they are not collected."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
