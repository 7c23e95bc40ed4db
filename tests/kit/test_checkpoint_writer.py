"""The program that writes checkpoints, as a process: files that safetensors reads, and answers."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
import xxhash
from helpers.waiting import eventually
from safetensors.torch import load_file

from hybridflow.core.processes import page
from hybridflow.core.processes.look import looks
from hybridflow.core.values.sealed import read_sealed
from hybridflow.kit import checkpoint_writer
from hybridflow.kit.checkpoint_writer import DTYPES, receive, send, write_file


def part(entry: str, values: torch.Tensor, at: int, start=()) -> dict:
    return {
        "entry": entry,
        "start": list(start or [0] * values.dim()),
        "shape": list(values.shape),
        "dtype": str(values.dtype).removeprefix("torch."),
        "at": at,
        "nbytes": values.nbytes,
    }


def as_bytes(values: torch.Tensor) -> bytes:
    return bytes(values.reshape(-1).view(torch.uint8).numpy().data) if values.numel() else b""


def region_of(*tensors: torch.Tensor) -> tuple[bytes, list[int]]:
    """The tensors one after the other, each at a multiple of 64 bytes."""
    content, places = bytearray(), []
    for values in tensors:
        content += bytes(-len(content) % 64)
        places.append(len(content))
        content += as_bytes(values)
    return bytes(content), places


def test_every_dtype_is_read_by_safetensors_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "CHUNK", 5)  # in many pieces
    tensors = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        values = torch.arange(7) % 2 if name == "bool" else torch.arange(7) - 3
        if name.startswith("u"):
            values = values.abs()
        tensors[name] = values.float().to(dtype) if "float8" in name else values.to(dtype)
    content, places = region_of(*tensors.values())
    parts = [
        part(name, values, at) for (name, values), at in zip(tensors.items(), places, strict=True)
    ]
    sums = write_file(tmp_path / "x.safetensors", memoryview(content), parts)
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == {f"{name}@0" for name in DTYPES}
    for (name, values), digest in zip(tensors.items(), sums, strict=True):
        assert found[f"{name}@0"].dtype == values.dtype
        assert as_bytes(found[f"{name}@0"]) == as_bytes(values)
        assert digest == xxhash.xxh3_64_hexdigest(as_bytes(values))


@pytest.fixture
def start(tmp_path):
    """Starts a writer; returns this side's connection and the process."""
    started = []

    def begin():
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "hybridflow.kit.checkpoint_writer"]
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, page.FOLDER: str(tmp_path / "pages")},
            )
        started.append((ours, process))
        return ours, process

    yield begin
    for ours, process in started:
        ours.close()
        process.kill()
        process.wait()


def shared(content: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.truncate(descriptor, len(content))
    mmap.mmap(descriptor, len(content))[:] = content
    return descriptor


def file_of(job: int, folder, parts, file="rank-00000-0.safetensors", region=0) -> dict:
    about = {"kind": "file", "job": job, "folder": str(folder)}
    return {**about, "file": file, "region": region, "parts": parts}


def index_of(job: int, folder, **entries) -> dict:
    fields = {"format": 2, "version": 5, "entries": entries}
    about = {"kind": "index", "job": job, "folder": str(folder)}
    return {**about, "file": "index-00000-of-00001.json", "fields": fields}


def test_a_region_is_written_freed_and_used_again(start, tmp_path):
    connection, _ = start()
    first, second = torch.arange(6.0).view(2, 3), torch.ones(4)
    content, (at, other) = region_of(first, second)
    descriptor = shared(content)
    entry = {"shape": [4, 3], "dtype": "float32", "parts": []}
    send(connection, file_of(7, tmp_path, [part("w", first, at, (2, 0))]), descriptor)
    free, descriptor = receive(connection)
    record = {"entry": "w", "start": [2, 0], "shape": [2, 3], "file": "rank-00000-0.safetensors"}
    record["sum"] = xxhash.xxh3_64_hexdigest(as_bytes(first))
    assert free == {"kind": "free", "job": 7, "region": 0, "parts": [record], "why": None}
    assert descriptor is None
    send(connection, file_of(7, tmp_path, [part("b", second, other)], "rank-00000-1.safetensors"))
    assert receive(connection)[0]["kind"] == "free"
    entries = {"w": entry, "b": {"shape": [4], "dtype": "float32", "parts": []}}
    send(connection, index_of(7, tmp_path, **entries))
    assert receive(connection)[0] == {"kind": "written", "job": 7}
    index = read_sealed(tmp_path / "index-00000-of-00001.json")
    assert index["version"] == 5
    assert index["entries"]["w"]["parts"] == [
        {
            "start": [2, 0],
            "shape": [2, 3],
            "file": "rank-00000-0.safetensors",
            "sum": xxhash.xxh3_64_hexdigest(as_bytes(first)),
        }
    ]
    assert torch.equal(load_file(tmp_path / "rank-00000-0.safetensors")["w@2,0"], first)
    assert torch.equal(load_file(tmp_path / "rank-00000-1.safetensors")["b@0"], second)


def test_a_job_that_fails_says_why_has_no_index_and_the_next_one_is_written(start, tmp_path):
    connection, process = start()
    values = torch.ones(3)
    parts = [part("w", values, 0)]
    entry = {"shape": [3], "dtype": "float32", "parts": []}
    send(connection, file_of(0, tmp_path / "gone", parts), shared(as_bytes(values)))
    first, _ = receive(connection)
    send(connection, file_of(0, tmp_path, parts))  # of the same job: it is not tried
    second, _ = receive(connection)
    assert first == second and first["parts"] is None
    assert first["why"].startswith("FileNotFoundError: ")
    send(connection, index_of(0, tmp_path, w=entry))
    answer, _ = receive(connection)
    assert (answer["kind"], answer["job"]) == ("failed", 0)
    assert answer["why"].startswith("FileNotFoundError: [Errno 2] No such file or directory: ")
    assert not list(tmp_path.glob("index*")) and not list(tmp_path.glob("*.safetensors"))

    send(connection, file_of(1, tmp_path, parts))
    send(connection, index_of(1, tmp_path, w=entry))
    assert [receive(connection)[0]["kind"] for _ in range(2)] == ["free", "written"]
    assert process.poll() is None


def test_a_writer_ends_with_its_rank_and_is_seen_by_its_name(start, tmp_path):
    pages = tmp_path / "pages"
    pages.mkdir()
    connection, process = start()
    [look] = eventually(lambda: looks(pages))
    assert look.name == f"writer of process {os.getpid()}" and look.pid == process.pid
    connection.close()
    assert process.wait(20) == 0


def test_a_writer_makes_no_folder_of_pages_that_its_run_has_removed(start, tmp_path):
    connection, _ = start()
    values = torch.ones(3)
    send(connection, file_of(0, tmp_path, [part("w", values, 0)]), shared(as_bytes(values)))
    assert receive(connection)[0]["kind"] == "free"  # it has begun
    assert not (tmp_path / "pages").exists()


def test_what_a_stopped_writer_is_sent_is_written_when_it_goes_on(start, tmp_path):
    connection, process = start()
    process.send_signal(signal.SIGSTOP)
    values = torch.arange(1000.0)
    send(connection, file_of(0, tmp_path, [part("w", values, 0)]), shared(as_bytes(values)))
    process.send_signal(signal.SIGCONT)
    assert receive(connection)[0]["kind"] == "free"
    assert torch.equal(load_file(tmp_path / "rank-00000-0.safetensors")["w@0"], values)
