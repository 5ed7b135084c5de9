"""Text as bytes: a sample is a window of bytes, its label the same window shifted by one byte.

Shape suffixes: L bytes of a text, B windows of a batch, T tokens (bytes) of a window.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from dni_runtime.data.source import Found, resolve
from dni_runtime.data.splits import Batch, Split
from dni_runtime.errors import DataError
from dni_runtime.spec import DataInfo, DataSpec, TensorSpec
from dni_runtime.spec.named import Frozen

CLASSES = 256
"""Number of values of a byte."""

ENDINGS = frozenset(
    {".bib", ".c", ".cc", ".cpp", ".css", ".csv", ".go", ".h", ".hpp", ".html", ".java", ".js"}
    | {".json", ".jsonl", ".md", ".py", ".pyi", ".rs", ".rst", ".sh", ".tex", ".toml", ".ts"}
    | {".txt", ".xml", ".yaml", ".yml"}
)
"""Suffixes of the files that are read from a folder."""

STDLIB_BYTES = 2_000_000
"""Bytes of Python's standard library in the default text: the same size on all machines."""


class TextOptions(Frozen):
    """Options of the data set ``text``."""

    context: Annotated[int, Field(ge=1, le=1 << 20)] = 64  # tokens per sample
    eval_share: Annotated[float, Field(gt=0, lt=1)] = 0.1  # of the text, from its end


@dataclass(frozen=True)
class TextSplit(Split):
    """Windows of a text that do not overlap."""

    ordered: ClassVar[bool] = True

    text_L: Tensor  # uint8
    context: int  # T, bytes per window
    # Bytes at the end outside of all windows, so that windows can be shifted by as many.
    spare: int = 0
    offset: int = 0  # bytes before the first window, at most ``spare``

    def __len__(self) -> int:
        return _windows(len(self.text_L), self.context, self.spare)

    def batch(self, order_B: Tensor) -> Batch:
        """Return windows and their next bytes, both int64 (B, T)."""
        starts_B1 = (order_B * self.context + self.offset).unsqueeze(1)
        bytes_BU = self.text_L[starts_B1 + torch.arange(self.context + 1)].to(torch.int64)
        return bytes_BU[:, :-1].contiguous(), bytes_BU[:, 1:].contiguous()

    def in_epoch(self, rng: np.random.Generator) -> TextSplit:
        """Shift the windows by a random offset of less than one window."""
        return replace(self, offset=int(rng.integers(self.spare))) if self.spare else self

    def held_out(self) -> TextSplit:
        """Shift the windows so that those of training never overlap them, whatever their offset."""
        return replace(self, offset=self.spare)


def find_text(spec: DataSpec, base: Path, options: TextOptions) -> Found:
    """Find a text and split it into a part for training and one for evaluation."""
    path = None if spec.path is None else resolve(spec.path, base)
    files = _standard_library() if path is None else _files(path)
    limit = STDLIB_BYTES if path is None else None
    size = sum(size for _, size in files)
    if limit is not None and size < limit:
        raise DataError(
            f"the sources of Python's standard library have {size} bytes here, fewer than {limit}",
            hint="set data.path to a text of your own",
        )
    size = size if limit is None else limit
    context = options.context
    train_size = _train_size(size, options)
    train_samples = _windows(train_size, context, context)
    eval_samples = _windows(size - train_size, context, 0)
    if not train_samples or not eval_samples:
        raise DataError(
            f"{'the text' if path is None else path}: {train_size} bytes for training and "
            f"{size - train_size} for evaluation do not hold windows of {context}",
            hint="lower data.args.context, change data.args.eval_share, or give more text",
        )

    def load() -> tuple[TextSplit, TextSplit]:
        text_L = _read([file for file, _ in files], limit)
        cut = _train_size(len(text_L), options)
        return TextSplit(text_L[:cut], context, spare=context), TextSplit(text_L[cut:], context)

    tokens = TensorSpec(shape=(context,), dtype="int64")
    info = DataInfo(
        sample=tokens,
        label=tokens,
        classes=CLASSES,
        train_samples=train_samples,
        eval_samples=eval_samples,
    )
    return Found(info, path, load)


def _windows(size: int, context: int, spare: int) -> int:
    # The last byte of a text is only a label.
    return max((size - 1 - spare) // context, 0)


def _train_size(size: int, options: TextOptions) -> int:
    return size - int(size * options.eval_share)


def _standard_library() -> list[tuple[Path, int]]:
    """List modules of Python's standard library, except those that differ between machines."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = (path for path in sorted(folder.glob("*.py")) if path.is_file())
    own = ("_sysconfigdata", "sitecustomize", "usercustomize")
    return [(path, path.stat().st_size) for path in found if not path.name.startswith(own)]


def _files(path: Path) -> list[tuple[Path, int]]:
    if not path.is_dir():
        found = [path]
    else:
        found = sorted(_texts(path), key=lambda file: file.relative_to(path).as_posix())
        if not found:
            raise DataError(
                f"there are no texts in the folder {str(path)!r}",
                hint=f"files with these endings are read: {', '.join(sorted(ENDINGS))}; to read "
                "another file, set data.path to the file itself",
            )
    try:
        return [(file, file.stat().st_size) for file in found]
    except FileNotFoundError:
        raise DataError(f"no file or folder {str(path)!r}", hint="correct data.path") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _texts(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.suffix.lower() in ENDINGS and not hidden and file.is_file():
            yield file


def _read(files: list[Path], limit: int | None) -> Tensor:
    """Return the concatenated bytes of some files as a uint8 tensor (L,)."""
    text = bytearray()
    for file in files:
        try:
            text += file.read_bytes()
        except OSError as error:
            raise _unreadable(file, error) from None
        if limit is not None and len(text) >= limit:
            del text[limit:]
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror}", hint="check its permissions")
