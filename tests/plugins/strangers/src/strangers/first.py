"""A planner that puts every model on the first devices, data parallel, whatever that costs."""

import attrs

from hybridflow.core import HybridFlowError, Plan, Planner, Prediction
from hybridflow.core.contracts.planner import Line, TextTable


@attrs.frozen
class FirstConfig:
    devices: int = 0
    """How many of them; 0: all that the cluster has."""


class First(Planner):
    """Clusters are numbers: "4" has four devices."""

    Config = FirstConfig

    def _devices(self, cluster):
        if not cluster.isdigit():
            raise HybridFlowError(
                f"placement.cluster {cluster!r}: the planner first takes a number of devices"
            )
        return self.config.devices or int(cluster)

    def plan(self, job, cluster, alternatives=3, placed=False):
        devices = self._devices(cluster)
        tables = {
            name: {"pool": "all", "layout": {"dp": devices, "tp": 1, "pp": 1}}
            for name in job.models
        }
        return Plan(
            settings={"pools": {"all": [devices]}, **tables},
            prediction=self.predict(job, cluster),
            cluster=f"cluster: {devices} first devices",
            explanation=(
                Line("all on the first devices", "bold"),
                TextTable(("role",), tuple((name,) for name in job.models)),
            ),
        )

    def predict(self, job, cluster):
        work = {(name, "infer"): 60.0 / self._devices(cluster) for name in job.models}
        return Prediction(sum(work.values()), work)

    def problems(self, job, cluster):
        devices = self._devices(cluster)
        return [
            f"pool {p.name} has {p.world} devices" for p in job.pools.values() if p.world > devices
        ]
