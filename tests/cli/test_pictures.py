"""Pictures of plans: what is in them, and files that cannot be drawn."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from helpers.configs import printed

from hybridflow.cli.pictures import draw_steps
from hybridflow.core.contracts.planner import Bar, Plan, Prediction
from hybridflow.core.errors import ConfigError

pytest.importorskip("matplotlib", reason="draws the pictures")

BARS = (
    Bar("actor+ref\non 4", "actor", 0.0, 2.0),
    Bar("actor+ref\non 4", "ref", 2.0, 1.0),
    Bar("critic\non 2", "critic", 2.0, 0.0),
    Bar("critic\non 2", "critic", 3.0, 4.0),
)
PLAN = Plan(settings={}, prediction=Prediction(7.0), bars=BARS, ends=(2.0, 3.0, 7.0))


def told(svg: Path) -> list[str]:
    """The texts of a picture: matplotlib draws letters, and says in a comment what they spell."""
    return re.findall(r"<!-- (.*?) -->", svg.read_text())


def drawn(svg: Path) -> list[tuple[str, float, float]]:
    """(colour, left, right) of each bar."""
    corners = r'd="M ([\d.]+) [\d.]+ \nL ([\d.]+) [^"]*z\n"'
    found = re.findall(corners + r"[^>]*fill: (#\w+); stroke: #ffffff", svg.read_text())
    return [(colour, float(left), float(right)) for left, right, colour in found]


def test_pools_roles_and_stages_are_in_the_picture(tmp_path):
    target = tmp_path / "step.svg"
    draw_steps(target, {"warm-up": PLAN, "main": PLAN})
    texts = told(target)
    assert texts.count("seconds of a step") == 2
    for name in ("actor", "critic", "ref", "warm-up", "main", "on 4", "on 2"):
        assert name in texts, name


def test_bars_are_as_long_as_their_seconds_and_a_role_has_a_colour(tmp_path):
    target = tmp_path / "step.svg"
    draw_steps(target, {None: PLAN})
    bars = drawn(target)
    second = bars[1][2] - bars[1][1]  # of ref
    begin = bars[0][1]
    spans = [((left - begin) / second, (right - begin) / second) for _, left, right in bars]
    for span, expected in zip(spans, [(0, 2), (2, 3), (3, 7)], strict=True):  # no bar of 0 seconds
        assert span == pytest.approx(expected, abs=1e-4)
    assert len({colour for colour, _, _ in bars}) == 3


def test_the_same_plan_gives_the_same_bytes(tmp_path):
    for name in ("one.svg", "two.svg"):
        draw_steps(tmp_path / name, {None: PLAN})
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_a_png_is_higher_the_more_stages_there_are(tmp_path):
    def size(stages: int) -> tuple[int, int]:
        draw_steps(tmp_path / "step.png", {f"stage {at}": PLAN for at in range(stages)})
        header = (tmp_path / "step.png").read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        return struct.unpack(">II", header[16:])

    one, two = size(1), size(2)
    assert one[0] == two[0] and one[1] < two[1]


def test_the_command_draws_its_plan(config, tmp_path):
    target = tmp_path / "step.svg"
    assert f"drawn: {target}" in printed(config, cluster="a100-80gb:1x8", timeline=str(target))
    assert {"actor", "critic", "ref", "reward", "seconds of a step"} <= set(told(target))


def test_what_cannot_be_drawn_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"--timeline .*ends in \.svg or \.png"):
        draw_steps(tmp_path / "step.jpeg", {None: PLAN})
    with pytest.raises(ConfigError, match=r"--timeline .*No such file or directory"):
        draw_steps(tmp_path / "nowhere" / "step.svg", {None: PLAN})
