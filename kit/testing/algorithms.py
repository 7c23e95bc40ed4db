"""AlgorithmConformance: checks an Algorithm's losses, and runs it on tiny models.

A run must train the trained roles alone, and continue from a checkpoint bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest

from hybridflow.core.context import GroupStepContext
from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.loss import Loss
from hybridflow.core.contracts.reward import Reward, RewardSample
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.errors import HybridFlowError, RewardError, WorkerError
from hybridflow.kit.testing.checks import missing_fixture, require
from hybridflow.kit.testing.losses import LossConformance
from hybridflow.kit.testing.runs import TABLES, TinyRun
from hybridflow.settle.schema import SECTIONS
from hybridflow.settle.stages import overlay

TAKEN = {
    *SECTIONS,
    *vars(GroupStepContext),
    "tasks",
    "sampling",
    "seed",
    "counters",
    "roles",
    "step",
}
"""Names that no role can have: the sections of a configuration and the attributes of ctx."""


class _FailsEveryThird(Reward):
    """A reward that raises for every third sample."""

    def __init__(self, reward: Reward):
        self.reward = reward
        self.calls = 0

    def __call__(self, samples: Sequence[RewardSample]) -> list[Any]:
        self.calls += 1
        if len(samples) != 1 or self.calls % 3 == 0:  # a whole batch is scored one by one
            raise RewardError("every third one fails")
        return list(self.reward(samples))


class AlgorithmConformance(LossConformance):
    """Subclass it and give a fixture `algorithm`: an instance with a small config.

    A few prompts per step are enough; the algorithm's class stands at the top level of a module.
    All of LossConformance is tested on `algorithm.losses()`. Then it runs, on models of two layers
    in this process; override `tables` with what its run needs beside
    hybridflow.kit.testing.runs.TABLES.
    """

    steps = 2
    """Number of steps of a run. They must change the weights of every trained role."""
    moves = True
    """Whether each trained role's weights change within `steps`."""

    @pytest.fixture
    def algorithm(self) -> Algorithm:
        """The author's algorithm."""
        return missing_fixture(self, "algorithm", "an instance of your Algorithm")

    @pytest.fixture
    def losses(self, algorithm) -> Mapping[str, Loss]:
        """The algorithm's losses by role, which LossConformance checks."""
        return algorithm.losses()

    def tables(self) -> dict[str, Any]:
        """Return tables of the run's configuration that override the kit's.

        For example {"data": {...}, "critic": {...}}.
        """
        return {}

    # --- what the algorithm declares ---

    def test_its_roles_can_be_used(self, algorithm):
        """Roles have different names, which ctx and the configuration can have."""
        roles = list(algorithm.roles())
        names = [role.name for role in roles]
        require(
            roles
            and all(isinstance(role, Role) for role in roles)
            and len(set(names)) == len(names),
            got=f"roles() gave {roles}",
            expected="Role instances, at least one, no name twice",
            likely="roles() returns names, or adds a role twice under some settings",
        )

        bad = [name for name in names if not name.isidentifier() or name in TAKEN]
        public = sorted(name for name in TAKEN if name[0] != "_")
        require(
            not bad,
            got=f"roles named {bad}",
            expected="names that ctx.<name> and a table [<name>] of the configuration can have",
            likely=f"taken are the sections and what ctx has itself: {', '.join(public)}",
        )

    def test_its_losses_are_those_of_its_trained_roles(self, algorithm):
        """A role without trained=True has no loss, and some trained role has one."""
        trained = {role.name for role in algorithm.roles() if role.trained}
        losses = dict(algorithm.losses())
        require(
            set(losses) <= trained
            and (losses or not trained)
            and all(isinstance(loss, Loss) for loss in losses.values()),
            got=f"losses() of {sorted(losses)}, trained roles {sorted(trained)}",
            expected="role -> Loss for the roles with trained=True",
            likely="losses() is not overridden (validation and these tests need it), or a Role "
            "lacks trained=True",
        )

    def test_its_config_is_a_frozen_attrs_class_with_checks(self, algorithm):
        """The config is frozen and without problems, and its number of updates is known or None."""
        config = type(algorithm).Config
        frozen = attrs.has(config) and config.__setattr__ is not object.__setattr__
        require(
            frozen and isinstance(algorithm.config, config),
            got=f"Config {config!r}",
            expected="a class under @attrs.frozen, whose fields have defaults: the vetted recipe",
            likely="a plain class or a dataclass; configurations are structured by attrs fields",
        )

        sampling = {**TABLES["sampling"], **self.tables().get("sampling", {})}
        problems = algorithm.problems(SamplingParams(max_tokens=sampling["max_tokens"]))
        updates = algorithm.updates_per_step()
        require(
            problems == [],
            got=f"problems() of the config under test: {problems!r}",
            expected="an empty list: this config is to be run",
            likely="problems() returns None, or the fixture's config is wrong",
        )
        require(
            updates is None or (isinstance(updates, int) and updates > 0),
            got=f"updates_per_step() is {updates!r}",
            expected="a whole number above 0, or None where the config does not determine it",
            likely="an integer division of sizes rounds down to 0",
        )

    # --- what its steps do ---

    def test_it_trains(self, algorithm):
        """Metrics are finite, trained roles' weights change, and frozen ones stay."""
        with TinyRun(algorithm, self.tables()) as run:
            before = run.checksums()
            metrics = [run.step() for _ in range(self.steps)]
            after = run.checksums()
            trained = run.session.trained

        for step, values in enumerate(metrics, start=1):
            bad = {name: value for name, value in values.items() if not math.isfinite(value)}
            require(
                not bad and values,
                got=f"metrics of step {step}: {bad or 'none'}",
                expected="finite numbers",
                likely="a mean over no rows, or results that were not passed through ctx",
            )

        moved = {name for name in after if after[name] != before[name]}
        frozen = set(after) - set(trained)
        require(
            not (moved & frozen),
            got=f"other weights of {sorted(moved & frozen)} after {self.steps} steps",
            expected="frozen roles stay as they are",
            likely="a role without trained=True is updated",
        )
        require(
            not self.moves or moved == set(trained),
            got=f"weights of {sorted(moved) or 'no role'} moved in {self.steps} steps",
            expected=f"those of {sorted(trained)}",
            likely="step() never calls ctx.<role>.update, or the loss is 0 on this data (override "
            "tables(), or say moves = False)",
        )

    def test_it_does_without_rows_that_have_failed(self, algorithm):
        """With scores of NaN under a mask of 0 in every third row, it trains on the others.

        Only for an algorithm whose reward is a function.
        """
        tables = overlay(self.tables(), {"reward": {"on_failure": {"mask": True}}})
        scored = any(role.name == "reward" and not role.trained for role in algorithm.roles())
        if not scored or not (TABLES["reward"] | tables["reward"]).get("function"):
            return

        problem = ""
        with TinyRun(algorithm, tables) as run:
            worker = run.scorer("reward")
            worker.rewards = [_FailsEveryThird(reward) for reward in worker.rewards]
            try:
                metrics = run.step()
            except WorkerError as error:  # an update ends a run whose gradients are NaN
                problem = error.message
            else:
                bad = [name for name, value in metrics.items() if not math.isfinite(value)]
                problem = f"metrics that are not finite: {', '.join(bad)}" if bad else ""
        require(
            not problem,
            got=problem,
            expected="the other rows are trained on as if the failed ones were not there",
            likely="a mean over a group or a batch that takes in a score of NaN; "
            "hybridflow.algorithms.functional leaves them out, and loss_mask is 0 there",
        )

    def test_a_resumed_run_goes_on_bit_for_bit(self, algorithm, tmp_path):
        """A step after loading a checkpoint equals the step that followed saving it."""
        with TinyRun(algorithm, self.tables()) as run:
            run.step()
            self._survives_json(run.algorithm)
            run.save(tmp_path)
            run.step()
            expected = run.checksums()
            expected_state = run.algorithm.state_dict()

        # A new run continues from the checkpoint, and takes the same second step.
        with TinyRun(algorithm, self.tables()) as run:
            run.load(tmp_path)
            run.step()
            weights = run.checksums()
            state = run.algorithm.state_dict()

        # Weights are compared by their checksums.
        differing = sorted(name for name in expected if weights[name] != expected[name])
        require(
            not differing and state == expected_state,
            got=f"weights of {differing or 'no role'} differ, state {state!r:.300}",
            expected=f"the weights of an uninterrupted run, and state {expected_state!r:.300}",
            likely="something that step() changes is not in state_dict (a coefficient, leftovers, "
            "a counter), or random numbers come from a generator of the algorithm's own instead of "
            "ctx",
        )

    def test_it_runs_a_step_ahead(self, algorithm):
        """With run.max_staleness its losses weigh older tokens, and two runs are equal.

        Only for an algorithm that trains a role which generates, and corrects for older weights.
        """
        names = [role.name for role in algorithm.roles() if role.generates and role.trained]
        if not names:
            return
        if not algorithm.corrects_staleness and hasattr(algorithm.config, "correction"):
            config = attrs.evolve(algorithm.config, correction="truncate")
            algorithm = type(algorithm)(config)
        if not algorithm.corrects_staleness:
            return

        losses = algorithm.losses()
        blind = [name for name in names if "rollout_logprobs" not in losses[name].reads]
        require(
            not blind,
            got=f"corrects_staleness is true, and the loss of {blind} reads no rollout_logprobs",
            expected="the loss weighs tokens by the policy that generated them",
            likely="the property does not look at the setting that switches the correction on",
        )
        apart: dict[str, Any] = {
            "run": {"max_staleness": 1},
            "pools": {"main": [1], "engines": [1]},
            **{name: {"generation": {"pool": "engines"}} for name in names},
        }
        self._repeats(algorithm, apart, "a step ahead")
        # Turns of an environment are not carried over.
        if "environment" not in self.tables():
            carried = {"run": {"max_staleness": 2}}
            self._repeats(algorithm, carried, "with responses that go on in the next two steps")
            never_stop = overlay(apart, carried)
            self._repeats(algorithm, never_stop, "two ahead, with engines that never stop")

    def _repeats(self, algorithm: Algorithm, tables: Mapping[str, Any], how: str) -> None:
        """Require that two runs with these tables take four steps, and the same ones."""
        found = []
        problem = ""
        for _ in range(2):
            with TinyRun(algorithm, overlay(self.tables(), tables)) as run:
                try:
                    metrics = run.steps(4)
                except HybridFlowError as error:
                    problem = str(error)
                    break
                found.append((run.checksums(), [values.get("actor/loss") for values in metrics]))
        require(
            not problem,
            got=problem,
            expected=f"four steps {how}",
            likely="responses of an earlier step are trained on",
        )
        require(
            found[0] == found[1],
            got=f"two runs {how}, with other weights or losses",
            expected="equal ones, bit for bit",
            likely="step() keeps something outside of its instance, or draws random numbers of its "
            "own",
        )

    def test_its_state_survives_json(self, algorithm):
        """A fresh instance that loads the state from JSON has the same state."""
        self._survives_json(algorithm)

    def _survives_json(self, algorithm: Algorithm) -> None:
        """Require that JSON can hold the state, and that load_state_dict restores all of it."""
        state: dict[str, Any] = algorithm.state_dict()
        written: dict[str, Any] = {}
        try:
            written = json.loads(json.dumps(state))
        except TypeError as error:
            require(
                False,
                got=f"state_dict() that JSON cannot hold: {error}",
                expected="dicts with string keys, lists, numbers, strings",
                likely="tensors or arrays: use .tolist()",
            )

        # A resumed run makes the algorithm anew and gives it the state as JSON had it.
        fresh = type(algorithm)(algorithm.config)
        fresh.load_state_dict(written)
        require(
            json.loads(json.dumps(fresh.state_dict())) == written,
            got=f"{fresh.state_dict()!r:.300} after load_state_dict",
            expected=f"{written!r:.300}",
            likely="load_state_dict leaves something out, or keys that are numbers became strings",
        )
