"""How two releases differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dni_runtime.release.store import Store
from dni_runtime.run.rundir import RunDir

_SHORT = 19  # of a digest

Difference = tuple[str, str, str]
"""What differs, in the one and in the other release; empty: it is not there."""


def differences(store: Store, old: str, new: str) -> list[Difference]:
    """Return what differs between two releases: of their reports, chains, and images."""
    first, second = (dict(_facts(store, name)) for name in (old, new))
    return [
        (what, first.get(what, ""), second.get(what, ""))
        for what in dict.fromkeys((*first, *second))
        if first.get(what) != second.get(what)
    ]


def _facts(store: Store, name: str) -> Iterator[tuple[str, str]]:
    index = store.find(name)
    report = store.report(index).model_dump(mode="json", exclude={"name", "version", "modules"})
    yield from _flat(report, ())
    yield from _flat(json.loads(RunDir(store.folder(name)).chain.read_bytes()), ("chain",))
    for module, manifest in store.parts(index)[0].items():
        for layer in manifest.layers:
            kind = layer.media_type.split(".")[-3]
            yield f"image of {module}: {kind}", layer.digest[:_SHORT]


def _flat(document: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _flat(value, (*path, key))
    elif isinstance(document, list) and any(isinstance(one, dict) for one in document):
        for number, value in enumerate(document):
            named = value.get("name") if isinstance(value, dict) else None
            yield from _flat(value, (*path, str(named or number)))
    elif document is not None:
        yield ".".join(path), document if isinstance(document, str) else json.dumps(document)
