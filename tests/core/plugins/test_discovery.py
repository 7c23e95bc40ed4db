"""The entry points of installed packages, read one package at a time."""

from __future__ import annotations

import sys

from hybridflow.core.plugins.discovery import FoundPlugin, entry_points


def of(*packages: str) -> list:
    """What is found of these packages; the others are really installed here."""
    found = [point for point in entry_points() if isinstance(point, FoundPlugin)]
    return [point for point in found if point.package.lower() in packages]


def broken() -> list[tuple[str, str, Exception]]:
    return [point for point in entry_points() if not isinstance(point, FoundPlugin)]


def test_every_entry_point_of_our_group_is_found_with_its_package(site):
    site("acme", {"reward.length": "acme_length:Length", "acme": "acme_plugin"}, version="1.2")
    assert of("acme") == [
        FoundPlugin("acme", "1.2", "acme", "acme_plugin"),
        FoundPlugin("acme", "1.2", "reward.length", "acme_length:Length"),
    ]


def test_other_groups_are_left_out(site):
    info = site("acme", {"length": "acme_length"})
    (info / "entry_points.txt").write_text("[console_scripts]\nhybridflow-more = acme:main\n")
    assert of("acme") == []
    both = "[console_scripts]\nacme = acme:main\n\n[hybridflow]\nmore = acme_more\n"
    (info / "entry_points.txt").write_text(both)
    assert [point.name for point in of("acme")] == ["more"]


def test_the_first_of_two_copies_of_a_distribution_counts(site, tmp_path, monkeypatch):
    site("the_acme", {"reward.length": "new:Length"}, version="2.0")
    site("The.Acme", {"reward.length": "old:Length"}, folder=tmp_path / "old")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "old")])
    assert of("the_acme", "the.acme") == [
        FoundPlugin("the_acme", "2.0", "reward.length", "new:Length")
    ]


def test_a_file_that_cannot_be_read_is_told_and_the_other_packages_are_found(site):
    malformed = site("malformed", {}, version="3.0")
    (malformed / "entry_points.txt").write_text("[hybridflow]\nno equals sign\n")
    undecoded = site("undecoded", {})
    (undecoded / "entry_points.txt").write_bytes(b"[hybridflow]\nreward.l\xe4nge = a:B\n")
    site("acme", {"reward.length": "acme_length:Length"})
    assert [point.name for point in of("acme")] == ["reward.length"]
    assert sorted((package, version) for package, version, _ in broken()) == [
        ("malformed", "3.0"),
        ("undecoded", "1.0"),
    ]
    assert any(isinstance(error, UnicodeDecodeError) for *_, error in broken())


def test_a_package_without_a_name_is_found_as_unknown(site):
    info = site("acme", {"reward.length": "acme_length:Length"})
    (info / "METADATA").unlink()
    assert of("unknown") == [FoundPlugin("unknown", "", "reward.length", "acme_length:Length")]
