"""Clusters from files and in a word, what is wrong with them, sizes of pools, devices by name."""

from __future__ import annotations

import tomllib

import pytest
from helpers.configs import OWN_CLUSTER

from hybridflow.core.errors import ConfigError
from hybridflow.planner.cluster import (
    DEVICES,
    Cluster,
    Device,
    Efficiency,
    Nodes,
    RunsOn,
    device_called,
    read_cluster,
)

FILE = """
[[nodes]]
device = "mine"
count = 2
per_node = 4
between_gbps = 100
[devices.mine]
memory_gb = 24
tflops = 100
bandwidth_gbs = 500
link_gbs = 20
[efficiency.mine]
training = 0.4
"""


def test_a_cluster_of_ones_own_devices(tmp_path):
    (tmp_path / "cluster.toml").write_text(FILE)
    [nodes] = read_cluster(str(tmp_path / "cluster.toml")).nodes
    assert (nodes.device.name, nodes.device.memory_gb, nodes.devices, nodes.between_gbs) == (
        "mine",
        24,
        8,
        12.5,
    )
    assert nodes.efficiency == Efficiency(training=0.4) and nodes.figures == "given"
    assert nodes.sizes() == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the cluster has no device; give it [[nodes]]"),
        ('[[nodes]]\ndevice = "a100"', "nodes.0.device: which a100? There are a100-40gb and a100-80gb"),
        ('[[nodes]]\ndevice = "b100"', "nodes.0.device: no device is called 'b100'"),
        ('[[nodes]]\ndevice = "a100-80gb"\ncount = 0', "nodes.0.count: must be at least 1, got 0"),
        ('[[nodes]]\ndevice = "a100-80gb"\nbetween_gbps = 0', "between_gbps: must be above 0 and finite, got 0"),
        ('[[nodes]]\ndevice = "a100-80gb"\nbandwidth = 1', "unknown key"),
        (FILE.replace("link_gbs = 20", "link_gbs = 0"), "devices.mine.link_gbs: must be above 0 and finite, got 0"),
        (FILE.replace("memory_gb = 24", "memory_gb = inf"), "devices.mine.memory_gb: must be a finite number, got inf"),
        (FILE.replace("memory_gb = 24\n", ""), "memory_gb"),
        (FILE.replace("training = 0.4", "training = 1.4"), "efficiency.mine.training: must be above 0 and at most 1, got 1.4"),
        (FILE.replace("[efficiency.mine]", "[efficiency.yours]"), "efficiency.yours: no [[nodes]] are of this device"),
        ("[[nodes", "cluster.toml:"),
    ],
    ids=["empty", "two", "unknown", "none", "no-network", "key", "no-link", "endless", "no-memory", "share", "whose", "toml"],
)  # fmt: skip
def test_what_is_wrong_with_a_cluster_is_said(tmp_path, text, said):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_cluster(str(path))
    assert said in str(caught.value)


def test_a_cluster_in_a_word():
    [nodes] = read_cluster("h100-80gb:16x8@3200").nodes
    assert (nodes.devices, nodes.between_gbs, nodes.device) == (128, 400.0, DEVICES["h100-80gb"])
    with pytest.raises(ConfigError, match=r"is no file, and not DEVICE:\[NODESx\]DEVICES"):
        read_cluster("nowhere.toml")
    with pytest.raises(ConfigError, match=r"is no file, and not DEVICE:\[NODESx\]DEVICES"):
        read_cluster("h100-80gb:1x8@1.2.3")
    with pytest.raises(ConfigError, match="no device is called 'h1000'"):
        read_cluster("h1000:1x8")
    [short] = read_cluster("h100:8").nodes
    assert short == read_cluster("h100-80gb:8").nodes[0] == read_cluster("h100-80gb:1x8").nodes[0]
    with pytest.raises(ConfigError, match="which a100"):
        read_cluster("a100:8")
    two = Cluster((nodes, nodes))
    with pytest.raises(ConfigError, match="2 kinds of nodes"):
        two.sized(8)


@pytest.mark.parametrize(
    ("per_node", "count", "sizes"),
    [
        (1, 3, [1, 2, 3]),
        (8, 2, [1, 2, 4, 8, 16]),
        (6, 2, [1, 3, 6, 12]),  # halved; then by 3
        (15, 1, [1, 5, 15]),  # by its smallest factor
        (7, 1, [1, 7]),
    ],
)
def test_a_pool_has_a_part_of_a_node_or_whole_nodes(per_node, count, sizes):
    assert Nodes(Device(1, 1, 1, 1), count, per_node, 1).sizes() == sizes


def test_other_sizes_are_whole_nodes_or_a_part_of_one():
    cluster = Cluster.of("a100-80gb", 4, 8)
    for devices, count, per_node in ((1, 1, 1), (3, 1, 3), (8, 1, 8), (24, 3, 8), (64, 8, 8)):
        [nodes] = cluster.sized(devices).nodes
        assert (nodes.count, nodes.per_node, nodes.device) == (
            count,
            per_node,
            DEVICES["a100-80gb"],
        )
    for devices in (0, 9, 12):
        with pytest.raises(ConfigError, match=f"{devices} devices are not whole nodes of 8"):
            cluster.sized(devices)
    with pytest.raises(ConfigError, match="2 kinds of nodes"):
        Cluster((*cluster.nodes, *cluster.nodes)).sized(8)


def test_measured_figures_say_with_what():
    text = """
        [[nodes]]
        device = "l4-24gb"
        [efficiency.l4-24gb]
        training = 0.3
        [measured.l4-24gb]
        backend = "fsdp"
        engine = "vllm"
        bits = 16
    """
    [nodes] = Cluster.from_tables(tomllib.loads(text)).nodes
    assert nodes.figures == "measured" and nodes.measured == RunsOn("fsdp", "vllm", 16)
    assert nodes.memory == pytest.approx(0.9 * 24e9)  # unless the file says otherwise


def test_a_measured_section_without_efficiencies_is_told(tmp_path):
    (tmp_path / "odd.toml").write_text(
        OWN_CLUSTER + '[measured.laptop]\nbackend = "fsdp"\nengine = "vllm"\n'
    )
    with pytest.raises(ConfigError, match=r"measured\.laptop: there is no \[efficiency\.laptop\]"):
        Cluster.read(tmp_path / "odd.toml")


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA H20", "h20-96gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_drivers_names_of_known_devices(said, known):
    found = device_called(said)
    assert (found and found.name) == known
