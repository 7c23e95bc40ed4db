"""A checkpoint's files: no changed byte is taken for a value."""

from __future__ import annotations

import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from helpers.damage import Touches
from safetensors.torch import load_file

from hybridflow.core.errors import CheckpointError, DamagedError
from hybridflow.core.values.sealed import read_sealed, write_sealed
from hybridflow.core.values.weights import Box
from hybridflow.kit import checkpoint_saving
from hybridflow.kit.checkpoint_files import Index, PartReader, StatePart
from hybridflow.kit.checkpoint_saving import rank_writer

WHOLE = torch.arange(24.0).view(6, 4)
INDEX = "index-00000-of-00001.json"


def written(folder: Path) -> Index:
    """A matrix in two boxes, a scalar and three half-precision numbers."""
    parts = [
        StatePart("w", (6, 4), Box((0, 0), (2, 4)), WHOLE[:2]),
        StatePart("w", (6, 4), Box((2, 0), (6, 4)), WHOLE[2:]),
        StatePart("s", (), Box((), ()), torch.tensor(2.5)),
        StatePart("h", (3,), Box((0,), (3,)), torch.ones(3, dtype=torch.bfloat16)),
    ]
    rank_writer().write(parts, folder, 0, 1, 9).done(wait=True)
    return Index.read(folder)


def read(folder: Path) -> dict[str, torch.Tensor]:
    index = Index.read(folder)
    values = {e: torch.zeros(index.shape(e), dtype=index.dtype(e)) for e in index.entries}
    parts = [StatePart(e, index.shape(e), Box.full(index.shape(e)), v) for e, v in values.items()]
    with PartReader(folder, index) as reader:
        reader.fill(parts)
    return {**values, "version": torch.tensor(index.version)}


def test_what_was_written_is_read(tmp_path):
    written(tmp_path)
    values = read(tmp_path)
    assert torch.equal(values["w"], WHOLE) and values["s"] == 2.5 and values["version"] == 9
    assert torch.equal(values["h"], torch.ones(3, dtype=torch.bfloat16))


def test_the_files_are_safetensors_and_the_checksums_xxh3(tmp_path):
    index = written(tmp_path)
    tensors = load_file(tmp_path / "rank-00000-0.safetensors")
    assert torch.equal(tensors["w@2,0"], WHOLE[2:]) and tensors["s@"] == 2.5
    place = index.entries["w"]["parts"][1]
    assert place["sum"] == xxhash.xxh3_64_hexdigest(WHOLE[2:].numpy().tobytes())


def test_any_box_is_read_from_the_parts_that_it_meets(tmp_path):
    index = written(tmp_path)
    values = torch.zeros(3, 2)
    with PartReader(tmp_path, index) as reader:
        reader.fill([StatePart("w", (6, 4), Box((1, 1), (4, 3)), values)])
    assert torch.equal(values, WHOLE[1:4, 1:3])


def test_a_file_holds_about_as_much_as_it_may(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_saving, "FILE_BYTES", 40)
    written(tmp_path)  # 32, 64, 4 and 6 bytes
    sizes = {
        path.name: sum(tensor.nbytes for tensor in load_file(path).values())
        for path in tmp_path.glob("*.safetensors")
    }
    assert sizes == {f"rank-00000-{n}.safetensors": size for n, size in enumerate((32, 64, 10))}
    assert torch.equal(read(tmp_path)["w"], WHOLE)


def test_no_changed_byte_is_taken_for_another_value(tmp_path):
    """Every file, 400 flipped bits, 40 cuts: the same values, or an error."""
    (tmp_path / "good").mkdir()
    written(tmp_path / "good")
    good = read(tmp_path / "good")
    draw = random.Random(0)
    refused = 0
    for number in range(440):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", folder)
        file = draw.choice(sorted(folder.iterdir()))
        content = bytearray(file.read_bytes())
        if number < 400:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        else:
            del content[draw.randrange(len(content)) :]
        file.write_bytes(content)
        try:
            values = read(folder)
        except DamagedError:
            refused += 1
        else:
            assert all(torch.equal(values[name], good[name]) for name in good)
    assert refused > 390


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(dtype="load"),
        lambda entry: entry.update(dtype="nothing"),
        lambda entry: entry.update(shape=[-6, -4]),
        lambda entry: entry.update(shape=[6.0, 4]),
        lambda entry: entry["parts"][0].update(file="../elsewhere"),
        lambda entry: entry["parts"][0].update(file=3),
        lambda entry: entry["parts"][0].update(start=[0]),
        lambda entry: entry["parts"][0].pop("sum"),
        lambda entry: entry.pop("parts"),
    ],
)
def test_an_index_that_somebody_else_made_up_is_refused(tmp_path, change):
    written(tmp_path)
    fields = read_sealed(tmp_path / INDEX)
    change(fields["entries"]["w"])
    write_sealed(tmp_path / INDEX, fields)
    with pytest.raises(DamagedError, match="is not an index of a checkpoint"):
        Index.read(tmp_path)


def test_an_index_with_a_part_less_is_damaged(tmp_path):
    written(tmp_path)
    fields = read_sealed(tmp_path / INDEX)
    fields["entries"]["w"]["parts"].pop()
    write_sealed(tmp_path / INDEX, fields)
    with pytest.raises(DamagedError, match="16 elements of w are in no file"):
        read(tmp_path)


def two_ranks(folder: Path) -> None:
    """The same, of two ranks."""
    for rank, rows in enumerate((slice(0, 2), slice(2, 6))):
        box = Box((rows.start, 0), (rows.stop, 4))
        parts = [StatePart("w", (6, 4), box, WHOLE[rows])]
        rank_writer().write(parts, folder, rank, 2, 9).done(wait=True)


def test_the_indexes_of_all_ranks_make_one(tmp_path):
    two_ranks(tmp_path)
    assert torch.equal(read(tmp_path)["w"], WHOLE)
    assert sorted(path.name for path in tmp_path.glob("index*")) == [
        "index-00000-of-00002.json",
        "index-00001-of-00002.json",
    ]


def test_without_the_index_of_a_rank_a_folder_is_not_complete(tmp_path):
    with pytest.raises(DamagedError, match=r"has no index-\*\.json"):
        Index.read(tmp_path)
    two_ranks(tmp_path)
    (tmp_path / "index-00001-of-00002.json").unlink()
    with pytest.raises(DamagedError, match=r"has no index-00001-of-00002\.json"):
        Index.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda fields: fields.update(version=8), "index files of several checkpoints"),
        (lambda fields: fields["entries"]["w"].update(dtype="float16"), "another shape or dtype"),
    ],
)
def test_indexes_that_do_not_belong_together_are_refused(tmp_path, change, said):
    two_ranks(tmp_path)
    file = tmp_path / "index-00001-of-00002.json"
    fields = read_sealed(file)
    change(fields)
    write_sealed(file, fields)
    with pytest.raises(DamagedError, match=said):
        Index.read(tmp_path)


def test_indexes_of_one_and_of_two_ranks_are_not_of_one_checkpoint(tmp_path):
    two_ranks(tmp_path)
    with pytest.raises(DamagedError, match="index files of several checkpoints"):
        written(tmp_path)


def test_another_format_is_said(tmp_path):
    written(tmp_path)
    write_sealed(tmp_path / INDEX, read_sealed(tmp_path / INDEX) | {"format": 7})
    with pytest.raises(CheckpointError, match="has format 7, this reads 2"):
        Index.read(tmp_path)


def test_nothing_is_unpickled(tmp_path):
    canary = tmp_path / "canary"
    code = pickle.dumps(Touches(canary))
    for name in (INDEX, "rank-00000-0.safetensors", ".metadata"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        written(folder)
        (folder / name).write_bytes(code)
        if name == ".metadata":
            assert torch.equal(read(folder)["w"], WHOLE)
        else:
            with pytest.raises(DamagedError):
                read(folder)
    assert not canary.exists()
    pickle.loads(code)
    assert canary.exists()
