"""``pdmesh bench`` refuses what it cannot do before it sends anything."""

from __future__ import annotations

import pytest

from services.cli.app import run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rates", "1,x"), "must be numbers like 1,2,4"),
        (("--rate", "1", "--rates", "1,2"), "give --rates alone"),
        (("--rate", "0"), "above 0"),
        (("--rate", "inf"), "needs --requests"),
        (("--slo-ttft", "5 parsecs"), "must be a number with a unit"),
        (("--trace", "/nothing/here"), "no such file"),
        (("ftp://x",), "must be http://host:port"),
        (("grpc://nobody",), "must be http://host:port"),
        (("http://127.0.0.1:9",), "nothing answers"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is sent."""
    code = run(["bench", *arguments])
    out, err = capsys.readouterr()
    assert (code in (1, 2), out) == (True, "")
    assert words in err
    assert err.count("\n") == 1
