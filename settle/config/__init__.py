"""Reads configurations, independent of which settings there are.

    TOML file, overrides  --load-->  one table, with the source of each value
    table                 --structure-->  instances of attrs classes, or all problems by key
    attrs class           --field_docs-->  the docstring under each of its fields

The classes of a run's settings are in `hybridflow.core.job.sections`; those of a plugin's settings
are beside the plugin's class.
"""
