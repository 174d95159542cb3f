"""Block tables on the device are those of the rows, however sequences come, grow and go, and only
what is new of them is written."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from shared.engine.memory.block_tables import BlockTables  # noqa: E402
from shared.engine.memory.paged_kv import PagedKv  # noqa: E402
from shared.errors import LocalProtocolError  # noqa: E402
from shared.kv.layout import KvLayout  # noqa: E402

pytestmark = pytest.mark.torch

NUM_BLOCKS, NUM_ROWS, WIDTH = 60, 4, 6
CPU = torch.device("cpu")


def block_tables() -> BlockTables:
    layout = KvLayout(dtype="float32", num_layers=1, num_kv_heads=1, head_dim=2)
    kv = PagedKv(layout, NUM_BLOCKS, 2, CPU, num_padding=1)
    return BlockTables(kv, num_rows=NUM_ROWS, width=WIDTH, device=CPU)


@given(st.lists(st.sampled_from(["step", "start", "grow", "stop", "swap"]), max_size=80), st.data())
def test_every_step_finds_its_rows_tables(schedule: list[str], data: st.DataObject) -> None:
    """As if they were all written anew; what is written is no more than has grown since a table was
    last in a step, unless the step before had no room for it."""
    tables = block_tables()
    chance = random.Random(data.draw(st.integers(0, 1 << 16)))
    running: list[array[int]] = []
    for what in [*schedule, "step"]:
        if what == "start":
            running.append(array("i", [chance.randrange(NUM_BLOCKS)]))
        elif running and what == "grow":
            chance.choice(running).append(chance.randrange(NUM_BLOCKS))
        elif running and what == "stop":
            running.pop(chance.randrange(len(running)))
        elif what == "swap":
            chance.shuffle(running)
        elif running:
            rows = running[:NUM_ROWS]
            places = tables.places(rows, [len(row) for row in rows])
            if places is None:
                assert max(map(len, rows)) > WIDTH
                continue
            for row, place in zip(rows, places, strict=True):
                assert tables.blocks[place : place + len(row)].tolist() == row.tolist()
            assert int(tables.blocks[0]) == NUM_BLOCKS
            again = tables.num_written
            assert list(tables.places(rows[::-1], [len(row) for row in rows[::-1]]) or ()) == [
                *reversed(places)
            ]
            assert tables.num_written == again


def test_only_what_is_new_is_written() -> None:
    """A row that takes a block costs one number, one that joins its own blocks, one that leaves
    none, and a table that waits a step costs nothing while there is room."""
    tables = block_tables()
    one, two, three = array("i", [1, 2, 3]), array("i", [4]), array("i", [5, 6])

    def cost(*rows: array[int]) -> int:
        before = tables.num_written
        assert tables.places(rows, [len(row) for row in rows]) is not None
        return tables.num_written - before

    assert cost(one, two) == 4
    assert cost(one, two) == 0
    two.append(7)
    assert cost(two, one) == 1
    assert cost(three, one) == 2
    assert cost(two, one, three) == 0
    others = [array("i", [8]), array("i", [9])]
    assert cost(one, *others) == 2  # in place of one that is not in the step
    assert cost(one, two, three) == 4  # both had gone


def test_blocks_of_no_pool_are_refused_and_not_written() -> None:
    """The next step writes what is right."""
    tables = block_tables()
    right, wrong = array("i", [1, 2]), array("i", [NUM_BLOCKS])
    with pytest.raises(LocalProtocolError, match="outside this pool"):
        tables.places([right, wrong], [2, 1])
    assert tables.num_written == 0
    places = tables.places([right], [2])
    assert places is not None
    assert tables.blocks[places[0] : places[0] + 2].tolist() == [1, 2]


def test_two_rows_of_one_table_share_its_place() -> None:
    """As forks of one prompt might."""
    tables = block_tables()
    table = (3, 4, 5)
    places = tables.places([table, table], [1, 3])
    assert places is not None
    assert places[0] == places[1]
    assert tables.blocks[places[0] : places[0] + 3].tolist() == [3, 4, 5]
