"""Sealed JSON: what was written, or an error."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, strategies as st

from hybridflow.core.errors import DamagedError
from hybridflow.core.values.sealed import read_sealed, write_sealed

FIELDS = {"step": 3, "b": {"2": [1.5, None, "ä"]}, "a": float("inf")}


def test_what_was_written_is_read(tmp_path):
    file = tmp_path / "state.json"
    for fields in ({}, FIELDS, {"step": 4}):
        write_sealed(file, fields)
        assert read_sealed(file) == fields
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_file_in_the_place_of_another_is_damaged(tmp_path):
    write_sealed(tmp_path / "index.json", FIELDS)
    (tmp_path / "index.json").rename(tmp_path / "state.json")
    with pytest.raises(DamagedError, match=r"state\.json is not as it was written"):
        read_sealed(tmp_path / "state.json")


def test_the_checksum_is_sha256_of_the_name_and_the_other_keys(tmp_path):
    write_sealed(tmp_path / "f.json", {"b": 1, "a": "x"})
    expected = hashlib.sha256(b'f.json{"a": "x", "b": 1}').hexdigest()
    assert json.loads((tmp_path / "f.json").read_text())["sha256"] == expected


@given(st.data())
def test_no_changed_byte_is_taken_for_another_content(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("sealed") / "f.json"
    write_sealed(file, FIELDS)
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    try:
        assert read_sealed(file) == FIELDS  # white space, say
    except DamagedError as error:
        assert str(file) in str(error)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", '{"step": 3}', '{"sha256": "00"}', "[" * 100_000, "\0" * 90],
)
def test_what_is_no_sealed_file_is_damaged(tmp_path, text):
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(DamagedError, match=r"f\.json"):
        read_sealed(tmp_path / "f.json")


def test_a_file_that_is_not_there_or_no_file_is_damaged(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("nothing", "folder"):
        with pytest.raises(DamagedError, match=f"{name} cannot be read"):
            read_sealed(tmp_path / name)


def test_a_value_that_json_has_not_leaves_the_earlier_file(tmp_path):
    write_sealed(tmp_path / "f.json", FIELDS)
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_sealed(tmp_path / "f.json", {"value": object()})
    assert read_sealed(tmp_path / "f.json") == FIELDS
