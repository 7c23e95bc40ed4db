"""Our transports against the kit."""

import pytest

from hybridflow.kit.testing import TransportConformance


class TestTransports(TransportConformance):
    @pytest.fixture(params=["collective", "shared_memory"])
    def transport(self, request):
        return request.param


class TestDisk(TransportConformance):
    folder_setting = "folder"

    @pytest.fixture
    def transport(self):
        return "disk"
