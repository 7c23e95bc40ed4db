"""The docstring under a field is its documentation."""

from __future__ import annotations

import attrs

from hybridflow.settle.config.field_docs import field_docs


@attrs.frozen
class Engine:
    """Not a field's."""

    size: int = 1
    """Cylinders."""
    fuel: str = "none"
    power: float | None = None
    """Largest power;
    none: as it comes."""
    limit = 3
    """Not a field: it has no type."""

    def start(self):
        """Not a field's."""

    @attrs.frozen
    class Part:
        size: int = 2
        """Of the part."""


def test_the_docstring_under_a_field_is_its_documentation():
    assert dict(field_docs(Engine)) == {
        "size": "Cylinders.",
        "power": "Largest power;\nnone: as it comes.",
    }


def test_a_class_inside_another_has_its_own():
    assert dict(field_docs(Engine.Part)) == {"size": "Of the part."}


def test_a_subclass_inherits_and_replaces_the_documentation_of_fields():
    @attrs.frozen
    class Diesel(Engine):
        size: int = 6
        """Larger ones."""
        fuel: str = "oil"
        """What burns."""

    assert dict(field_docs(Diesel)) == {
        "size": "Larger ones.",
        "power": "Largest power;\nnone: as it comes.",
        "fuel": "What burns.",
    }


def test_a_class_without_source_has_no_documentation():
    assert dict(field_docs(attrs.make_class("Made", {"x": attrs.field(default=1)}))) == {}
    assert dict(field_docs(int)) == {}
