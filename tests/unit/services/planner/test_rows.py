"""Data files: the place of every mistake is in its message."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.planner.rows import DataError, read_lines, read_rows


class Pair(msgspec.Struct):
    a: int
    b: int


class Name(msgspec.Struct):
    a: int
    b: str


@pytest.mark.parametrize("text", ["a,b\n1,2\n" + "3" * 200_000 + ",4\n", "x" * 200_000])
def test_a_file_that_is_no_table_is_refused_by_its_line(text: str, tmp_path: Path) -> None:
    """A field that no CSV reader takes, as another kind of file may have one."""
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"{path}:\d: field larger than"):
        list(read_rows(path, Pair))


def test_a_whole_number_may_be_written_with_a_point(tmp_path: Path) -> None:
    """As pandas writes those of a column that has gaps; half a token is none."""
    path = tmp_path / "pairs.csv"
    path.write_text("a,b\n1024.0,2\n")
    assert list(read_rows(path, Pair)) == [(2, Pair(1024, 2))]
    path.write_text("a,b\n1024.5,2\n")
    with pytest.raises(DataError, match=rf"{path}:2: .*`\$.a`"):
        list(read_rows(path, Pair))


def test_a_line_ends_where_its_line_ends(tmp_path: Path) -> None:
    """Not at a separator within a text, which JSON may hold as it is."""
    path = tmp_path / "lines"
    path.write_bytes('\ufeff["a\u2028b"]\r\n\r\n["c\x85"]\r\n'.encode())
    assert list(read_lines(path, list[str])) == [(1, ["a\u2028b"]), (3, ["c\x85"])]


def test_a_quoted_text_keeps_its_lines(tmp_path: Path) -> None:
    """As a spreadsheet writes a cell of two lines; the next row's number is its own line's."""
    path = tmp_path / "names.csv"
    path.write_text('a,b\n1,"x\ny"\n2,z\n')
    assert list(read_rows(path, Name)) == [(3, Name(1, "x\ny")), (4, Name(2, "z"))]
