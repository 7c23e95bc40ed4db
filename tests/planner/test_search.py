"""The planner's search against trying everything, on random small clusters and models; and what it says when nothing fits."""

from __future__ import annotations

import itertools
import random

import attrs
import pytest
from helpers.every_mapping import NEVER, best_seconds
from helpers.planned import changed, planned

from hybridflow.core.errors import ConfigError
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.huggingface.shapes import llama_shape
from hybridflow.planner import (
    Cluster,
    Device,
    Nodes,
    NothingFitsError,
    PlannedModel,
    Task,
    Workload,
    plan_mapping,
)
from hybridflow.planner.cluster import Efficiency
from hybridflow.planner.pools import PoolPlanner
from hybridflow.planner.search import describe, partitions

CASES = 240


def random_shape(draw: random.Random) -> ModelShape:
    heads = draw.choice([2, 4])
    hidden = draw.choice([256, 512, 1024])
    return llama_shape(
        hidden, draw.choice([2, 4, 6]), heads, draw.choice([1, heads]), hidden // heads, draw.choice([2, 4]) * hidden,
        draw.choice([1000, 32000]), tied=draw.random() < 0.3,
    )  # fmt: skip


def odd_layouts(layout: ParallelLayout) -> bool:
    """What a backend may take."""
    return layout.dp % 2 == 0 or layout.tp > 1


def random_models(draw: random.Random, count: int) -> list[PlannedModel]:
    sharding = draw.choice(["3d", "3d-zero1", "fsdp", "zero1", "zero2", "zero3"])
    extra = dict(
        sharding=sharding,
        recompute=draw.random() < 0.5,
        offload=draw.random() < 0.2,
        micro_batch_tokens=draw.choice([64, 4096]),
        replicas=draw.choice([1, 1, 2]) if sharding == "fsdp" else 1,
        shares_weights=draw.random() < 0.5,
    )
    engine = dict(max_sequences=draw.choice([2, 1 << 30]), keeps_engine=draw.random() < 0.3)
    engine |= dict(
        memory_share=draw.choice([0.3, 1.0]) if engine["keeps_engine"] else draw.choice([0.5, 1.0])
    )
    engine |= dict(
        cache_gb=draw.choice([None, 0.01]),
        cache_tokens=draw.choice([None, 4096]),
        takes=draw.choice([None, odd_layouts]),
    )
    made = [planned("actor", random_shape(draw), trained=True, **extra, **engine)]
    kinds = [("critic", True, "value"), ("ref", False, "policy"), ("reward", False, "value")]
    for name, trained, head in draw.sample(kinds, count - 1):
        made.append(planned(name, random_shape(draw), trained=trained, head=head, **extra))
    return made


def random_workload(draw: random.Random, models: list[PlannedModel]) -> Workload:
    rows, mini = draw.choice([(8, 8), (64, 16), (256, 32), (3, 3)])
    tasks = [Task("actor", "generate", rows, draw.choice([1, 1, 2]))]
    for model in models:
        if model.name != "actor" or draw.random() < 0.5:
            tasks.append(Task(model.name, "infer", rows))
        if model.trained:
            tasks.append(Task(model.name, "train", mini, rows // mini))
    return Workload(tuple(tasks), draw.choice([16, 512]), draw.choice([16, 1024]))


def random_cluster(draw: random.Random, kinds: int, most: int) -> Cluster:
    nodes = []
    for _ in range(kinds):
        per_node = draw.choice([1, 2, 4])
        count = draw.randint(1, max(1, most // kinds // per_node))
        memory = draw.choice([0.02, 0.2, 1.0, 4.0])
        device = Device(
            memory,
            draw.choice([5, 50]),
            draw.choice([100, 1000]),
            draw.choice([10, 100]),
            name="random",
        )
        nodes.append(
            Nodes(
                device,
                count,
                per_node,
                draw.choice([0.5, 20]),
                Efficiency(sequence_us=draw.choice([0.0, 50.0])),
            )
        )
    return Cluster(tuple(nodes))


def random_case(seed: int):
    draw = random.Random(seed)
    count = draw.choice([1, 2, 2, 3, 3, 4])
    kinds = draw.choice([1, 2])
    models = random_models(draw, count)
    most = 16 if count * kinds < 6 else 8
    return random_cluster(draw, kinds, most), random_workload(draw, models), models


def test_the_search_finds_what_trying_everything_finds():
    nothing, several, placements = 0, 0, set()
    for seed in range(CASES):
        cluster, workload, models = random_case(seed)
        want = best_seconds(cluster, workload, models)
        try:
            found = plan_mapping(cluster, workload, models)
        except NothingFitsError as error:
            assert want == NEVER, f"case {seed}: the planner says {error}, and {want} is possible"
            nothing += 1
            continue
        assert found.seconds == pytest.approx(want, rel=1e-9), f"case {seed}"
        assert found.seconds == pytest.approx(sum(found.stages))
        check_fits(cluster, found)
        assert [m.seconds for m in (found, *found.others)] == sorted(
            m.seconds for m in (found, *found.others)
        )
        several += len(cluster.nodes) > 1 and len({p.kind for p in found.pools}) > 1
        placements.add((len(models), len(found.pools)))
    assert nothing >= 10 and several >= 5  # the cases are not all of one sort
    assert {(2, 1), (2, 2), (3, 1), (3, 2), (3, 3), (4, 1)} <= placements


def check_fits(cluster: Cluster, found) -> None:
    """Devices, and on each the memory of what lives there."""
    for kind, nodes in enumerate(cluster.nodes):
        pools = [p for p in found.pools if p.kind == kind]
        assert sum(p.entry.devices for p in pools) <= nodes.devices
        for pool in pools:
            taken = [c.option.bytes for c in pool.entry.choices]
            resident = sum(b.resident for b in taken)
            assert resident + max(max(b.training, b.inference) for b in taken) <= nodes.memory
            for choice in pool.entry.choices:
                assert choice.option.layout.world == pool.entry.devices
                assert choice.engines is None or choice.cache_bytes > 0


SMALL = llama_shape(256, 2, 4, 4, 64, 1024, 1000)
ONE = Workload((Task("actor", "generate", 8), Task("actor", "train", 8)), 16, 16)


def cluster(memory_gb=1.0, count=1, per_node=2) -> Cluster:
    return Cluster((Nodes(Device(memory_gb, 50, 1000, 100, name="small"), count, per_node, 10),))


def test_a_model_larger_than_everything_is_named_with_the_numbers():
    huge = attrs.evolve(SMALL, layers=200)
    with pytest.raises(NothingFitsError) as caught:
        plan_mapping(cluster(0.1), ONE, [planned("actor", huge, trained=True)])
    for part in ("actor (0.2 billion parameters)", "on 2 small with pp", "0.1 GB are usable"):
        assert part in str(caught.value)


def test_a_backend_that_takes_no_layout_and_an_engine_without_room_are_told_so():
    none = planned("actor", SMALL, trained=True, takes=lambda layout: False)
    with pytest.raises(NothingFitsError, match="its backend takes no layout of it on the sizes"):
        plan_mapping(cluster(), ONE, [none])
    small = planned("actor", SMALL, trained=True, memory_share=0.001)
    with pytest.raises(NothingFitsError, match="fits, and its engine does not"):
        plan_mapping(cluster(), ONE, [small])


def test_models_that_fit_alone_and_not_together_are_told_so():
    models = [
        planned("actor", SMALL, trained=True),
        planned("critic", SMALL, trained=True, head="value"),
    ]
    work = Workload((*ONE.tasks, Task("critic", "train", 8)), 16, 16)
    one = cluster(0.085, per_node=1)
    plan_mapping(one, ONE, models[:1])
    with pytest.raises(NothingFitsError, match="placement of all 2"):
        plan_mapping(one, work, models)


def test_a_workload_that_does_not_fit_the_models_is_refused():
    with pytest.raises(ConfigError, match="trains 'actor', which is frozen"):
        plan_mapping(cluster(), ONE, [planned("actor", SMALL)])


@pytest.mark.parametrize(
    ("items", "count"), [("", 1), ("a", 1), ("ab", 2), ("abc", 5), ("abcd", 15), ("abcde", 52)]
)
def test_there_are_as_many_placements_as_partitions(items, count):
    """Bell's numbers (OEIS A000110)."""
    found = [frozenset(frozenset(part) for part in parts) for parts in partitions(items)]
    assert len(found) == len(set(found)) == count
    assert all(sorted(itertools.chain(*parts)) == list(items) for parts in found)


def test_a_mapping_in_words():
    models = [planned("actor", SMALL, trained=True), planned("ref", SMALL)]
    work = Workload((*ONE.tasks, Task("ref", "infer", 8)), 16, 16)
    found = plan_mapping(cluster(), work, models)
    said = {describe(mapping) for mapping in (found, *found.others)}
    assert said == {"actor+ref on 2", "actor on 1 | ref on 1"}
    assert {mapping.devices for mapping in (found, *found.others)} == {2}


def test_how_to_free_what_an_engine_keeps_is_said_where_it_has_no_room():
    """A device that training fills leaves nothing to an engine that stays."""
    shape = llama_shape(64, 6, 4, 2, 16, 128, 1000)
    keeps = planned("actor", shape, trained=True, keeps_engine=True, micro_batch_tokens=4096)
    tasks = (Task("actor", "generate", 64), Task("actor", "train", 64))
    step = Workload(tasks, 16, 16)

    def on(nbytes):
        device = Device(nbytes / 1e9, 50, 1000, 100, name="small")
        return Cluster((Nodes(device, 1, 1, 10, Efficiency(usable=1.0)),))

    option = PoolPlanner(on(1e9).nodes[0], step).option(keeps, ParallelLayout())
    full = on(option.bytes.resident + option.most + 1)
    with pytest.raises(NothingFitsError, match=r"or set actor\.generation\.keep = false"):
        plan_mapping(full, step, (keeps,))
    freed = changed(keeps, keeps_engine=False)
    assert plan_mapping(full, step, (freed,)).seconds > 0
