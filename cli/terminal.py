"""What commands print: for people, safe for their terminals, or as JSON."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import click

# Control characters but newline and tab, and those that turn the direction of text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return text that workers may have written, with terminal control characters escaped."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def say(line: str) -> None:
    """Print a line of the command's output, for people."""
    click.echo(printable(line))


def tell(line: str) -> None:
    """Print a line to stderr, beside the command's output."""
    click.echo(printable(line), err=True)


def noted(name: str) -> Any:
    """Return the value of an option that commands do not get; None if this one has no such."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(f"dnictl.{name}")


def json_wanted() -> bool:
    """Whether --json was given."""
    return bool(noted("json"))


def print_json(document: Any) -> None:
    """Print one JSON document to stdout."""
    click.echo(json_text(document, indent=2))


def answered(document: Any) -> bool:
    """Print the result of a command as JSON, if that is wanted; return whether it was."""
    if json_wanted():
        print_json(document)
    return json_wanted()


def answer(document: Any, line: str) -> None:
    """Print the result of a command: as JSON if that is wanted, else as a line for people."""
    if not answered(document):
        say(line)


def json_text(document: Any, indent: int | None = None) -> str:
    """Return JSON text; what could command a terminal is escaped, as JSON escapes it.

    Numbers that are not finite are null: JSON has none of them.
    """
    return printable(json.dumps(finite(document), indent=indent, ensure_ascii=False))


def finite(value: Any) -> Any:
    """Return a JSON document with null for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
