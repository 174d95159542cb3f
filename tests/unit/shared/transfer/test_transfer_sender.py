"""Prefill's end of a transfer: whole effect lists for every turn it can take."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import (
    LocalProtocolError,
    NoBlocks,
    Overloaded,
    RemoteProtocolError,
    TransferFailed,
    WorkerLost,
)
from shared.ids import LeaseToken, RequestId, TransferId
from shared.kv.layout import KvLayout
from shared.transfer.effects import (
    MAX_RESERVE_WAIT_S,
    CloseLink,
    EndTransfer,
    GatherAndSend,
    ReceiverTiming,
    SenderTiming,
    SendMessage,
)
from shared.transfer.messages import (
    Abort,
    Ack,
    Commit,
    Credit,
    Grant,
    LinkId,
    Open,
    Refused,
    Span,
    StopSending,
    TransferKey,
)
from shared.transfer.plan import FrameRule, PushMode
from shared.transfer.senders import Senders

LINK, OTHER_LINK = LinkId(1), LinkId(2)
KEY = TransferKey(RequestId(b"r" * 16), 0, LeaseToken(b"k" * 16))
ID = TransferId(b"t" * 16)
OTHER = TransferKey(RequestId(b"s" * 16), 0, LeaseToken(b"k" * 16))
OTHER_ID = TransferId(b"u" * 16)
LAYERS = 3
RULE = FrameRule(
    layout=KvLayout(dtype="uint8", num_layers=LAYERS, num_kv_heads=1, head_dim=4),
    group_bytes=1,
    max_frame_bytes=64 + 64,
)
LARGE = FrameRule(
    layout=KvLayout(dtype="uint8", num_layers=LAYERS, num_kv_heads=1, head_dim=1 << 17),
    group_bytes=1,
)
GONE = WorkerLost("gone")


class End:
    """One sender core with time in its hand; every event returns what matters of its effects."""

    def __init__(self, num_slots: int = 8, rule: FrameRule = RULE) -> None:
        self.core = Senders(num_slots=num_slots)
        self.core.link_up(LINK, rule)
        self.now = 100.0

    def begin(self, num_tokens: int = 4) -> list[Any]:
        return self.core.begin(KEY, LINK, num_tokens, self.now)

    def span(self, start: int, stop: int, **more: Any) -> list[Any]:
        mode = more.pop("mode", PushMode.LAYERWISE)
        return self.core.span_planned(KEY, start, stop, mode, self.now, **more)

    def say(self, message: Any) -> list[Any]:
        return self.core.message(LINK, message, self.now)

    def settle(self, frame_idx: int, error: Any = None) -> list[Any]:
        return self.core.send_settled(KEY, frame_idx, error, self.now)

    def computed(self) -> list[Any]:
        return self.core.span_computed(KEY, self.now)

    def commit(self) -> list[Any]:
        return self.core.commit(KEY, 7, self.now)

    def give_up(self, error: Any = None) -> list[Any]:
        return self.core.give_up(KEY, error, self.now)

    def later(self, seconds: float) -> list[Any]:
        self.now += seconds
        return self.core.tick(self.now)

    def granted(self, num_tokens: int = 4, skip: int = 0) -> End:
        self.begin(num_tokens)
        self.say(Grant(KEY, ID, 5, 1000, skip))
        return self

    def pushing(self, sent: int = 2) -> End:
        """Granted, one span of all tokens announced and computed, ``sent`` frames on their way."""
        self.granted()
        self.span(0, 4)
        self.computed()
        self.say(credit(sent))
        return self


def credit(frames: int, *, since: int = 0, of: TransferId = ID) -> Credit:
    """Credit up to ``frames``, after one up to ``since``; slot 100 + i for frame i."""
    return Credit(of, frames, tuple(range(100 + since, 100 + frames)))


def said(effects: list[Any]) -> list[Any]:
    """The messages of an effect list, which must hold nothing else."""
    assert all(isinstance(effect, SendMessage) for effect in effects)
    return [effect.message for effect in effects]


def frames(effects: list[Any]) -> list[int]:
    """Indices of the frames that are ordered to be sent; nothing else may be ordered."""
    assert all(isinstance(effect, GatherAndSend) for effect in effects)
    return [effect.frame.idx for effect in effects]


def test_a_whole_transfer():
    """Open, grant, span, layers, credit, commit, receipts, done: every effect in its place."""
    end = End()
    assert said(end.begin()) == [Open(KEY)]
    assert end.span(0, 4) == []
    assert said(end.say(Grant(KEY, ID, 5, 1000, 0))) == [Span(ID, 0, 4)]
    assert end.core.layers_ready(KEY, 1, end.now) == []
    (order,) = end.say(credit(2))
    assert (order.frame.idx, order.tag, order.epoch, order.transfer_id) == (0, 1000, 5, ID)
    assert order.peer_slot == 100
    assert frames(end.core.layers_ready(KEY, 2, end.now)) == [1]
    assert end.core.layers_ready(KEY, 3, end.now) == []  # no credit
    assert said(end.commit()) == [Commit(ID, 7, 3)]
    assert end.settle(0) == []
    assert end.say(Ack(ID, 1, done=False)) == []
    assert frames(end.say(credit(3, since=2))) == [2]
    assert end.settle(1) == []
    assert end.say(Ack(ID, 2, done=False)) == []
    assert end.say(Ack(ID, 3, done=True)) == [EndTransfer(KEY, None, was_needed=True)]
    assert end.core.is_live(KEY)  # its last send has not settled
    assert end.settle(2) == []
    assert not end.core.is_live(KEY)
    end.core.check_integrity()


def test_the_commit_may_come_before_the_grant():
    """Prefill computes at once; what it has planned and sampled goes out when room is granted."""
    end = End()
    end.begin()
    end.span(0, 4)
    end.commit()
    assert said(end.say(Grant(KEY, ID, 5, 1000, 0))) == [Span(ID, 0, 4), Commit(ID, 7, 3)]
    assert frames(end.say(credit(3))) == [0, 1, 2]


def test_tokens_that_decode_has_are_not_sent():
    """Spans are announced whole, frames begin at skip; nothing to send is a transfer, too."""
    end = End().granted(skip=4)
    assert said(end.span(0, 4, is_cached=True)) == [Span(ID, 0, 4)]
    assert said(end.commit()) == [Commit(ID, 7, 0)]
    assert end.say(Ack(ID, 0, done=True)) == [EndTransfer(KEY, None, was_needed=True)]


def test_a_cached_span_is_ready_at_once_and_the_next_one_is_not():
    """Frames of the cached prefix go before the first step has written a layer."""
    end = End().granted()
    end.span(0, 2, is_cached=True)
    end.span(2, 4)
    assert frames(end.say(credit(6))) == [0, 1, 2]
    assert frames(end.core.layers_ready(KEY, 1, end.now)) == [3]


def test_serialized_frames_wait_for_the_end_of_the_step():
    """Layers are ignored; the step's end releases all frames."""
    end = End().granted()
    end.span(0, 4, mode=PushMode.SERIALIZED)
    end.say(credit(3))
    assert end.core.layers_ready(KEY, 3, end.now) == []
    assert frames(end.computed()) == [0, 1, 2]


def test_staging_slots_go_round():
    """With one slot, two transfers take turns, in the order in which they asked."""
    end = End(num_slots=1)
    other, other_id = TransferKey(RequestId(b"s" * 16), 0, KEY.token), TransferId(b"u" * 16)
    end.granted()
    end.core.begin(other, LINK, 4, end.now)
    end.say(Grant(other, other_id, 6, 2000, 0))
    for key in (KEY, other):
        end.core.span_planned(key, 0, 4, PushMode.LAYERWISE, end.now, is_cached=True)
    order = end.say(credit(3)) + end.say(credit(3, of=other_id))
    turns = []
    while order:
        turns.append(order[0].key)
        end.core.check_integrity()
        order = end.core.send_settled(order[0].key, order[0].frame.idx, None, end.now)
    assert turns == [KEY, KEY, other, KEY, other, other]


def test_a_refusal_ends_it():
    """No room: the caller gets decode's reason."""
    end = End()
    end.begin()
    no = NoBlocks("full")
    assert end.say(Refused(KEY, no)) == [EndTransfer(KEY, no, was_needed=True)]
    assert not end.core.is_live(KEY)


def test_giving_up_before_the_grant_hands_the_grant_back():
    """The blocks are free at once; a grant that comes later is aborted, so decode frees its own."""
    end = End()
    end.begin()
    end.span(0, 4)
    error = TransferFailed("cancelled")
    assert end.give_up(error) == [EndTransfer(KEY, error, was_needed=True)]
    assert end.span(4, 5) == []  # the step loop has not noticed
    assert said(end.say(Grant(KEY, ID, 5, 1000, 0))) == [Abort(ID, error, 0)]
    assert not end.core.is_live(KEY)


def test_what_is_computed_and_has_no_room_gives_way():
    """Not while it is computed, nor once it is granted."""
    end = End()
    end.begin()
    end.span(0, 4)
    error = Overloaded("others need its room")
    assert end.core.give_way(1, error, end.now) == []
    end.commit()
    assert end.core.give_way(0, error, end.now) == []
    effects = end.core.give_way(1, error, end.now)
    assert effects == [EndTransfer(KEY, error, was_needed=True)]
    pushing = End().pushing()
    pushing.commit()
    assert pushing.core.give_way(1, error, pushing.now) == []


def test_giving_up_amid_a_push_waits_for_what_was_sent():
    """Decode is told how much it will still get; blocks are free when the last send settles."""
    end = End().pushing(sent=2)
    assert said(end.give_up()) == [Abort(ID, None, 2)]
    assert end.say(credit(3)) == []
    assert end.say(Ack(ID, 1, done=False)) == []
    assert end.settle(0) == []
    assert end.settle(1, TransferFailed("x")) == [EndTransfer(KEY, None, was_needed=False)]
    assert end.give_up() == []


def test_decodes_abort_is_answered():
    """The answer says which frames are on their way: decode waits for those and no others."""
    end = End().pushing(sent=2)
    error = NoBlocks("preempted")
    assert said(end.say(StopSending(ID, error))) == [Abort(ID, None, 2)]
    end.settle(0)
    assert end.settle(1) == [EndTransfer(KEY, error, was_needed=True)]


def test_aborts_that_cross_are_answered_once():
    """Each side's abort is the answer to the other's."""
    end = End().pushing(sent=1)
    mine = TransferFailed("mine")
    assert said(end.give_up(mine)) == [Abort(ID, mine, 1)]
    assert end.say(StopSending(ID, TransferFailed("yours"))) == []
    assert end.settle(0) == [EndTransfer(KEY, mine, was_needed=True)]


def test_a_lost_pair_ends_it_when_its_sends_have_settled():
    """The endpoint is being closed; until its sends settle their slots stay in use."""
    end = End().pushing(sent=2)
    assert end.core.link_lost(LINK, GONE, end.now) == []
    end.settle(0, GONE)
    assert end.settle(1, GONE) == [EndTransfer(KEY, GONE, was_needed=True)]
    end.core.check_integrity()


def test_a_prompt_goes_on_while_the_sends_of_a_lost_pair_settle():
    """Its next step is planned as if nobody wanted its KV: the caller does not know the end yet."""
    end = End().granted(num_tokens=8)
    end.span(0, 4)
    end.computed()
    assert len(end.core.frames_of(KEY, 4, 8)) == 3
    end.say(credit(1))
    end.core.link_lost(LINK, GONE, end.now)
    assert end.core.frames_of(KEY, 4, 8) == []
    assert end.span(4, 8) == []
    assert end.computed() == []
    assert end.settle(0, GONE) == [EndTransfer(KEY, GONE, was_needed=True)]


def test_after_done_nothing_can_fail_it():
    """Decode has everything: a cancel or a lost pair comes too late."""
    end = End().pushing(sent=3)
    end.commit()
    assert end.say(Ack(ID, 3, done=True)) == [EndTransfer(KEY, None, was_needed=True)]
    assert end.give_up(TransferFailed("late")) == []
    assert end.core.link_lost(LINK, GONE, end.now) == []
    for frame_idx in range(3):
        assert end.settle(frame_idx, GONE) == []
    assert not end.core.is_live(KEY)


def test_a_failed_send_fails_the_transfer():
    """It is aborted on the wire, and ends when the rest has settled."""
    end = End().pushing(sent=2)
    error = TransferFailed("reset")
    assert said(end.settle(0, error)) == [Abort(ID, error, 2)]
    assert end.settle(1) == [EndTransfer(KEY, error, was_needed=True)]


@pytest.mark.parametrize(
    "message",
    [
        Ack(ID, 3, done=False),  # of frames that were not sent
        Ack(ID, 2, done=True),  # before the commit
        credit(4),  # for frames that do not exist
        Credit(ID, 3, (1, 2)),  # says not where all of them go
        Grant(KEY, TransferId(b"x" * 16), 6, 2000, 0),  # another grant
    ],
)
def test_a_peer_that_breaks_the_rules_loses_this_transfer_only(message: Any):
    """The transfer is aborted as a protocol error; no exception reaches the shell."""
    end = End().pushing(sent=2)
    (effect,) = end.say(message)
    assert isinstance(effect.message.error, RemoteProtocolError)
    end.settle(0)
    (ended,) = end.settle(1)
    assert isinstance(ended.error, RemoteProtocolError)


def test_done_with_too_few_frames_is_no_end():
    """A false "done" after the commit is a violation, not a success."""
    end = End().pushing(sent=2)
    end.commit()
    (effect,) = end.say(Ack(ID, 2, done=True))
    assert isinstance(effect.message.error, RemoteProtocolError)


def test_more_skipped_than_there_is_breaks_the_rules():
    """The grant is aborted under the id it came with."""
    end = End()
    end.begin(num_tokens=4)
    (abort, ended) = end.say(Grant(KEY, ID, 5, 1000, 9))
    assert abort.message.transfer_id == ID
    assert isinstance(ended.error, RemoteProtocolError)


@pytest.mark.parametrize(
    "message", [credit(1), Ack(ID, 1, done=True), StopSending(ID, GONE), Refused(KEY, GONE)]
)
def test_late_messages_are_dropped(message: Any):
    """A transfer that is over cannot be named any more."""
    end = End()
    assert end.say(message) == []


@pytest.mark.parametrize(
    "forged",
    [
        (LinkId(2), Ack(ID, 3, done=True)),  # another decode worker of the mesh
        (LINK, Ack(TransferId(bytes(16)), 3, done=True)),
        (LINK, Refused(KEY._replace(token=LeaseToken(bytes(16))), GONE)),
    ],
)
def test_a_forged_acknowledgement_frees_nothing(forged: tuple[LinkId, Any]):
    """Who cannot name the transfer's id on its own pair, or its token, cannot end it: the blocks
    stay, and the partner's word still counts."""
    end = End().pushing(sent=3)
    end.commit()
    assert end.core.message(*forged, end.now) == []
    assert end.core.is_live(KEY)
    for frame_idx in range(3):
        end.settle(frame_idx)
    assert end.say(Ack(ID, 3, done=True)) != []
    assert not end.core.is_live(KEY)


def test_messages_of_another_link_are_not_listened_to():
    """A peer that guesses a transfer id of another pair does no harm."""
    end = End().pushing(sent=1)
    assert end.core.message(LinkId(2), StopSending(ID, GONE), end.now) == []
    assert end.core.is_live(KEY)


def test_repeated_messages_change_nothing():
    """Grant, credit and ack may come twice."""
    end = End().pushing(sent=2)
    assert end.say(Grant(KEY, ID, 5, 1000, 0)) == []
    assert end.say(credit(2)) == []
    assert end.say(credit(1)) == []
    assert end.say(Ack(ID, 1, done=False)) == []
    assert end.say(Ack(ID, 1, done=False)) == []


def test_an_unanswered_open_times_out_and_then_closes_the_pair():
    """The longest wait for blocks is over and still no answer: that decode worker is broken."""
    end = End()
    end.begin()
    patience_s = SenderTiming().open_s
    assert patience_s > MAX_RESERVE_WAIT_S + ReceiverTiming().open_s
    assert end.core.next_tick_at == end.now + patience_s
    assert end.later(patience_s - 0.1) == []
    (ended,) = end.later(0.1)
    assert isinstance(ended.error, TransferFailed)
    (close,) = end.later(patience_s)
    assert close.link == LINK


def test_a_stall_fails_the_transfer():
    """10 s without any receipt while decode owes one."""
    end = End().pushing(sent=2)
    end.later(9.0)
    end.say(Ack(ID, 1, done=False))
    assert end.later(9.0) == []
    (effect,) = end.later(1.01)
    assert effect.message.error.code == "stalled"


def test_what_moves_over_the_link_shows_that_it_is_slow():
    """A frame that waits behind those of another transfer is not lost; one behind none is."""
    end = End().pushing(sent=1)
    end.core.begin(OTHER, LINK, 4, end.now)
    end.say(Grant(OTHER, OTHER_ID, 6, 2000, 0))
    end.core.span_planned(OTHER, 0, 4, PushMode.LAYERWISE, end.now, is_cached=True)
    end.say(credit(3, of=OTHER_ID))
    for frame_idx in range(3):
        assert end.later(9.0) == []
        end.core.send_settled(OTHER, frame_idx, None, end.now)
    assert end.later(9.0) == []
    stopped, *_ = end.later(1.01)
    assert stopped.message.error.code == "stalled"


def test_a_transfer_that_waits_for_a_slot_is_not_stalled():
    """However long others' frames take: nobody owes it anything."""
    end = End(num_slots=1).pushing(sent=1)
    end.core.begin(OTHER, LINK, 4, end.now)
    end.say(Grant(OTHER, OTHER_ID, 6, 2000, 0))
    end.core.span_planned(OTHER, 0, 4, PushMode.LAYERWISE, end.now, is_cached=True)
    end.core.commit(OTHER, 7, end.now)
    assert end.say(credit(3, of=OTHER_ID)) == []
    assert end.later(9.9) == []
    (sent,) = end.settle(0)
    assert sent.key == OTHER
    assert end.later(9.9) == []


def test_a_large_frame_has_the_time_that_a_slow_link_takes():
    """1 MiB at 1 Mbit/s takes 8 s more than a moment; so does one of an aborted transfer."""
    end = End(rule=LARGE).pushing(sent=1)
    assert end.later(17.9) == []
    (effect,) = end.later(0.2)
    assert effect.message.error.code == "stalled"
    assert end.later(12.9) == []
    (close,) = end.later(0.2)
    assert isinstance(close, CloseLink)


@pytest.mark.parametrize(("took_s", "more_s"), [(0.01, 1.0), (4.0, 8.0)])
def test_a_lost_frame_is_waited_for_as_long_as_others_took(took_s, more_s):
    """A large one has a moment more than a small one where those before it crossed at once, and
    the slowest link's time once one of them took long."""
    end = End(num_slots=1, rule=LARGE).granted(num_tokens=16)
    for start in range(0, 16, 4):
        end.span(start, start + 4, is_cached=True)
    end.say(credit(12))
    for frame_idx in range(11):
        end.now += took_s if frame_idx == 10 else 0.01
        end.settle(frame_idx)
    assert end.later(9.9 + (more_s if more_s > 1 else 0)) == []
    stopped, *_ = end.later(0.2 + more_s)
    assert stopped.message.error.code == "stalled"


def test_few_frames_are_on_their_way_over_a_slow_link():
    """Half as many after each that took more than 2 s, one more after each that took less than 1;
    the slots are another link's meanwhile."""
    end = End(num_slots=4).granted(num_tokens=16)
    end.core.link_up(OTHER_LINK, RULE)
    for start in range(0, 16, 4):
        end.span(start, start + 4, is_cached=True)
    num_sent = len(end.say(credit(12)))
    assert num_sent == 4
    num_then = []
    for frame_idx, later_s in enumerate([2.1, 0.1, 0.1, 0.1, 0.1, 1.5, 0.1]):
        end.now += later_s
        num_then.append(len(end.settle(frame_idx)))
    assert num_then == [0, 0, 0, 1, 2, 1, 1]
    assert end.core.statistics().num_free_slots == 2


def test_the_link_with_the_fewest_slots_sends_next():
    """A transfer over the link that has all of them was ready sooner."""
    end = End(num_slots=3).pushing(sent=3)
    end.core.link_up(OTHER_LINK, RULE)
    third = OTHER._replace(attempt=1)
    for key, link, number in ((OTHER, LINK, 1), (third, OTHER_LINK, 2)):
        end.core.begin(key, link, 4, end.now)
        name = TransferId(bytes([number]) * 16)
        end.core.message(link, Grant(key, name, 6, 2000 * number, 0), end.now)
        end.core.span_planned(key, 0, 4, PushMode.LAYERWISE, end.now, is_cached=True)
        assert end.core.message(link, credit(3, of=name), end.now) == []
    sent = [end.settle(frame_idx)[0].key for frame_idx in range(3)]
    assert sent == [third, OTHER, third]


def test_a_slow_step_is_no_stall():
    """While prefill computes nobody owes anything."""
    end = End().granted()
    end.span(0, 4)
    end.say(credit(3))
    assert end.later(1000.0) == []


@pytest.mark.parametrize("is_committed", [True, False])
def test_credit_may_come_late(is_committed: bool) -> None:
    """The sink's slots may be others', whose steps take long; patience begins with the frames that
    it gives credit for."""
    end = End().granted()
    end.span(0, 4, is_cached=True)
    if is_committed:
        end.core.commit(KEY, 7, end.now)
    assert end.later(1000.0) == []
    end.say(credit(3))
    assert end.later(SenderTiming().stall_s - 0.1) == []
    (effect,) = end.later(0.2)
    assert effect.message.error.code == "stalled"


def test_sends_that_do_not_settle_close_the_pair():
    """5 s after the abort only closing the endpoint is left; it is asked for again and again."""
    end = End().pushing(sent=1)
    end.give_up(TransferFailed("x"))
    assert end.later(4.9) == []
    for _ in range(2):
        (close,) = end.later(5.01)
        assert isinstance(close, CloseLink)


def test_the_callers_mistakes_raise():
    """Spans that do not join, overlap, leave the prompt, or come too early; a premature commit."""
    end = End().granted(num_tokens=4)
    for start, stop in ((1, 4), (0, 5), (0, 0)):
        with pytest.raises(LocalProtocolError):
            end.span(start, stop)
    end.span(0, 2)
    with pytest.raises(LocalProtocolError):
        end.span(2, 4)  # [0, 2) is not computed
    with pytest.raises(LocalProtocolError):
        end.commit()
    end.computed()
    end.span(2, 4)
    end.commit()
    with pytest.raises(LocalProtocolError):
        end.commit()
    with pytest.raises(LocalProtocolError):
        end.begin()
    with pytest.raises(LocalProtocolError):
        end.settle(7)


def test_prefixes_have_at_most_half_of_the_slots() -> None:
    """Two prefixes are pulled and then a prompt is pushed: it finds slots free, whoever came
    first, and every slot comes home."""
    end = End(num_slots=4)
    keys = [TransferKey(RequestId(bytes([i]) * 16), 0, LeaseToken(b"k" * 16)) for i in range(3)]
    ids = [TransferId(bytes([i]) * 16) for i in range(3)]
    sent: list[tuple[TransferKey, int]] = []

    def note(effects: list[Any]) -> None:
        sent.extend((it.key, it.frame.idx) for it in effects if isinstance(it, GatherAndSend))

    for key, transfer_id in zip(keys, ids, strict=True):
        is_prefix = key != keys[2]
        note(end.core.begin(key, LINK, 4, end.now, is_prefix=is_prefix))
        note(end.say(Grant(key, transfer_id, 5, 1000, 0)))
        note(end.core.span_planned(key, 0, 4, PushMode.LAYERWISE, end.now, is_cached=True))
        note(end.core.commit(key, 0, end.now))
        note(end.say(credit(3, of=transfer_id)))
        end.core.check_integrity()
    assert [key for key, _ in sent] == [keys[0], keys[0], keys[2], keys[2]]
    while sent:
        key, idx = sent.pop(0)
        note(end.core.send_settled(key, idx, None, end.now))
        end.core.check_integrity()
        note(end.say(Ack(ids[keys.index(key)], idx + 1, done=idx == 2)))
    assert end.core.statistics().num_free_slots == 4
    assert end.core.statistics().num_transfers == 0


def test_a_prefix_may_end_before_all_tokens() -> None:
    """What the cache has is sent and committed; a prompt must be whole."""
    end = End()
    end.core.begin(KEY, LINK, 4, end.now, is_prefix=True)
    end.span(0, 2, is_cached=True)
    end.commit()
    effects = end.say(Grant(KEY, ID, 5, 1000, 0))
    assert said(effects)[-1] == Commit(ID, 7, LAYERS)
    other = End().granted()
    with pytest.raises(LocalProtocolError):
        other.commit()
