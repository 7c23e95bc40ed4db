"""The command `hybridflow`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from hybridflow.core.errors import ConfigError, HybridFlowError


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and turn errors meant for the user into a message and exit status 1."""
    arguments = _parse(argv)
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # so that "my_file:my_reward" is found; last, so that it hides no package
    try:
        return arguments.command(arguments)
    except HybridFlowError as error:
        print(f"hybridflow: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("hybridflow: interrupted", file=sys.stderr)
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand before, between and after options, which argparse alone does not take."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    strange = [text for text in rest if text.startswith("-") or not hasattr(arguments, "overrides")]
    if strange:
        hint = f"; overrides have no dashes: {strange[0].lstrip('-')}" if "=" in strange[0] else ""
        parser.error(f"unknown argument {strange[0]}{hint}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hybridflow", description="Reinforcement learning of language models.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"hybridflow {version('hybridflow')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    overrides: Any = {"nargs": "*", "default": [], "metavar": "key=value"}

    def add(name: str, function, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(command=function)
        return command

    for name, function, text in (
        ("run", _run, "Run a config: all stages, to the end."),
        ("plan", _plan, "Say where everything goes, how long a step takes and whether it fits, before it runs."),
        ("show", _show, "Print every resolved value of a config with where it came from, and what follows from it."),
    ):
        command = add(name, function, text)
        command.add_argument("config", help="a TOML file")
        command.add_argument("overrides", **overrides, help="for example actor.optimizer.lr=1e-5")
    commands.choices["show"].add_argument("--docs", action="store_true", help="say what each setting means")
    run = commands.choices["run"]
    run.add_argument("--resume", action="store_true", help="go on from the last checkpoint of this run's folder")
    run.add_argument("--overwrite", action="store_true", help="replace the run that is in the folder")
    plan = commands.choices["plan"]
    plan.add_argument(
        "--cluster", metavar="WHAT", help="a TOML file, or DEVICE:NODESxDEVICES[@GBIT/S] as in a100-80gb:2x8"
    )
    plan.add_argument("--write", metavar="FILE", help="write the config with these pools and layouts")
    plan.add_argument("--what-if", metavar="devices=N,...", help="table other numbers of devices: devices=64,128,256")
    plan.add_argument("--timeline", metavar="FILE", help="draw the step: a file ending in .svg or .png")
    calibrate = add("calibrate", _calibrate, "Measure this machine: a cluster file for plan, in under two minutes.")
    calibrate.add_argument(
        "config", nargs="?", help="a TOML file: its backend, engine, runtime and devices are measured"
    )
    calibrate.add_argument("overrides", **overrides, help="for example actor.backend.precision=bf16")
    calibrate.add_argument(
        "--devices", type=int, metavar="N", help="default: those of the config's pool main, or all GPUs here, or 1"
    )
    calibrate.add_argument("--name", help="what the device is called in the file")
    calibrate.add_argument("--write", metavar="FILE", help="write the cluster file; else it is printed")
    reshard = add("reshard", _reshard, "Say what it costs to bring weights from a training layout to a rollout layout.")
    reshard.add_argument(
        "--from", dest="source", required=True, metavar="LAYOUT",
        help='"pp=2,tp=4,dp=2", also cp, ep, vpp, order=tp-cp-dp-pp, kind=megatron|fsdp|zero3',
    )  # fmt: skip
    reshard.add_argument("--to", dest="target", required=True, metavar="LAYOUT", help='"tp=2", also pp')
    reshard.add_argument("--model", required=True, help="a model folder, a config.json, or a name such as llama-70b")
    reshard.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    reshard.add_argument("--grouping", default="zero-redundancy", choices=("zero-redundancy", "consecutive"))
    reshard.add_argument("--ranks", action="store_true", help="also the figures of every rank")
    plugins = add("plugins", _plugins, "List plugins: kind, name, package, version, capabilities, state.")
    plugins.add_argument("kind", nargs="?", help="only this kind")
    plugins.add_argument("--capabilities", action="store_true", help="show what each can do")
    new = add("new", _new, "Write a package of your own that passes its tests as it is.")
    new.add_argument("kind", choices=("algorithm",), help="what it brings")
    new.add_argument("name", help="its name, and its module's: my_grpo")
    add("doctor", _doctor, "Say what is installed, what works on this machine, and what each plugin still needs.")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from hybridflow.core.launch import run

    if arguments.resume and arguments.overwrite:
        raise ConfigError("--resume and --overwrite contradict each other; give one of them")
    outcome = run(arguments.config, arguments.overrides, arguments.resume, arguments.overwrite)
    return 0 if outcome.state == "finished" else 3


def _plan(arguments: argparse.Namespace) -> int:
    from hybridflow.core.commands.plan import plan, read_sizes

    a = arguments
    plan(a.config, a.overrides, a.cluster, a.write, read_sizes(a.what_if), a.timeline)
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from hybridflow.core.commands.calibrate import run_calibrate

    a = arguments
    run_calibrate(a.config, a.overrides, a.devices, a.name, a.write)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from hybridflow.core.commands.show import show

    show(arguments.config, arguments.overrides, arguments.docs)
    return 0


def _reshard(arguments: argparse.Namespace) -> int:
    from hybridflow.core.commands.reshard import reshard

    a = arguments
    reshard(a.source, a.target, a.model, a.dtype, a.grouping, a.ranks)
    return 0


def _plugins(arguments: argparse.Namespace) -> int:
    from hybridflow.core.commands.listing import list_plugins

    list_plugins(arguments.kind, arguments.capabilities)
    return 0


def _new(arguments: argparse.Namespace) -> int:
    from hybridflow.core.commands.new import run_new

    run_new(arguments.kind, arguments.name)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from hybridflow.core.commands.listing import doctor

    return doctor()


if __name__ == "__main__":
    sys.exit(main())
