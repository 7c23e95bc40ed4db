"""Tracker "mlflow" (the extra `mlflow`)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus, RunTag

from hybridflow.backends.trackers.config import MLflowConfig
from hybridflow.core.contracts.observer import SampleRow
from hybridflow.core.contracts.tracker import Tracker
from hybridflow.kit.tracking import (
    is_due,
    plain_json,
    remember_id,
    remembered_id,
    run_facts,
    sample_table,
)

LONGEST = 5000
"""Characters of a parameter; MLflow takes 6,000."""
AT_ONCE = 100
"""Parameters of a call; MLflow takes no more."""


class MLflowTracker(Tracker):
    """A plugin of kind "tracker", name "mlflow".

    `project` is MLflow's experiment, and `group` and `tags` are tags. A resumed run goes on with
    the same run; steps after the checkpoint are there twice, and the later ones count as latest.
    """

    Config: ClassVar[type] = MLflowConfig

    def start(self, folder: Path, step: int) -> None:
        """Begin or go on with a run, with settings as parameters."""
        config = self.config
        facts = run_facts(folder, config)
        self.client = MlflowClient(tracking_uri=config.uri)
        own, again = remembered_id(folder, "mlflow", step)
        if again:
            self.id = own
            self.client.update_run(own, status="RUNNING")
            return

        found = self.client.get_experiment_by_name(config.project)
        experiment = found.experiment_id if found else self.client.create_experiment(config.project)
        tags = {f"tag.{tag}": "true" for tag in config.tags}
        if config.group:
            tags["group"] = config.group
        if git := facts.origin.get("git"):
            tags["mlflow.source.git.commit"] = git["commit"]
            tags["mlflow.source.git.branch"] = git["branch"] or ""
        run = self.client.create_run(experiment, tags=tags, run_name=facts.name)
        self.id = run.info.run_id
        remember_id(folder, "mlflow", self.id)  # MLflow chooses it
        origin = [RunTag("origin", json.dumps(facts.origin)[:LONGEST])]
        self.client.log_batch(self.id, tags=origin)
        params = [Param(key, plain_json(value)[:LONGEST]) for key, value in facts.config.items()]
        for first in range(0, len(params), AT_ONCE):
            self.client.log_batch(self.id, params=params[first : first + AT_ONCE])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        now = int(time.time() * 1000)
        entries = [Metric(name, value, now, step) for name, value in metrics.items()]
        self.client.log_batch(self.id, metrics=entries)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Record a table as an artifact, samples/train-00000010.json, which MLflow shows as one."""
        if is_due(self.config.samples_every, step, rows):
            titles, cells = sample_table(rows)
            name = f"samples/{rows[0]['data']}-{step:08d}.json"
            self.client.log_dict(self.id, {"columns": titles, "data": cells}, name)
            known = self.client.get_run(self.id).data.tags.get("mlflow.loggedArtifacts", "[]")
            listed = json.loads(known)
            if (entry := {"path": name, "type": "table"}) not in listed:
                listed.append(entry)
                self.client.set_tag(self.id, "mlflow.loggedArtifacts", json.dumps(listed))

    def close(self) -> None:
        """Say that the run is over."""
        self.client.set_terminated(self.id, RunStatus.to_string(RunStatus.FINISHED))
