"""What all documents have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from dni_runtime.errors import DataError
from dni_runtime.files import append_line, peek_json, read_json, write_json
from dni_runtime.spec.load import explain_details


class Document(BaseModel):
    """A document; it does not change."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Read the file; None if it does not exist."""
        document = read_json(path)
        try:
            return None if document is None else cls.model_validate(document)
        except ValidationError as error:
            where, what, _ = explain_details(error, cls)
            field = ".".join(map(str, where))
            raise DataError(f"{str(path)!r} is damaged: {field}: {what}") from None

    @classmethod
    def peek(cls, path: Path) -> Self | None:
        """Read a file that another process writes; None if that is not possible now."""
        document = peek_json(path)
        try:
            return cls.model_validate(document) if document else None
        except ValidationError:
            return None

    @classmethod
    def parse(cls, line: bytes) -> Self | None:
        """Return the document of a line; None if it is damaged."""
        try:
            return cls.model_validate_json(line)
        except ValidationError:
            return None

    def to_dict(self) -> dict[str, Any]:
        """Return what was set, as JSON's types."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def write(self, path: Path, *, durable: bool = True) -> None:
        write_json(path, self.model_dump(mode="json", by_alias=True), durable=durable)

    def append(self, path: Path) -> int:
        """Append what was set as a line of a file; return the file's new size."""
        return append_line(path, self.to_dict())
