"""The page of the zoo has every architecture, and says what came of each cell."""

import pytest
from helpers.paths import script
from helpers.zoo import LIMITS, TWO_RANKS, ZOO
from helpers.zoo_cells import Outcome, reason

REFUSED = Outcome(
    "mistral",
    "sglang",
    1,
    "refused",
    message="ModelError: has sliding windows in 0 of its 2 layers",
)
DIFFERS = Outcome("gemma", "sglang", 1, "differs", 8e-4, "logprobs differ by 8e-04")  # fmt: skip


def test_the_page_has_every_architecture():
    rows = [line.split(" | ")[0] for line in script("zoo").PAGE.read_text().splitlines()]
    for name in ZOO:
        assert rows.count(f"| {name}") == 1 + (name in TWO_RANKS), f"{name}: run make zoo"


def test_a_cell_says_how_far_it_differs_or_why_it_does_not_run(monkeypatch):
    module, notes = script("zoo"), {}
    works = Outcome("llama", "vllm", 1, "works", 4.05e-6)
    cells = [module.cell(one, notes) for one in (works, REFUSED, DIFFERS, REFUSED, None)]
    assert cells == ["4e-06", "refused (a)", "differs (b)", "refused (a)", "not run"]
    assert [letter for letter in notes.values()] == ["a", "b"]
    assert "computes gelu exactly" in list(notes)[1]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (REFUSED, True),
        (DIFFERS, True),
        (Outcome("llama", "sglang", 1, "works", 1e-6), True),
        (Outcome("llama", "sglang", 1, "differs", 1e-3, "logprobs differ by 1e-03"), False),
        (Outcome("mistral", "sglang", 1, "works", 1e-6), False),  # the limit is gone: say so
        (Outcome("mistral", "sglang", 1, "refused", message="out of memory"), False),
        (Outcome("phi3", "transformers", 1, "works", 1e-6), True),
        (Outcome("phi3", "transformers", 2, "works", 1e-6), False),
    ],
)
def test_what_is_not_as_the_limits_say_is_told(outcome, expected):
    assert (outcome.unexpected() is None) == expected


def test_limits_are_of_architectures_in_the_zoo():
    assert {name for name, _ in LIMITS} <= ZOO.keys()


def test_the_reason_is_the_last_error_of_a_log():
    log = "EngineDied: it died; the end of its log:\n  | Traceback\n  | pack.errors.ModelError: no such part\n  | bye"
    assert reason(log) == "ModelError: no such part"
    assert reason("[rank0]: RuntimeError: expect bfloat16\n") == "RuntimeError: expect bfloat16"
