"""Settings of a chain by their paths in its document, such as ``data.batch_size``."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from dni_runtime.errors import SpecError, UsageError
from dni_runtime.spec.load import explain_details, fields_at, parse_yaml, suggestion
from dni_runtime.spec.model import ChainSpec

_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def read_setting(text: str, chain: ChainSpec) -> tuple[str, Sequence[Any]]:
    """Read ``NAME=VALUE,VALUE`` or ``NAME=FIRST..LAST``; return the setting's path and its values.

    ``NAME`` is a setting's path, or enough of its words, with the last one, to mean one.
    """
    name, _, written = text.partition("=")
    numbers = _RANGE.fullmatch(written)
    try:
        values = (
            range(int(numbers[1]), int(numbers[2]) + 1)
            if numbers
            else parse_yaml(f"[{written}]", name)[0]
        )
    except SpecError as error:
        raise UsageError(f"{text!r}: {error.message}") from None
    if not values:
        raise UsageError(f"{text!r} has no values", hint="for example: lr=1e-3,3e-3 or seed=0..2")
    return find_setting(name, chain), values


def read_value(text: str, chain: ChainSpec) -> tuple[str, Any]:
    """Read ``NAME=VALUE``; return the setting's path and its value."""
    path, values = read_setting(text, chain)
    if len(values) > 1:
        raise UsageError(
            f"{text!r} has {len(values)} values",
            hint="a list is [a, b]; 'dnictl sweep' trains with each of several values",
        )
    return path, values[0]


def find_setting(name: str, chain: ChainSpec) -> str:
    """Return the path of the setting that a name means: first of those that the chain sets."""
    whole = chain.model_dump(mode="json")
    allowed = [path for path in dict(settings_in(whole)) if not path.startswith("modules.")]
    for paths in (dict(settings_in(_document(chain))), allowed):
        if name in paths:
            return name
        words = name.split(".")
        meant = [path for path in paths if _contains(path.split("."), words)]
        if len(meant) == 1:
            return meant[0]
        if meant:
            raise UsageError(
                f"{name!r} can be one of {', '.join(meant)}", hint="name it by its whole path"
            )
    above, _, last = name.rpartition(".")
    written = dict(settings_in(_document(chain)))
    if above in written:  # one more keyword of an optimizer, say
        return f"{above}.{word}.{last}" if isinstance(word := written[above], str) else name
    if written.get(above.rpartition(".")[0]) == above.rpartition(".")[2]:  # its first one
        return name
    for path in (name, f"defaults.{name}"):  # below what is not set
        if path.rpartition(".")[2] in fields_at(ChainSpec, path.split(".")[:-1]):
            return path
    known = sorted({path.rpartition(".")[2] for path in allowed})
    hint = suggestion(last, known) or "'dnictl config' shows its settings"
    if last in ("lr", "learning_rate"):
        hint = "it names no optimizer yet, so give it one: 'optimizer={Adam: {lr: 0.01}}'"
        if "lr" in known:
            hint = "an optimizer's is 'lr'"
    raise UsageError(f"the chain has no setting {name!r}", hint=hint)


def _contains(path: Sequence[str], words: Sequence[str]) -> bool:
    """Whether a path has these words in their order, and ends with the last one."""
    rest = iter(path)
    return path[-1] == words[-1] and all(word in rest for word in words)


def settings_in(document: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting below a value, and the value itself, by paths; modules by their names."""
    if above:
        yield above, document
    start = f"{above}." if above else ""
    for key, value in _items(document):
        yield from settings_in(value, f"{start}{key}")


def _items(document: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(document, Mapping):
        yield from ((str(key), value) for key, value in document.items())
    elif isinstance(document, list | tuple):
        for number, one in enumerate(document):
            yield (str(one.get("name", number)) if isinstance(one, Mapping) else str(number)), one


def with_settings(chain: ChainSpec, settings: Mapping[str, Any]) -> ChainSpec:
    """Return the chain with other values of some settings, by their paths."""
    document = copy.deepcopy(_document(chain))
    for path, value in settings.items():
        *folders, last = path.split(".")
        at: Any = document
        for word in folders:
            if isinstance(at, dict):
                if isinstance(at.get(word), str):  # a name without keywords
                    at[word] = {at[word]: {}}
                at = at.setdefault(word, {})
            else:
                at = dict(_items(at)).get(word)
        keys = [key for key, _ in _items(at)]
        if last not in keys and not isinstance(at, dict):
            raise UsageError(f"{words_of(settings)}: {'.'.join(folders)!r} has no {last!r}")
        at[last if isinstance(at, dict) else keys.index(last)] = value
    try:
        return ChainSpec.model_validate(document)
    except ValidationError as error:
        location, message, hint = explain_details(error, ChainSpec)
        where = ".".join(map(str, location))
        raise UsageError(f"{words_of(settings)}: {where}: {message}", hint=hint) from None


def words_of(settings: Mapping[str, Any]) -> str:
    """Return settings as ``lr=0.001 seed=2``, by the last words of their paths."""
    return " ".join(f"{path.rpartition('.')[2]}={value}" for path, value in settings.items())


def _document(chain: ChainSpec) -> dict[str, Any]:
    return chain.model_dump(mode="json", exclude_unset=True)


def differing(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return of each chain document the settings that are not the same in all, by their paths.

    If one holds others, such as an optimizer its ``lr``, only the inner ones are named. What is
    the same in several modules, as it comes from ``defaults``, is named once.
    """
    found = [dict(settings_in(document)) for document in documents]
    paths = dict.fromkeys(path for settings in found for path in settings)
    columns: dict[tuple[str, ...], str] = {}
    other = [path for path in paths if len({repr(one.get(path)) for one in found}) > 1]
    for path in other:
        if not any(one.startswith(f"{path}.") for one in other):
            values = (repr(one.get(path)) for one in found)
            columns.setdefault((path.rpartition(".")[2], *values), path)
    return [{path: settings.get(path) for path in columns.values()} for settings in found]
