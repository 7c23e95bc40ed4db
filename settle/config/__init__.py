"""Reads configurations, whatever is in them.

    TOML file, overrides  --load-->  one table, with the source of each value
    table                 --structure-->  instances of attrs classes, or all problems by key
    attrs class           --field_docs-->  the docstring under each of its fields

The settings of a run are in `hybridflow.core.job.sections`; those of a plugin stand beside its
class.
"""
