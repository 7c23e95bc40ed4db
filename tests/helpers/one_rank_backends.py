"""The conformance kit on a training backend of one rank."""

from __future__ import annotations

import pytest

from hybridflow.kit.testing import TrainingBackendConformance


class OneRank(TrainingBackendConformance):
    """Subclass it with the backend and a config. Fixture `alone` is that of tests/backends/conftest.py."""

    layouts = ()

    @pytest.fixture
    def build(self, alone):
        def make(spec, optimizer):
            made = self.backend(spec, self.config, optimizer, alone)
            made.build()
            return made

        return make


class InBfloat16:
    """Before OneRank: what weights and compute in bfloat16 may differ by."""

    tolerance, gradient_tolerance, weight_tolerance = 0.2, 0.3, 1e-2
