"""docs/configuration.md: its reference is of the config classes as they are."""

from helpers.paths import script


def test_the_reference_is_up_to_date():
    module = script("reference")
    assert module.page() == module.PAGE.read_text(), (
        "docs/configuration.md is stale: run python ci/reference.py"
    )
