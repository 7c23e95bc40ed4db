"""Configuration: everything that reads one, in one place to import from.

    data, provenance = read_config("examples/grpo.toml", ["run.steps=20", "actor.optimizer.lr=2e-4"], SHORTHAND)
    config = structure(data, RunConfig)         # ConfigError with every problem
    for key, value in flatten(config).items():
        print(key, value, provenance.of(key))

`config_load` has tables (files, overrides, layers, where a value came from), `structure` makes attrs classes of them,
`field_docs` finds the docstring under each field, `validators` has the checks that fields share. The schema of a run is
in `run_config`; each component's class is beside the component.
"""

from hybridflow.core.config.field_docs import field_docs
from hybridflow.core.config.load import (
    COMMAND_LINE,
    DEFAULT,
    Provenance,
    expand,
    flatten,
    load_toml,
    merge,
    nest,
    parse_override,
    parse_value,
    read_config,
)
from hybridflow.core.config.structure import converter, describe, structure
from hybridflow.core.names import nearest
from hybridflow.core.validators import at_least, fraction, non_negative, positive

__all__ = [
    "COMMAND_LINE",
    "DEFAULT",
    "Provenance",
    "at_least",
    "converter",
    "describe",
    "expand",
    "field_docs",
    "flatten",
    "fraction",
    "load_toml",
    "merge",
    "nearest",
    "nest",
    "non_negative",
    "parse_override",
    "parse_value",
    "positive",
    "read_config",
    "structure",
]
