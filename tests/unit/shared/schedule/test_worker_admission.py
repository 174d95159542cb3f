"""What a worker refuses before it takes anything."""

from __future__ import annotations

import pytest

from shared.engine.fake import FakeModel
from shared.errors import DeadlinePassed, InvalidRequest, MeshError, Overloaded, ShuttingDown
from shared.schedule.admission import Duty, require_admissible
from tests.support.cores import an_item

SPEC = FakeModel(vocab_size=100, max_model_len=8).spec
IDLE = Duty("decode", 0, 2, is_draining=False)


def test_what_the_model_can_read_is_taken_by_a_worker_with_room():
    """The longest prompt, the last token of the vocabulary, the last place, no time to lose."""
    duty = IDLE._replace(num_held=1)
    require_admissible(an_item((99,) * 7), SPEC, duty, deadline_at=1.1, now=1.0)


@pytest.mark.parametrize(
    ("prompt", "duty", "deadline_at", "error"),
    [
        ((1,), IDLE._replace(is_draining=True), None, ShuttingDown),
        ((1,), IDLE._replace(num_held=2), None, Overloaded),
        ((1,), IDLE, 1.0, DeadlinePassed),
        ((1,) * 8, IDLE, None, InvalidRequest),
        ((1, 100), IDLE, None, InvalidRequest),
    ],
)
def test_everything_else_is_refused_at_once(
    prompt: tuple[int, ...], duty: Duty, deadline_at: float | None, error: type[MeshError]
):
    """Each with a type that says whose fault it is."""
    with pytest.raises(error):
        require_admissible(an_item(prompt), SPEC, duty, deadline_at=deadline_at, now=1.0)
