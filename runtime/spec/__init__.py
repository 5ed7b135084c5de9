"""The chain specification: what a user writes in ``chain.yaml``, and one worker's part of it.

Pure data (pydantic, frozen, unknown keys refused); never imports torch or zmq.
"""

from dni_runtime.spec.data import DataSpec
from dni_runtime.spec.edge import NO_LABEL, EdgeSpec, Preprocessing, TensorSpec
from dni_runtime.spec.graph import Graph
from dni_runtime.spec.load import import_paths, load_chain, parse_chain, source_files
from dni_runtime.spec.machines import BaseSpec, ImageSpec
from dni_runtime.spec.model import ChainSpec, Dtype, LinksSpec
from dni_runtime.spec.modules import ClipSpec, GroupSpec, InitSpec, ModuleSpec
from dni_runtime.spec.named import Choice, LayerSpec, LossSpec
from dni_runtime.spec.running import CheckpointSpec
from dni_runtime.spec.worker import (
    DataInfo,
    HeadRole,
    SelectionRole,
    TailRole,
    WorkerSpec,
)

__all__ = [
    "NO_LABEL",
    "BaseSpec",
    "ChainSpec",
    "CheckpointSpec",
    "Choice",
    "ClipSpec",
    "DataInfo",
    "DataSpec",
    "Dtype",
    "EdgeSpec",
    "Graph",
    "GroupSpec",
    "HeadRole",
    "ImageSpec",
    "InitSpec",
    "LayerSpec",
    "LinksSpec",
    "LossSpec",
    "ModuleSpec",
    "Preprocessing",
    "SelectionRole",
    "TailRole",
    "TensorSpec",
    "WorkerSpec",
    "import_paths",
    "load_chain",
    "parse_chain",
    "source_files",
]
