"""Data files of published form: CSV and JSON with the place of every mistake in its message."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from shared.errors import InvalidRequest

Row = TypeVar("Row")
Fields = TypeVar("Fields", bound=msgspec.Struct)


class DataError(InvalidRequest):
    """A data file cannot be used; the message says file, line and what is wrong there."""


def read_text(path: Path) -> str:
    """Return a file's text, whose lines end in \\n alone. Raises DataError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not text") from None


def read_lines(path: Path, kind: type[Row], text: str | None = None) -> Iterator[tuple[int, Row]]:
    """Yield line number and content of every line of a file that is JSON line by line.

    text: the file's, where it is read already: a pipe is read once. Raises DataError.
    """
    decoder = msgspec.json.Decoder(kind)
    for line, content in enumerate((read_text(path) if text is None else text).split("\n"), 1):
        if not content.strip():
            continue
        try:
            row = decoder.decode(content)
        except msgspec.DecodeError as error:  # a ValidationError is one
            raise DataError(f"{path}:{line}: {error}") from None
        yield line, row


def read_rows(
    path: Path, kind: type[Fields], otherwise: str = "", text: str | None = None
) -> Iterator[tuple[int, Fields]]:
    """Yield line number and content of every row of a CSV file. It has a column for each field of
    the struct that has no default; a field that is empty there has its default.

    otherwise: what is said of a file without them, too. text: see ``read_lines``. Raises DataError.
    """
    columns = msgspec.structs.fields(kind)
    names = [column.encode_name for column in columns]
    types = cast("msgspec.inspect.StructType", msgspec.inspect.type_info(kind)).fields
    whole = {it.encode_name for it in types if isinstance(it.type, msgspec.inspect.IntType)}
    lines = _fields(path, read_text(path) if text is None else text)
    _, first = next(lines, (1, cast("list[str]", [])))
    head = [name.strip() for name in first]
    needed = [column.encode_name for column in columns if column.required]
    if missing := [name for name in needed if name not in head]:
        raise DataError(
            f"{path}:1: {otherwise}no column {', '.join(missing)}; needed are {', '.join(needed)}"
        )
    if twice := [name for name in names if head.count(name) > 1]:
        raise DataError(f"{path}:1: more than one column {', '.join(twice)}")
    for line, fields in lines:
        if not fields:
            continue
        if len(fields) != len(head):
            raise DataError(f"{path}:{line}: {len(fields)} columns, not {len(head)}")
        own = {name: it.strip() for name, it in zip(head, fields, strict=True) if it.strip()}
        for name in whole & own.keys():  # pandas writes 1024.0 where a column has gaps
            own[name] = own[name].removesuffix(".0")
        try:
            yield line, msgspec.convert(own, kind, strict=False)
        except msgspec.ValidationError as error:
            raise DataError(f"{path}:{line}: {error}") from None


def _fields(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    lines = csv.reader(io.StringIO(text))
    try:
        for fields in lines:
            yield lines.line_num, fields
    except csv.Error as error:
        raise DataError(f"{path}:{lines.line_num}: {error}") from None


def read_json(path: Path, kind: type[Row]) -> Row:
    """Return what a JSON file holds. Raises DataError."""
    try:
        return msgspec.json.decode(read_text(path), type=kind)
    except msgspec.DecodeError as error:
        raise DataError(f"{path}: {error}") from None


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
