"""Data files of published form: CSV and JSON with the place of every mistake in its message."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import orjson

from shared.errors import InvalidRequest

Row = TypeVar("Row")


class DataError(InvalidRequest):
    """A data file cannot be used; the message says file, line and what is wrong there."""


def read_text(path: Path) -> str:
    """Return a file's text. Raises DataError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not text") from None


def read_lines(
    path: Path, decoder: msgspec.json.Decoder[Row], text: str | None = None
) -> Iterator[tuple[int, Row]]:
    """Yield line number and content of every line of a file that is JSON line by line.

    text: the file's, where it is read already: a pipe is read once. Raises DataError.
    """
    text = read_text(path) if text is None else text
    for line, content in enumerate(text.splitlines(), 1):
        if not content.strip():
            continue
        try:
            row = decoder.decode(content)
        except msgspec.DecodeError as error:  # a ValidationError is one
            raise DataError(f"{path}:{line}: {error}") from None
        yield line, row


def read_rows(
    path: Path, columns: Sequence[str], otherwise: str = "", text: str | None = None
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield line number and fields of every row of a CSV file that has at least these columns.

    otherwise: what is said of a file without them, too. text: see ``read_lines``. Raises DataError.
    """
    lines = _fields(path, read_text(path) if text is None else text)
    _, first = next(lines, (1, cast("list[str]", [])))
    head = [name.strip() for name in first]
    missing = [name for name in columns if name not in head]
    if missing:
        raise DataError(
            f"{path}:1: {otherwise}no column {', '.join(missing)}; needed are {', '.join(columns)}"
        )
    if twice := [name for name in columns if head.count(name) > 1]:
        raise DataError(f"{path}:1: more than one column {', '.join(twice)}")
    for line, fields in lines:
        if not fields:
            continue
        if len(fields) != len(head):
            raise DataError(f"{path}:{line}: {len(fields)} columns, not {len(head)}")
        yield line, dict(zip(head, fields, strict=True))


def _fields(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    lines = csv.reader(text.splitlines())
    try:
        for fields in lines:
            yield lines.line_num, fields
    except csv.Error as error:
        raise DataError(f"{path}:{lines.line_num}: {error}") from None


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the object that a JSON file holds. Raises DataError."""
    try:
        value = orjson.loads(read_text(path))
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} does not hold a JSON object")
    return cast("dict[str, Any]", value)


def number(where: str, row: Mapping[str, str], column: str, *, least: float = 0.0) -> float:
    """Return a field as a finite number. Raises DataError; where: file and line."""
    try:
        value = float(row[column])
    except ValueError:
        raise DataError(f"{where}: {column} must be a number, not {row[column]!r}") from None
    if not math.isfinite(value) or value < least:
        raise DataError(f"{where}: {column} must be at least {least:g}, not {row[column]!r}")
    return value


def count(where: str, row: Mapping[str, str], column: str, *, least: int = 1) -> int:
    """Return a field as a whole number. Raises DataError; where: file and line."""
    value = number(where, row, column, least=least)
    if value != int(value):
        raise DataError(f"{where}: {column} must be a whole number, not {row[column]!r}")
    return int(value)


def first_of(folder: Path, *names: str) -> Path:
    """Return the file of this folder that has one of these names, earlier names first.

    Raises DataError: there is none.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder} holds no {' and no '.join(names)}")
