"""JSON Schema of ``chain.yaml``, for editors."""

from __future__ import annotations

from typing import Any

from dni_runtime.core.interfaces import INTERFACES
from dni_runtime.core.layers import LAYERS
from dni_runtime.core.losses import LOSSES
from dni_runtime.core.metrics import METRICS
from dni_runtime.core.replication import COMPRESSIONS, STRATEGIES
from dni_runtime.core.training import OPTIMIZERS, SCHEDULES
from dni_runtime.spec import ChainSpec
from dni_runtime.spec.modules import AUTO


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of ``chain.yaml`` for editors, with all names of classes."""
    schema = ChainSpec.model_json_schema()
    definitions = schema["$defs"]
    layer = {
        "anyOf": [
            {"type": "string", "enum": sorted(LAYERS)},
            {
                "type": "object",
                "minProperties": 1,
                "maxProperties": 2,
                "properties": {
                    **{name: {"type": ["object", "null"]} for name in sorted(LAYERS)},
                    "Sequential": {"$ref": "#/$defs/Layers"},
                    "Residual": {
                        "anyOf": [
                            {"$ref": "#/$defs/Layers"},
                            {
                                "type": "object",
                                "required": ["layers"],
                                "properties": {
                                    "layers": {"$ref": "#/$defs/Layers"},
                                    "shortcut": {"$ref": "#/$defs/Layers"},
                                },
                                "additionalProperties": False,
                            },
                        ]
                    },
                    "import": {"type": "string"},
                    "args": {"type": "object"},
                },
                "additionalProperties": False,
            },
        ]
    }
    definitions["Layers"] = {"type": "array", "items": {"$ref": "#/$defs/LayerSpec"}}
    definitions["LayerSpec"] = layer
    definitions["Choice"] = _choice_schema([])
    options = {name: cls.Options.model_json_schema() for name, cls in INTERFACES.items()}
    for name, inner in options.items():
        for key, value in inner.pop("$defs", {}).items():
            definitions.setdefault(key, value)
        definitions[f"{name}-options"] = inner
    kinds = {
        "interface": _choice_schema(
            list(INTERFACES), {name: {"$ref": f"#/$defs/{name}-options"} for name in INTERFACES}
        ),
        "optimizer": _choice_schema(sorted(OPTIMIZERS)),
        "schedule": _choice_schema(sorted(SCHEDULES)),
    }
    for model in ("ModuleSpec", "ModuleDefaults"):
        for field, kind in kinds.items():
            definitions[model]["properties"][field] = kind
    replication = definitions["ReplicationSpec"]["properties"]
    for field, known in (("strategy", STRATEGIES), ("compression", COMPRESSIONS)):
        of_each = {name: cls.Options.model_json_schema() for name, cls in known.items()}
        replication[field] = _choice_schema(list(known), of_each)
    definitions["ModuleSpec"]["properties"]["replicas"]["oneOf"].append({"enum": [AUTO]})
    definitions["DataSpec"]["properties"]["labels"]["anyOf"].append({"enum": ["head", "tail"]})
    schema["properties"]["loss"] = _choice_schema(sorted(LOSSES))
    any_class = _choice_schema([])["anyOf"]  # of torchmetrics, which need not be installed
    schema["properties"]["metrics"]["items"] = {"anyOf": [{"enum": sorted(METRICS)}, *any_class]}
    return schema


def _choice_schema(names: list[str], properties: dict[str, Any] | None = None) -> dict[str, Any]:
    """``Name``, ``{Name: {…}}`` or ``{import: …, args: {…}}``."""
    word: dict[str, Any] = {"type": "string", "enum": names} if names else {"type": "string"}
    known = properties or {name: {"type": ["object", "null"]} for name in names}
    return {
        "anyOf": [
            word,
            {
                "type": "object",
                "minProperties": 1,
                "maxProperties": 2,
                "properties": {
                    **known,
                    "import": {"type": "string"},
                    "args": {"type": "object"},
                },
                "additionalProperties": not names,
            },
        ]
    }
