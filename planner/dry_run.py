"""Memory of a mapping from the backends' own code, on simulated GPUs and ranks.

Each role's backend is built as one rank of its layout, in a process of its own, and runs a forward
pass and an update with the plan's micro-batches. The bytes of its tensors are compared with the
planner's formulas; neither includes an allocator's rounding and a device's libraries.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.core.contracts.planner import Block, Line, TextTable
from hybridflow.kit.fakes.process import Asked, NotRehearsed, rehearse
from hybridflow.planner.jobs import JobPlan
from hybridflow.planner.memory import Bytes, Memory
from hybridflow.planner.pools import LayoutChoice
from hybridflow.planner.search import Mapping
from hybridflow.planner.times import Simulator

COLUMNS = ("role", "bytes per device", "dry run", "formula", "difference")
SEVERAL = 3
"""Most micro-batches rehearsed of an update: later ones take no more memory than the third."""
PHASES = {
    "build": "built",
    "rest": "optimizer made",
    "forward": "forward pass taken",
    "update": "update taken",
    "step": "optimizer stepped",
    "away": "offloaded",
}
"""Phase -> the text of the line that is printed when it has ended."""


def dry_run(plan: JobPlan, mapping: Mapping) -> Iterator[Block]:
    """Yield a line for each phase when it has ended, and a table at the end."""
    yield Line()
    yield Line("dry run: the backends' code, one rank of each role, without values", "bold")
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for pool in mapping.pools:
        nodes = plan.cluster.nodes[pool.kind]
        simulator = Simulator.of(nodes, plan.work.workload)
        for choice in pool.entry.choices:
            # A backend that cannot run on simulated devices is only noted.
            try:
                yield from _role(plan, simulator, choice, rows, notes)
            except NotRehearsed as error:
                notes.append(f"{choice.option.model.name}: {error}; the plan has formulas alone")

    # The table of bytes, and the reasons why roles are missing.
    yield Line()
    if rows:
        yield TextTable(COLUMNS, tuple(rows))
    for note in notes:
        yield Line(f"note: {note}", "yellow")


def _role(
    plan: JobPlan,
    simulator: Simulator,
    choice: LayoutChoice,
    rows: list[tuple[str, ...]],
    notes: list[str],
) -> Iterator[Line]:
    """Rehearse one role, and append its rows of the table. Raises NotRehearsed."""
    model = choice.option.model
    asked = _asked(plan, simulator, choice)
    layout = choice.option.layout
    yield Line(f"  {model.name}: pp {layout.pp} tp {layout.tp} dp {layout.dp} ...")

    # Each phase is printed when it ends: a large model takes minutes.
    phases: dict[str, dict[str, int]] = {}
    for name, phase in rehearse(asked):
        if name == "elsewhere":
            notes.append(f"{model.name}: its weights are not on the device between calls")
            continue
        phases[name] = phase
        told = f"{_exact(phase['after'])}, at most {_exact(phase['peak'])}"
        yield Line(f"    {PHASES[name]}: {told}")
    # The formulas, for the same mapping.
    said = Memory(simulator).bytes(model, layout)
    rows += _rows(asked, said, model.name, phases)


def _asked(plan: JobPlan, simulator: Simulator, choice: LayoutChoice) -> Asked:
    """Return the request to rehearse the role's largest calls, in the plan's micro-batches."""
    model = choice.option.model
    layout = choice.option.layout
    spec = plan.job.models[model.name].spec
    workload = plan.work.workload

    # The largest call of each kind counts, as it does in the formulas.
    rows: dict[str, dict[str, int] | None] = {}
    for verb in ("infer", "train"):
        calls = [task.sequences for task in workload.of(model.name, verb)]
        rows[verb] = None
        if calls:
            count, _ = simulator.micro_batches(model, max(calls), layout.dp)
            each = simulator.largest_micro_batch(model, max(calls), layout.dp)
            group = round(1 / workload.prompts_per_sequence) if model.shares_prompts else 1
            group = min(group, each)
            rows[verb] = {
                # Whole groups: a part of another group would add its prompt.
                "rows": each // group * group,
                "group": group,
                "tokens": workload.tokens,
                "count": min(count, SEVERAL if verb == "train" else 1),
                "response": workload.response_tokens,
            }
    return Asked(
        backend=spec.backend,
        config=spec.backend_config,
        model=spec.model,
        optimizer=spec.optimizer,
        layout=layout,
        forward=rows["infer"],
        update=rows["train"],
        offload=model.offload,
    )


def _rows(
    asked: Asked, said: Bytes, role: str, phases: dict[str, dict[str, int]]
) -> Iterator[tuple[str, ...]]:
    """Yield the rows of one role: bytes by owner, then each phase beside its formula."""
    # Bytes by owner.
    built = phases["build"]["after"]
    rest = built
    yield _row(role, "weights", built)
    if "rest" in phases:
        rest = phases["rest"]["after"]
        yield _row("", "optimizer", rest - built)
        gradients = phases["update"]["after"] - phases["step"]["after"]
        yield _row("", "gradients, while it trains", gradients)
        passing = phases["update"]["peak"] - rest - gradients
        yield _row("", "gathered weights, activations, logits", passing)

    # The phases, with an offloaded model's bytes on the device.
    yield _row("", "at rest", rest, said.resident + said.fetched)
    if asked.forward is not None:
        what = f"forward pass, {_micro(asked.forward)}"
        yield _row("", what, phases["forward"]["peak"], said.resident + said.inference)
    if asked.update is not None:
        what = f"update, {_micro(asked.update)}"
        yield _row("", what, phases["update"]["peak"], said.resident + said.training)
    if "away" in phases:
        yield _row("", "offloaded", phases["away"]["after"], said.resident)


def _micro(rows: dict[str, int]) -> str:
    """Return a call's micro-batches in words."""
    several = "micro-batch" if rows["count"] == 1 else "micro-batches"
    return f"{rows['count']} {several} of {rows['rows']} x {rows['tokens']} tokens"


def _exact(nbytes: float) -> str:
    """Return bytes as text in GB with three decimals, as small models need."""
    return f"{nbytes / 1e9:.3f} GB"


def _row(role: str, what: str, found: float, said: float | None = None) -> tuple[str, ...]:
    """Return a row of the table: counted bytes, and the formula's where there is one."""
    # The formulas do not distinguish some of the rows.
    if said is None:
        return role, what, _exact(found), "", ""
    difference = f"{100 * (said / found - 1):+.1f}%" if found else ""
    return role, what, _exact(found), _exact(said), difference
