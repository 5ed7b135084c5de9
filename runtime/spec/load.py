"""Reading ``chain.yaml``: YAML with line numbers, then the models; errors name the line.

It is one file because each message needs both: where the text is, and what the models say of it.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dni_runtime.errors import SpecError, unreadable
from dni_runtime.spec.data import DataSpec, LabelsSpec
from dni_runtime.spec.model import ChainSpec
from dni_runtime.spec.named import TAG, WORDS, Choice, LayerSpec
from dni_runtime.spec.running import ReplicationSpec

Location = tuple[str | int, ...]

_MAX_NODES = 100_000
_MAX_DEPTH = 100


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2 (``1e-3`` is a number, ``off`` is a word)."""

    _nodes = _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, unless there are too many or it lies too deep."""
        self._nodes += 1
        self._depth += 1
        if (problem := _excess(self._nodes, self._depth)) is not None:
            raise yaml.composer.ComposerError(None, None, problem, self.get_mark())
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct what a node stands for; whatever fails names the node's line."""
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception as error:  # ValueError: too many digits; more if a tag is not its text's
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"this cannot be read as {kind}: {error}", node.start_mark
            ) from None


def _excess(nodes: int, depth: int) -> str | None:
    if depth > _MAX_DEPTH:
        return f"nested deeper than {_MAX_DEPTH} levels"
    return f"more than {_MAX_NODES:,} values" if nodes > _MAX_NODES else None


_Loader.yaml_implicit_resolvers = {
    first: [
        pair
        for pair in pairs
        if pair[0] not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")
        and pair[0] not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:int")
    ]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(  # YAML 1.2.2, section 10.3.2, core schema
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"),
    list("-+0123456789."),
)
_Loader.add_constructor(  # without the other bases, whose numbers may be too long to be printed
    "tag:yaml.org,2002:int",
    lambda loader, node: int(str(node.value).replace("_", "")),
)


def load_chain(path: str | Path) -> ChainSpec:
    """Read and check a chain specification; names and keywords of layers are checked later."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise SpecError(
            f"there is no file {str(path)!r}" if missing else unreadable(path, error),
            hint="give the path of your chain file, or create one with 'dnictl init'",
        ) from None
    return parse_chain(text, file=str(path))


def parse_chain(text: str, *, file: str = "chain.yaml") -> ChainSpec:
    """Check a chain specification given as YAML text; see :func:`load_chain`."""
    document, lines = parse_yaml(text, file)
    if document is None:
        raise SpecError("the file is empty", file=file, hint="see 'dnictl init'")
    if not isinstance(document, dict):
        raise SpecError(
            "a chain is a mapping with 'name' and 'modules'", file=file, line=lines.get(())
        )
    try:
        return ChainSpec.model_validate(document)
    except ValidationError as error:
        raise explained(error, ChainSpec, lines, file) from None


def parse_choice(text: str) -> Choice:
    """Parse a name with keywords, as in a chain file; raises ``SpecError`` if it is none."""
    try:
        return Choice.model_validate(parse_yaml(text, text)[0])
    except ValidationError:
        raise SpecError(f"{text!r} is not a name with keywords") from None


def parse_replication(text: str) -> ReplicationSpec:
    """Parse a strategy, after which more keys of ``replication`` may follow, as in a chain file.

    Raises ``SpecError`` if it is something else.
    """
    try:
        return ReplicationSpec.model_validate(parse_yaml(f"{{strategy: {text}}}", text)[0])
    except ValidationError:
        raise SpecError(f"{text!r} is not a strategy of replicas") from None


def line_of(text: str, location: Location) -> int | None:
    """Return the one-based line of ``location`` (keys and indices) in a YAML text."""
    return _nearest(parse_yaml(text, "chain.yaml")[1], location)


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Add the chain's file and line to errors that hold only a location in the document."""
    try:
        yield
    except SpecError as error:
        if error.file is None:
            error.file = str(path)
            error.line = line_of(path.read_text(encoding="utf-8"), error.location)
        raise


def source_files(chain: ChainSpec, base: Path) -> dict[str, Path]:
    """Find the user's Python files that the chain needs, by POSIX path relative to ``base``.

    Those are the files of import paths, the files beside them that these import, and ``sources``.
    Import paths not found below ``base``, the folder of ``chain.yaml``, are assumed to be installed
    packages and left out.
    """
    root = base.resolve()
    files: dict[str, Path] = {}
    for index, name in enumerate(chain.sources):
        path = (root / name).resolve()
        if not path.is_relative_to(root) or not path.exists():
            raise SpecError(
                f"{name!r} is not a file or folder below {str(base)!r}", location=("sources", index)
            )
        _collect(path, root, files)
    modules = sorted({target.split(":")[0] for target in import_paths(chain)})
    for file in files.values():
        modules += _imports(file, root)
    for name in modules:  # grows
        if (module := _located(name, root)) is not None:
            before = set(files)
            _collect(module, root, files)
            for new in set(files) - before:
                modules += _imports(files[new], root)
    return files


def _located(name: str, root: Path) -> Path | None:
    """Return the file of a module below the root, or the folder of the package that it is in."""
    folder = root
    for part in name.split("."):
        file, folder = folder / f"{part}.py", folder / part
        if (folder / "__init__.py").is_file():
            return folder
        if file.is_file():
            return file
    return None  # folders without __init__.py: each module in them is found by its own name


def _imports(file: Path, root: Path) -> list[str]:
    if file.suffix != ".py":
        return []
    return imported_names(file, file.relative_to(root).parent.parts)


def imported_names(file: Path, package: Sequence[str]) -> list[str]:
    """Return what a Python file in a package imports, as absolute names; nothing if it is invalid.

    Some of them may be names in modules.
    """
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level <= len(package):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return names


def _collect(path: Path, root: Path, sources: dict[str, Path]) -> None:
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    for file in files:
        if file.is_file() and "__pycache__" not in file.parts:
            sources[file.relative_to(root).as_posix()] = file


def import_paths(node: object) -> Iterator[str]:
    """Yield the import paths (``package.module:Class``) in a spec."""
    if isinstance(node, LayerSpec | Choice):
        name = node.type if isinstance(node, LayerSpec) else node.name
        if ":" in name:
            yield name
    if isinstance(node, DataSpec | LabelsSpec) and ":" in (node.dataset or ""):
        yield str(node.dataset)
    if isinstance(node, BaseModel):
        for field in type(node).model_fields:
            yield from import_paths(getattr(node, field))
    elif isinstance(node, tuple | list):
        for item in node:
            yield from import_paths(item)
    elif isinstance(node, dict):
        if isinstance(node.get("import"), str):
            yield node["import"]
        for item in node.values():
            yield from import_paths(item)


def parse_yaml(text: str, file: str) -> tuple[Any, dict[Location, int]]:
    """Parse a YAML document that may come from elsewhere; return also the line of each location.

    An empty document is None. Raises ``SpecError`` if it is not YAML, is too large, or has a key
    twice.
    """
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"the character U+{error.character:04X} is not allowed"
        raise SpecError(f"not valid YAML: {problem}", file=file, line=line) from None
    try:
        root = loader.get_single_node()
        if root is None:
            return None, {}
        lines: dict[Location, int] = {}
        _index(root, (), lines)
        return loader.construct_document(root), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise SpecError(
            f"not valid YAML: {error.problem or error.context}",
            file=file,
            line=mark.line + 1 if mark else None,
        ) from None
    except (ValueError, ArithmeticError) as error:  # of the scanner: numbers in what it reads
        raise SpecError(f"not valid YAML: {error}", file=file, line=loader.line + 1) from None
    except SpecError as error:
        error.file = file
        raise
    finally:
        loader.dispose()


def _index(node: yaml.Node, at: Location, lines: dict[Location, int]) -> None:
    """Note the line of each location below a node; an alias counts as what it stands for."""
    line = node.start_mark.line + 1
    lines.setdefault(at, line)
    if (problem := _excess(len(lines), len(at) + 1)) is not None:
        raise SpecError(f"not valid YAML: {problem}, with what aliases stand for", line=line)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise SpecError("not valid YAML: a key is a word or a number", line=line)
            name = key.value
            if name in seen:
                raise SpecError(f"duplicate key {name!r}", line=line, location=(*at, name))
            seen.add(name)
            lines[(*at, name)] = line
            _index(value, (*at, name), lines)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            _index(value, (*at, number), lines)


def _nearest(lines: dict[Location, int], location: Location) -> int | None:
    while location and location not in lines:
        location = location[:-1]
    return lines.get(location)


def explained(
    error: ValidationError, model: type[BaseModel], lines: dict[Location, int], file: str
) -> SpecError:
    """Return what a pydantic model says of a document, with the file and the line."""
    location, message, hint = explain_details(error, model)
    return SpecError(
        message, file=file, line=_nearest(lines, location), location=location, hint=hint
    )


def explain_details(
    error: ValidationError, model: type[BaseModel]
) -> tuple[Location, str, str | None]:
    """Return the location of a pydantic model's first error, a message with the value, a hint."""
    # A misspelt key is often the cause of a missing one: report it first.
    details = sorted(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
    location = tuple(part for part in details[0]["loc"] if not str(part).startswith(TAG))
    message, hint = _message(details[0], model)
    if len(details) > 1:
        message += f" (and {len(details) - 1} more)"
    return location, message, hint


def _message(detail: ErrorDetails, model: type[BaseModel]) -> tuple[str, str | None]:
    kind, value, context = detail["type"], detail.get("input"), detail.get("ctx", {})
    location = tuple(detail["loc"])
    if kind == "extra_forbidden":
        key, allowed = str(location[-1]), fields_at(model, location[:-1])
        if len(location) == 1 and key in fields_at(model, ("defaults",)):
            return f"unknown key {key!r} here", "write it below 'defaults', or in a module"
        return f"unknown key {key!r}", suggestion(key, allowed)
    if kind == "missing":
        return f"{str(location[-1])!r} is missing", None
    if kind == "literal_error":
        return f"{value!r} is not allowed here", f"allowed: {context['expected']}"
    if kind == "value_error":
        return str(context["error"]), None
    if kind == "string_pattern_mismatch" and context["pattern"] in WORDS:
        return f"{value!r} is not {WORDS[context['pattern']]}", None
    if kind in _EXPECTED:
        hint = suggestion("", fields_at(model, location)) if kind == "model_type" else None
        return f"{value!r} is not {_EXPECTED[kind].format(**context)}", hint
    return f"{value!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}", None


_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "'true' or 'false'"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list, as [a, b]"),
    **dict.fromkeys(("dict_type", "model_type"), "a mapping, as {{key: value}}"),
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "string_type": "a text: write it in quotes",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}
"""What pydantic expects, by the type of its error (https://docs.pydantic.dev/latest/errors)."""


def suggestion(word: str, allowed: list[str]) -> str | None:
    """Return ``did you mean …?`` with the allowed words, or None if there are none."""
    if not allowed:
        return None
    lower = {entry.lower(): entry for entry in reversed(allowed)}
    close = difflib.get_close_matches(word.lower(), lower, n=1)
    start = f"did you mean {lower[close[0]]!r}?" if close else ""
    if len(allowed) > 30:
        return start or None
    return f"{start} allowed: {', '.join(sorted(allowed))}".lstrip()


def fields_at(model: Any, location: Sequence[str | int]) -> list[str]:
    """Return the field names of the model at a location of the document."""
    for part in location:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is None:
            return []
        model = _model_in(field.annotation)
    return list(model.model_fields) if hasattr(model, "model_fields") else []


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        model = _model_in(argument)
        if model is not None:
            return model
    return None
