"""The adaptive KL coefficient and the Lagrange multiplier, step by step by hand."""

import json
import math

import pytest
import torch

from hybridflow.algorithms.functional import AdaptiveKL, LagrangeMultiplier


def test_the_kl_coefficient_moves_with_the_relative_error_clipped_to_a_fifth():
    controller = AdaptiveKL(init=0.5, target=6.0, horizon=1000)
    assert controller.value == 0.5
    # 6.6 / 6 - 1 = 0.1, times 100 / 1000: + 1 %
    assert controller.update(6.6, 100) == pytest.approx(0.5 * 1.01)
    # 60 / 6 - 1 = 9, clipped to 0.2: + 2 %;  0 / 6 - 1 = -1, clipped to -0.2: - 2 %
    assert controller.update(60.0, 100) == pytest.approx(0.5 * 1.01 * 1.02)
    assert controller.update(0.0, 100) == pytest.approx(0.5 * 1.01 * 1.02 * 0.98)
    assert controller.value == pytest.approx(0.5 * 1.01 * 1.02 * 0.98)


def test_the_kl_coefficient_stays_at_the_target_and_without_sequences():
    controller = AdaptiveKL(0.5, 6.0, 1000)
    assert controller.update(6.0, 100) == 0.5
    assert controller.update(60.0, 0) == 0.5


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_is_refused_and_changes_nothing(kl):
    controller = AdaptiveKL(0.5, 6.0, 1000)
    with pytest.raises(ValueError, match="kl must be a finite number"):
        controller.update(kl, 100)
    assert controller.value == 0.5


@pytest.mark.parametrize("n", [-1, 5000])
def test_a_count_that_could_turn_the_coefficient_negative_is_refused(n):
    controller = AdaptiveKL(0.5, 6.0, 1000)
    with pytest.raises(ValueError, match=f"below 5 \\* horizon = 5000, got {n}"):
        controller.update(0.0, n)
    assert controller.update(0.0, 4999) > 0.0


@pytest.mark.parametrize("name", ["init", "target", "horizon"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_adaptive_kl_refuses_numbers_that_are_not_positive(name, bad):
    with pytest.raises(
        ValueError, match=f"AdaptiveKL: {name} must be a positive finite number, got {bad}"
    ):
        AdaptiveKL(**{"init": 0.5, "target": 6.0, "horizon": 1000, name: bad})


def multiplier(**changes):
    return LagrangeMultiplier(
        **{"init": 2.0, "lr": 0.1, "limit": 1.0, "maximum": 5.0, "window": 3, **changes}
    )


def test_the_multiplier_rises_above_the_limit_and_falls_below_it():
    # log lam + 0.1 * 2 * (mean(4, 2) - 1) = log 2 + 0.4
    assert multiplier().update([4.0, 2.0]) == pytest.approx(2.0 * math.exp(0.4))
    # mean -1: log 2 - 0.4
    assert multiplier().update(torch.tensor([-2.0, 0.0])) == pytest.approx(2.0 * math.exp(-0.4))
    assert multiplier().update([1.0]) == pytest.approx(2.0)


def test_the_mean_cost_is_taken_over_the_latest_sequences_of_the_window():
    m = multiplier(maximum=1e6)
    first = m.update([9.0, 4.0, 2.0, 3.0])  # the last three: mean 3, log lam + 0.1 * 2 * 2
    assert first == pytest.approx(2.0 * math.exp(0.4))
    second = m.update([7.0])  # 2, 3, 7: mean 4
    assert second == pytest.approx(first * math.exp(0.1 * first * 3.0))


def test_the_multiplier_never_exceeds_its_maximum_and_can_come_down_again():
    m = multiplier()
    assert m.update([1e9]) == pytest.approx(5.0)
    assert m.value <= 5.0
    assert m.update([-1e9, 1.0, -1.0]) < 5.0


def test_no_costs_change_nothing():
    m = multiplier()
    first = m.update([3.0])
    assert m.update([]) == first
    assert m.update(torch.zeros(0)) == first


def test_a_cost_that_is_not_finite_is_refused_and_changes_nothing():
    m = multiplier()
    before = m.state_dict()
    with pytest.raises(ValueError, match=r"1 that are not: \[nan\]"):
        m.update([1.0, math.nan])
    assert m.state_dict() == before


@pytest.mark.parametrize("name", ["init", "lr", "maximum", "window"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_the_multiplier_refuses_numbers_that_are_not_positive(name, bad):
    with pytest.raises(
        ValueError, match=f"LagrangeMultiplier: {name} must be a positive finite number, got {bad}"
    ):
        multiplier(**{name: bad})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": 6.0}, "init must not exceed maximum"),
        ({"window": 2.5}, "whole number"),
        ({"limit": math.nan}, "limit must be a finite number"),
    ],
)
def test_the_multiplier_refuses_what_does_not_fit_together(changes, message):
    with pytest.raises(ValueError, match=message):
        multiplier(**changes)


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda: AdaptiveKL(0.5, 6.0, 1000), [(6.6, 100), (9.0, 50), (1.0, 100)]),
        (multiplier, [([4.0, 2.0],), ([0.5],), ([-1.0, 2.0],)]),
    ],
)
def test_a_restored_controller_goes_on_exactly_as_the_saved_one(make, steps):
    saved = make()
    saved.update(*steps[0])
    restored = make()
    restored.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    for step in steps[1:]:
        assert restored.update(*step) == saved.update(*step)
    assert restored.value == saved.value
    assert restored.value != make().value


def test_a_state_dict_is_a_snapshot():
    m = multiplier()
    m.update([4.0])
    state = m.state_dict()
    m.update([2.0])
    assert state["costs"] == [4.0]


def test_damping_answers_to_the_excess_at_once_and_goes_with_it():
    # log l = log 2 + 0.1 * 2 * (3 - 1);  lam = l exp(0.5 * (3 - 1))
    lagrange = multiplier(damping=0.5, maximum=50.0)
    assert lagrange.value == pytest.approx(2.0)
    assert lagrange.update([3.0]) == pytest.approx(2.0 * math.exp(0.4) * math.exp(1.0))
    ended = multiplier(damping=0.5, maximum=50.0)
    ended.load_state_dict(lagrange.state_dict())
    assert ended.value == lagrange.value
    # the window's mean is back at the limit: l stays, and lam is l again
    assert lagrange.update([-1.0]) == pytest.approx(2.0 * math.exp(0.4))
    assert multiplier(damping=9.0).update([1000.0]) == 5.0
    with pytest.raises(ValueError, match="damping must be a finite number of at least 0, got -1"):
        multiplier(damping=-1)
