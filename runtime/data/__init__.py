"""What the head reads: data sets by name, as batches in a fixed order.

:func:`describe` tells what a data set looks like, :func:`locate` which folder the worker must see,
:func:`open_data` gives the batches, :func:`with_defaults` fills in a data set's own options.
``docs/data.md`` is the user's side of this.
"""

from dni_runtime.data.registry import DATASETS, describe, locate, open_data, with_defaults
from dni_runtime.data.source import Batch, DataSource

__all__ = ["DATASETS", "Batch", "DataSource", "describe", "locate", "open_data", "with_defaults"]
