"""`hybridflow evaluate`: scores a model on data that it has not seen."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import ConfigError
from hybridflow.core.values.files import EVALUATIONS, MARK
from hybridflow.inference.commands.arguments import add_model
from hybridflow.settle.config.waiting import wait_briefly

if TYPE_CHECKING:
    from hybridflow.inference.evaluation import Evaluation, Measure
    from hybridflow.inference.models import FoundModel
    from hybridflow.inference.records import Record

Values = dict[str, dict[str, list[float]]]
"""Data set -> figure -> its value for each row."""


class EvaluateCommand(Command):
    """A plugin of kind "command", name "evaluate"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_model(parser, "validation.data.limit=100")
        parser.add_argument(
            "--data",
            action="append",
            default=[],
            metavar="FILE",
            help="rows to answer: a file, or a data source's name; again for another set. "
            "Default: the run's held-out set",
        )
        parser.add_argument("--reward", help="reward that scores; default: the run's")
        parser.add_argument(
            "--samples", type=int, default=0, help="sampled responses of a row, beside a greedy one"
        )
        parser.add_argument(
            "--pass-at", type=int, nargs="+", metavar="K", help="default: 1, 2, 4, ... --samples"
        )
        parser.add_argument(
            "--success", type=float, default=1.0, help="score from which a response is right"
        )
        parser.add_argument(
            "--majority", action="store_true", help="score the most frequent answer too (maj@k)"
        )
        parser.add_argument(
            "--compare", metavar="MODEL", help="another model on the same rows: differences"
        )
        parser.add_argument(
            "--rescore",
            action="store_true",
            help="MODEL is the folder of an evaluation, or of a run: score its responses, or "
            "recorded samples, by --reward, without model",
        )
        parser.add_argument("--out", type=Path, help="folder of the samples and figures")
        parser.add_argument(
            "--overwrite", action="store_true", help="replace an evaluation of other settings"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Evaluate, print a table, and write samples and figures; goes on where it was ended."""
        wait_briefly({})  # before torch is imported
        from hybridflow.inference.evaluation import Measure
        from hybridflow.inference.models import find_model

        if arguments.rescore:
            return _rescore(arguments)
        samples = arguments.samples
        pass_at = _pass_at(arguments.pass_at, samples)
        if arguments.majority and not samples:
            raise ConfigError("--majority: there is no majority of one; give --samples too")
        measure = Measure(pass_at, arguments.success, arguments.majority)

        # Both models are resolved before the first one generates.
        found = find_model(arguments.model, arguments.step, arguments.stage, arguments.role)
        out = arguments.out or _folder(found)
        evaluations = [_evaluation(found, out, arguments)]
        if arguments.compare:
            other = find_model(arguments.compare, role=arguments.role)
            name = re.sub(r"[^\w.-]+", "-", other.label)
            beside = out / f"compared-{name}"
            evaluations.append(_evaluation(other, beside, arguments, like=found))

        records = [
            _evaluate(evaluation, measure, arguments.overwrite) for evaluation in evaluations
        ]
        if arguments.compare:
            _print_differences(evaluations, measure, records)
        return 0


def _evaluate(evaluation: Evaluation, measure: Measure, overwrite: bool) -> dict[str, list[Record]]:
    """Evaluate a model, print its figures, and write them; return the records by data set."""
    from hybridflow.inference.evaluation import evaluate
    from hybridflow.kit.console import make_console, print_line

    console = make_console()
    print_line(console, f"{evaluation.label}: to {evaluation.folder}")
    records = evaluate(evaluation, measure, lambda text: print_line(console, text), overwrite)
    values = {name: measure.values(own, evaluation.samples) for name, own in records.items()}
    _print_figures(evaluation.label, evaluation.samples, measure, values, evaluation.folder)
    return records


def _print_figures(
    label: str, samples: int, measure: Measure, values: Values, folder: Path
) -> None:
    """Print the figures of a model, and write them into a folder."""
    from hybridflow.inference.evaluation import FIGURES, summary
    from hybridflow.kit.console import make_console, print_table

    figures = {name: measure.figures(own) for name, own in values.items()}
    text = json.dumps(summary(label, samples, figures), indent=2)
    (folder / FIGURES).write_text(text + "\n")

    cells = []
    for name, own in figures.items():
        for key, figure in own.items():
            interval = f"{figure.low:.3f} to {figure.high:.3f}"
            cells.append((name, key, f"{figure.mean:.3f}", interval, str(figure.rows)))
    print_table(make_console(), ("data", "figure", "mean", "95% interval", "rows"), cells)


def _rescore(arguments: argparse.Namespace) -> int:
    """Score the responses of an evaluation, or a run's samples, by another reward."""
    from hybridflow.core.plugins.resolve import reward_from
    from hybridflow.inference.evaluation import Measure, rescore

    if arguments.reward is None:
        raise ConfigError("--rescore: give the reward that scores, --reward")
    source = Path(arguments.model)
    reward = reward_from(arguments.reward)
    if arguments.majority and not reward.answers:
        raise ConfigError(f"--majority: reward {arguments.reward!r} does not say what an answer is")
    name = re.sub(r"\W+", "_", arguments.reward)
    inside = source / EVALUATIONS if (source / MARK).is_file() else source
    out = arguments.out or inside / f"rescored-{name}"
    sets, samples = rescore(source, reward, arguments.reward, out)
    pass_at = _pass_at(arguments.pass_at, samples)
    measure = Measure(pass_at, arguments.success, arguments.majority and samples > 0)
    values = {name: measure.values(own, samples) for name, own in sets.items()}
    _print_figures(f"{source}, by {arguments.reward}", samples, measure, values, out)
    return 0


def _print_differences(
    evaluations: Sequence[Evaluation],
    measure: Measure,
    records: Sequence[dict[str, list[Record]]],
) -> None:
    """Print by how much the first model's figures are above the second one's.

    Raises ConfigError where their rows differ: another tokenizer may drop other rows.
    """
    from hybridflow.kit.console import make_console, print_line, print_table

    first, second = evaluations
    samples = first.samples
    for name, asked in records[0].items():
        if [one.meta for one in asked] != [one.meta for one in records[1][name]]:
            raise ConfigError(
                f"--compare: the two models were not asked the same rows of {name}; with "
                "data.overlong = drop their tokenizers drop different ones: raise "
                "data.max_prompt_tokens"
            )
    values = [
        {name: measure.values(own, samples) for name, own in sets.items()} for sets in records
    ]
    console = make_console()
    print_line(console, f"{first.label} less {second.label}, row by row")
    cells = []
    for name, own in values[0].items():
        for key, figure in measure.differences(own, values[1][name]).items():
            interval = f"{figure.low:+.3f} to {figure.high:+.3f}"
            cells.append((name, key, f"{figure.mean:+.3f}", interval))
    print_table(console, ("data", "figure", "difference", "95% interval"), cells)


def _pass_at(given: list[int] | None, samples: int) -> list[int]:
    """Return the k of pass@k. Raises ConfigError for one that the samples do not allow."""
    if given is None:
        return [2**power for power in range(samples.bit_length()) if 2**power <= samples]
    wrong = [k for k in given if not 1 <= k <= samples]
    if wrong:
        raise ConfigError(
            f"--pass-at {wrong[0]}: needs at least as many samples as k, and --samples is {samples}"
        )
    return given


def _folder(found: FoundModel) -> Path:
    """Return the folder for an evaluation of this model."""
    if found.run is not None:
        return found.run / EVALUATIONS / f"step-{found.step}"
    return Path("evaluations") / found.label


def _evaluation(
    found: FoundModel, out: Path, arguments: argparse.Namespace, like: FoundModel | None = None
) -> Evaluation:
    """Resolve the jobs that evaluate a model, one for each data set. Raises ConfigError.

    like: another model, whose run's data, reward and sampling are used instead of its own.
    """
    from hybridflow.inference.evaluation import Evaluation
    from hybridflow.inference.job import inference_tables, resolve, with_data, with_overrides

    tables = inference_tables(like or found, out, arguments.engine, scored=True)
    if like is not None:
        # On the same devices, by its own tokenizer
        own = inference_tables(found, out, arguments.engine, scored=True)
        tables["actor"] |= {key: own["actor"][key] for key in ("model", "backend")}
        tables["sampling"]["stop_tokens"] = own["sampling"].get("stop_tokens", [])
        if "tokenizer" in own:
            tables["tokenizer"] = own["tokenizer"]
    if arguments.reward is not None:
        tables["reward"] = {"function": arguments.reward}
    if "reward" not in tables:
        raise ConfigError("--reward: this model is of no run with a reward; give one")
    tables["validation"] = {"generate": True, **_scores(tables.get("validation", {}))}
    tables["validation"].setdefault("data", {})

    labelled: dict[str, dict[str, Any]] = {}
    for text in arguments.data:
        labelled[_unique(Path(text).stem or text, labelled)] = with_data(tables, text)
    if not labelled:
        if "validation" not in (like or found).tables:
            raise ConfigError("--data: this model is of no run with a held-out set; give rows")
        labelled[str(tables["validation"].get("name", "validation"))] = tables

    jobs = {
        name: resolve(with_overrides(own, arguments.overrides, like or found))
        for name, own in labelled.items()
    }
    first = next(iter(jobs.values()))
    sets = {name: job.validation_data for name, job in jobs.items() if job.validation_data}
    return Evaluation(found.label, first, sets, arguments.samples)


def _scores(section: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of [validation] that an evaluation needs."""
    return {key: section[key] for key in ("name", "data", "batch_rows") if key in section}


def _unique(name: str, names: dict[str, Any]) -> str:
    """Return a name that is not among `names`."""
    number = 2
    unique = name
    while unique in names:
        unique = f"{name}-{number}"
        number += 1
    return unique
