"""Our transports against the kit."""

import pytest

from hybridflow.kit.testing import TransportConformance


class TestTransports(TransportConformance):
    @pytest.fixture(params=["collective", "shared_memory", "disk"])
    def transport(self, request):
        return request.param
