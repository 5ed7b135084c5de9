"""A model card beside an exported file: what the run records of the network, and how to load it."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml

from dni_runtime import __version__
from dni_runtime.files import write_atomic
from dni_runtime.measure.figures import MetricsReader
from dni_runtime.run.cuts import parts_of, read_document
from dni_runtime.run.documents.exits import Exits
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.spec.replicas import tails_of

_BEGINNING = "---\nlibrary_name: dni-runtime\n"
"""Of a card's metadata (Hugging Face Hub, "Model Cards"), by which one is known again."""

_DATA = {"dataset", "path", "args", "train", "evaluation", "batch_size"}
_DATA |= {"train_limit", "eval_limit", "validation"}

_LOADING = {
    ".safetensors": 'import dni_runtime\n\nmodel = dni_runtime.load("{}"{trust})',
    ".pt2": 'import dni_runtime\n\nmodel = dni_runtime.load("{}", trust=True)',
    ".onnx": 'import onnxruntime\n\nmodel = onnxruntime.InferenceSession("{}")',
}
_LOADING_WEIGHTS = {
    ".safetensors": "from safetensors.torch import load_file\n\n"
    'network.load_state_dict(load_file("{}"))',
    ".pt": 'import torch\n\nnetwork.load_state_dict(torch.load("{}", weights_only=True))',
}
_LOADING_WEIGHTS[".pth"] = _LOADING_WEIGHTS[".pt"]


def write_card(record: Record, cut: int, file: Path, *, state_dict: bool = False) -> None:
    """Write ``FILE.md`` beside an exported file, unless somebody else's file is there.

    If the early exits of this checkpoint have been measured, ``FILE.exits.json`` says so;
    else one that is there is removed.
    """
    exits, beside = Exits.load(record.run.exits), file.with_suffix(".exits.json")
    if exits is not None and exits.checkpoint == cut:
        content = exits.model_dump_json(indent=1) + "\n"
        write_atomic(beside, content, mode=0o644)
    elif Exits.peek(beside) is not None:  # of the weights that were exported there before
        beside.unlink()
    path = file.with_suffix(".md")
    if path.exists() and not path.read_text("utf-8", "replace").startswith(_BEGINNING):
        return
    chain, workers = record.specs()
    parts = [
        read_document(record.run.checkpoint(cut, worker))
        for worker in parts_of(record.run, cut, tails_of(record.modules))
    ]
    step, epoch = sum(part.get("step", 0) for part in parts), parts[0].get("epoch")
    evaluations = MetricsReader(record).read(RunState.read(record.run)).evaluations
    figures = next((line.figures for line in evaluations if line.step == step), {})
    metadata = {"tags": ["pytorch", "dni-runtime"], "metrics": [*figures]}
    data = chain.data.model_dump(mode="json", include=_DATA)
    rows = {
        "run": f"{record.name}, checkpoint {cut}, in epoch {epoch} of {record.epochs}",
        "data": ", ".join(f"{name} {value}" for name, value in data.items() if value),
        "loss": ", ".join(item.loss.name for item in chain.losses or ()) or chain.loss.name,
        "evaluation": ", ".join(
            f"{name} {'not finite' if value is None else format(value, '.4g')}"
            for name, value in figures.items()
        )
        or "none of these weights",
        "trained with": f"dni-runtime {record.versions.dni_runtime}, "
        f"Python {record.versions.python}",
        "exported with": f"dni-runtime {__version__}, torch {torch.__version__}",
    }
    if (how := record.preprocessing) is not None:  # a file alone does not do it
        mean, std = (", ".join(f"{value:.7g}" for value in of) for of in (how.mean, how.std))
        flat = ", flattened" if chain.data.flatten else ""
        rows["input"] = f"raw samples {how.raw}, less {mean}, divided by {std}{flat}"
    if chain.network is not None:
        rows["network"] = chain.network["import"]
    trust = ""
    for worker in workers:
        if any(":" in kind or kind == "Piece" for layer in worker.layers for kind in layer.types):
            trust = ", trust=True"  # loading imports them
        layers = ", ".join(layer.type for layer in worker.layers)
        trained = "" if worker.interface is None else f"; {worker.interface.name} gradients"
        rows[f"module {worker.module}"] = f"{layers}; {worker.optimizer.name}{trained}"
    loading = (_LOADING_WEIGHTS if state_dict else _LOADING).get(file.suffix, "")
    lines = [
        _BEGINNING + yaml.safe_dump(metadata, sort_keys=False) + "---",
        f"# {record.chain}\n\n| | |\n|---|---|",
        *(f"| {name} | {text} |" for name, text in rows.items()),
        f"\n```python\n{loading.format(file.name, trust=trust)}\n```\n",
    ]
    write_atomic(path, "\n".join(lines), mode=0o644)
