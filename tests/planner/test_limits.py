"""What limits a stage, and how well it uses the devices: by hand, on devices with rates of our own."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from helpers.planned import planned

from hybridflow.kit.huggingface.shapes import llama_shape
from hybridflow.planner import Cluster, Device, Nodes, Task, Workload, plan_mapping
from hybridflow.planner.cluster import Efficiency
from hybridflow.planner.jobs import JobPlan, Plannable
from hybridflow.planner.limits import generated, limits, utilisation

SHAPE = llama_shape(4, 2, 2, 2, 2, 8, 10)
"""2 layers of hidden 4, 2 heads of 2, intermediate 8, vocabulary 10."""
LAYER = 4 * 16 + 3 * 32 + 2 * 4  # q, k, v, o; gate, up, down; norms
TRUNK = 5 * (2 * 2 * LAYER + 2 * 2 * 2 * 2 * 5)
"""Operations of a sequence of 5 tokens: 2 per weight, and attention of 2 layers over 5."""
HEAD = 2 * 2 * 4 * 10
"""Those of the head, for 2 tokens of the response."""
NOTHING: dict[str, Any] = {
    f.name: 0.0
    for f in attrs.fields(Efficiency)
    if f.name.endswith(("_us", "_ms", "_passes", "overlap"))
}


def on(devices: int, *tasks: Task, nodes: int = 1, **efficiency: float) -> tuple[JobPlan, Any]:
    """The plan of an actor on devices that take 1,000 operations and move 1,000 bytes a second."""
    actor = planned(
        "actor", SHAPE, trained=True, weight_bytes=4, gradient_bytes=4, optimizer_bytes=8,
        compute_bytes=4,
    )  # fmt: skip
    reached = Efficiency(training=0.5, inference=0.25, optimizer=1.0, **{**NOTHING, **efficiency})
    device = Device(memory_gb=1, tflops=1e-9, bandwidth_gbs=1e-6, link_gbs=1e-6, name="slow")
    cluster = Cluster((Nodes(device, nodes, devices, 5e-7, reached),))
    work = Workload(tasks, 3, 2)
    plan = JobPlan(None, cluster, Plannable(work, (actor,)))  # type: ignore[arg-type]
    return plan, plan_mapping(cluster, work, (actor,))


def test_a_forward_pass_is_limited_by_products_and_uses_what_is_reached():
    plan, mapping = on(1, Task("actor", "infer", 6))
    assert utilisation(plan, mapping, "infer") == pytest.approx(0.25)
    (respect, share), *others = limits(plan, mapping)["infer"]
    assert (respect, share) == ("matrix products", pytest.approx(1.0))
    assert all(share == pytest.approx(0.0) for _, share in others)


def test_an_update_is_limited_by_products_and_by_the_memory_of_its_optimizer():
    """The products take twice their ideal time; 28 bytes a parameter go through the memory."""
    plan, mapping = on(1, Task("actor", "train", 6))
    [actor] = plan.work.models
    products = 2 * 3 * 6 * (TRUNK + HEAD)
    traffic = 28 * actor.size.params
    assert mapping.seconds * 1000 == pytest.approx(products + traffic)
    shares = dict(limits(plan, mapping)["train"])
    assert shares["matrix products"] == pytest.approx(products / (products + traffic))
    assert shares["memory bandwidth"] == pytest.approx(traffic / (products + traffic))
    used = 3 * 6 * (TRUNK + HEAD) / (products + traffic)
    assert utilisation(plan, mapping, "train") == pytest.approx(used)


def test_recomputation_takes_time_and_does_no_work_of_the_model():
    plan, mapping = on(1, Task("actor", "train", 600))
    [actor] = plan.work.models
    way = attrs.evolve(actor.settings.way, recompute=True)
    again = attrs.evolve(actor, settings=attrs.evolve(actor.settings, way=way))
    work = attrs.evolve(plan.work, models=(again,))
    recomputed = attrs.evolve(plan, work=work)
    slower = plan_mapping(plan.cluster, work.workload, (again,))
    ratio = utilisation(recomputed, slower, "train") / utilisation(plan, mapping, "train")
    assert ratio == pytest.approx(mapping.seconds / slower.seconds)
    assert 0.7 < ratio < 0.8  # three passes in place of four


def test_fixed_work_of_each_sequence_limits_generation():
    """10 ms a sequence and step; everything else doubles as fast in vain."""
    plan, mapping = on(1, Task("actor", "generate", 6), sequence_us=1e9)
    (respect, share), *_ = limits(plan, mapping)["generate"]
    assert respect == "launches and work per sequence"
    assert share > 0.99
    assert generated(plan) == 6 * 2


def test_a_network_limits_what_goes_through_it():
    """Two nodes of one device: gradients go between them, through 400 bytes a second."""
    plan, mapping = on(1, Task("actor", "train", 6), nodes=2)
    [actor] = plan.work.models
    reduced = 4 * actor.size.params / 400  # each of two ranks sends two halves
    shares = dict(limits(plan, mapping)["train"])
    assert mapping.devices == 2
    assert shares["the network between nodes"] == pytest.approx(reduced / mapping.seconds)
    assert shares["links inside nodes"] == pytest.approx(0.0)
    assert sum(shares.values()) == pytest.approx(1.0)
