"""Events of two sides: recorded anew each time, opened once, waited for each time."""

from __future__ import annotations

import torch

from hybridflow.kit.hosting.fence import Fence


class Cuda:
    """Counts what torch.cuda is asked for."""

    def __init__(self) -> None:
        self.made, self.opened, self.recorded, self.waited = 0, [], 0, []
        outer = self

        class Event:
            def __init__(self, interprocess: bool):
                outer.made += 1

            def record(self, stream) -> None:
                outer.recorded += 1

            def ipc_handle(self) -> bytes:
                return b"own"

            @staticmethod
            def from_ipc_handle(device, handle: bytes) -> bytes:
                outer.opened.append((str(device), handle))
                return b"event of " + handle

        self.Event = Event

    def current_stream(self, device):
        return self

    def wait_event(self, event: bytes) -> None:
        self.waited.append(event)


def test_an_event_is_made_once_and_recorded_each_time():
    cuda = Cuda()
    fence = Fence(torch.device("cuda", 1), cuda)
    assert [fence.record(), fence.record()] == [b"own", b"own"]
    assert (cuda.made, cuda.recorded) == (1, 2)


def test_another_side_s_event_is_opened_once_and_waited_for_each_time():
    cuda = Cuda()
    fence = Fence(torch.device("cuda", 1), cuda)
    for handle in (b"a", b"b", b"a", None):
        fence.wait(handle)
    assert cuda.opened == [("cuda:1", b"a"), ("cuda:1", b"b")]
    assert cuda.waited == [b"event of a", b"event of b", b"event of a"]
