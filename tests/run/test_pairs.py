"""Preferences from files: a reward model and DPO with their held-out accuracy, then a policy trained on that model."""

from __future__ import annotations

import json

import pytest

from hybridflow.core.launch import run as launch
from tests.run.tiny import MODEL  # noqa: F401  (see below)
