"""How a configuration is read, whatever is in it.

- `load`: tables from files, overrides and layers, and where each value came from.
- `structure`: attrs classes from tables, with every problem named by its key.
- `field_docs`: the docstring under each field of such a class.

The settings of a run are in `hybridflow.core.job.schema`; those of a plugin stand beside its class.
"""
