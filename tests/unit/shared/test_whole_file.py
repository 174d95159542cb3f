"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.whole_file import write_whole


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    """Over an older one, too."""
    path = tmp_path / "file"
    for content in (b"old and long", b"new"):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="Is a directory"):
        write_whole(tmp_path, b"")


def test_what_is_no_file_stays_what_it_is(tmp_path: Path) -> None:
    """A pipe, as /dev/stdout often is, and a link to a file."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"content")
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    link.symlink_to(tmp_path / "file")
    write_whole(link, b"content")
    assert link.is_symlink()
    assert (tmp_path / "file").read_bytes() == b"content"
