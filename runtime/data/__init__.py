"""Data for the head, or its labels for the tail: data sets by name, as batches in a fixed order.

:func:`describe` returns a data set's shapes and sizes, :func:`locate` the folder that the worker
must see, :func:`open_data` the batches; :func:`with_defaults` fills in a data set's own options.
``docs/data.md`` is the documentation for users.
"""

from dni_runtime.data.registry import DATASETS, describe, locate, open_data, with_defaults
from dni_runtime.data.source import Batch, DataSource, Half

__all__ = [
    "DATASETS",
    "Batch",
    "DataSource",
    "Half",
    "describe",
    "locate",
    "open_data",
    "with_defaults",
]
