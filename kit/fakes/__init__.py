"""A simulated GPU, and simulated ranks: for tests and for memory dry runs.

Real code of a backend runs on them, in one process of any CPU machine. Tensors of the device have
shapes, dtypes and storages, whose bytes are counted, but no values.
"""
