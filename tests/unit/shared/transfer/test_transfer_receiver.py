"""Decode's end of a transfer: whole effect lists for every turn it can take."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from shared.errors import (
    InvariantViolated,
    LeaseLost,
    LocalProtocolError,
    NoBlocks,
    Overloaded,
    RemoteProtocolError,
    TransferFailed,
    WorkerLost,
)
from shared.ids import Incarnation, LeaseToken, RequestId, TransferId
from shared.kv.layout import KvLayout
from shared.transfer import receivers
from shared.transfer.effects import (
    AskTerms,
    CancelReceive,
    CloseLink,
    EndLeases,
    HandOver,
    QuarantineLease,
    ReleaseLease,
    ReportFailure,
    SendReply,
    VerifyAndPlace,
)
from shared.transfer.messages import (
    Abort,
    Ack,
    Commit,
    Credit,
    LinkId,
    Open,
    Refused,
    Span,
    TransferKey,
)
from shared.transfer.plan import MAX_FRAMES, FrameRule
from shared.transfer.receivers import MAX_ENDED, Receivers, TagRanges
from tests.support.no_fence import take_fence_away

LINK, OTHER_LINK = LinkId(1), LinkId(2)
US, THEM = Incarnation(1), Incarnation(2)
KEY = TransferKey(RequestId(b"r" * 16), 0, LeaseToken(b"k" * 16))
OTHER = TransferKey(RequestId(b"s" * 16), 0, KEY.token)
RULE = FrameRule(
    layout=KvLayout(dtype="uint8", num_layers=3, num_kv_heads=1, head_dim=4),
    group_bytes=1,
    max_frame_bytes=64 + 64,
)
LARGE = FrameRule(
    layout=KvLayout(dtype="uint8", num_layers=3, num_kv_heads=1, head_dim=1 << 17), group_bytes=1
)
GONE = WorkerLost("gone")
BAD = TransferFailed("damaged", code="frame_digest")


class End:
    """All receivers of one process, with time in its hand."""

    def __init__(self, num_slots: int = 8, rule: FrameRule = RULE, **options: Any) -> None:
        rng = random.Random(1)
        self.core = Receivers(
            num_slots=num_slots,
            tags=TagRanges(rng.randbytes),
            random_bytes=rng.randbytes,
            **options,
        )
        self.core.link_up(LINK, US, rule)
        self.now = 100.0
        self.id = TransferId(b"")
        self.tag_base = 0

    def granted(self, num_tokens: int = 4, skip: int = 0, key: TransferKey = KEY) -> End:
        assert self.open(key) == [AskTerms(key, US)]
        (effect,) = self.core.attached(key, num_tokens, skip, self.now)
        self.id, self.tag_base = effect.message.transfer_id, effect.message.tag_base
        return self

    def receiving(self, num_tokens: int = 4) -> End:
        """Granted, and one span of all tokens announced: three frames of one layer each."""
        self.granted(num_tokens)
        self.say(Span(self.id, 0, num_tokens))
        return self

    def announced(self, *starts: int) -> End:
        """Spans of four tokens, and all of them computed."""
        for start in starts:
            self.say(Span(self.id, start, start + 4))
        self.say(Commit(self.id, 7, 3 * len(starts)))
        return self

    def open(self, key: TransferKey = KEY, link: LinkId = LINK) -> list[Any]:
        return self.core.message(link, Open(key), self.now)

    def say(self, message: Any) -> list[Any]:
        return self.core.message(LINK, message, self.now)

    def arrive(self, frame_idx: int, error: Any = None, key: TransferKey = KEY) -> list[Any]:
        return self.core.receive_settled(key, frame_idx, error, self.now)

    def place(self, frame_idx: int, error: Any = None, key: TransferKey = KEY) -> list[Any]:
        return self.core.frame_placed(key, frame_idx, error, self.now)

    def come(self, frame_idx: int) -> list[Any]:
        """Arrive and be placed."""
        (order,) = self.arrive(frame_idx)
        assert isinstance(order, VerifyAndPlace)
        return self.place(frame_idx)

    def abort(self) -> list[Any]:
        return self.core.give_up(KEY, TransferFailed("cancelled"), self.now)

    def later(self, seconds: float) -> list[Any]:
        self.now += seconds
        return self.core.tick(self.now)

    @property
    def free_slots(self) -> int:
        self.core.check_integrity()
        return self.core.statistics().num_free_slots


def kinds(effects: list[Any]) -> list[str]:
    """Names of effects; for replies the name of the message."""
    return [type(e.message if isinstance(e, SendReply) else e).__name__ for e in effects]


@pytest.mark.parametrize(("took_s", "more_s"), [(0.01, 1.0), (4.0, 8.0)])
def test_a_lost_frame_is_waited_for_as_long_as_others_took(took_s, more_s):
    """As at the source: a moment more than a small one, or what the slowest link takes."""
    end = End(rule=LARGE).granted(num_tokens=16).announced(0, 4, 8, 12)
    for frame_idx in range(11):
        end.now += took_s if frame_idx == 10 else 0.01
        end.come(frame_idx)
    assert end.later(29.9 + (more_s if more_s > 1 else 0)) == []
    assert end.later(1.2) != []


def test_a_whole_transfer():
    """Open, grant, span, receives, credit, arrival, receipts in frame order, commit, hand-over."""
    end = End()
    assert end.open() == [AskTerms(KEY, US)]
    (granting,) = end.core.attached(KEY, 4, 0, end.now)
    grant = granting.message
    assert (grant.key, grant.epoch, grant.skip_tokens) == (KEY, 1, 0)
    end.now += 1
    *posts, credit = end.say(Span(grant.transfer_id, 0, 4))
    assert [(p.frame.idx, p.tag) for p in posts] == [(i, grant.tag_base + i) for i in range(3)]
    assert len({post.slot for post in posts}) == 3
    assert credit == SendReply(
        LINK, Credit(grant.transfer_id, 3, tuple(post.slot for post in posts))
    )
    end.now += 1
    (order,) = end.arrive(1)
    assert order == VerifyAndPlace(KEY, grant.transfer_id, 1, posts[1].frame, posts[1].slot)
    assert end.place(1) == []  # frame 0 is not placed
    assert end.say(Commit(grant.transfer_id, 7, 3)) == []
    assert end.come(0) == [SendReply(LINK, Ack(grant.transfer_id, 2, done=False))]
    hand_over, done = end.come(2)
    assert done == SendReply(LINK, Ack(grant.transfer_id, 3, done=True))
    num_bytes = sum(post.frame.num_bytes for post in posts)
    assert hand_over == HandOver(KEY, 7, num_bytes, 3, 1.0, 4)
    assert not end.core.is_live(KEY)
    assert end.free_slots == 8


def test_the_commit_may_be_last():
    """All frames are here before the commit: it completes the transfer."""
    end = End().receiving()
    for frame_idx in range(3):
        end.come(frame_idx)
    assert kinds(end.say(Commit(end.id, 7, 3))) == ["HandOver", "Ack"]


def test_a_prompt_that_is_all_cached_needs_no_frame():
    """Skip everything: the commit alone hands over."""
    end = End().granted(skip=4)
    assert end.say(Span(end.id, 0, 4)) == []
    assert kinds(end.say(Commit(end.id, 7, 0))) == ["HandOver", "Ack"]


def test_an_open_waits_for_its_reservation_and_not_for_ever():
    """Either leg may come first; after 5 s without a reservation prefill is refused."""
    end = End()
    assert end.open() == [AskTerms(KEY, US)]
    end.core.must_wait(KEY, end.now, is_reserved=False)
    assert end.open() == []  # a repetition
    assert end.core.is_waiting(KEY)
    assert end.later(4.9) == []
    (effect,) = end.later(0.1)
    assert isinstance(effect.message, Refused)
    assert isinstance(effect.message.error, LeaseLost)
    assert not end.core.is_waiting(KEY)
    assert end.core.lease_changed(KEY, end.now) == []
    with pytest.raises(LocalProtocolError):
        end.core.attached(KEY, 4, 0, end.now)


@pytest.mark.parametrize("link", [LINK, OTHER_LINK])
def test_an_open_without_the_leases_token_gets_nothing_and_hinders_nobody(link: LinkId):
    """It knows the request and the attempt, and comes first: it waits for a reservation that there
    is not, while the lease's partner is granted."""
    end = End()
    end.core.link_up(OTHER_LINK, THEM, RULE)
    forged = KEY._replace(token=LeaseToken(bytes(16)))
    assert kinds(end.open(forged, link)) == ["AskTerms"]
    end.core.must_wait(forged, end.now, is_reserved=False)
    assert end.open() == [AskTerms(KEY, US)]
    assert kinds(end.core.attached(KEY, 4, 0, end.now)) == ["Grant"]
    (effect,) = end.later(5.0)
    assert (effect.link, effect.message.key) == (link, forged)
    assert isinstance(effect.message.error, LeaseLost)
    assert end.core.is_live(KEY)


def test_an_open_waits_as_long_as_its_reservation_waits_for_room():
    """Once it is reserved there is no clock; the lease side is asked again when it says so."""
    end = End()
    end.open()
    end.core.must_wait(KEY, end.now, is_reserved=True)
    assert end.later(1000.0) == []
    assert end.core.next_tick_at is None
    assert end.core.lease_changed(KEY, end.now) == [AskTerms(KEY, US)]
    assert len(end.core.attached(KEY, 4, 0, end.now)) == 1


def test_an_open_whose_reservation_is_gone_has_five_seconds_again():
    """However the lease side lost it: no open is kept for ever."""
    end = End()
    end.open()
    end.core.must_wait(KEY, end.now, is_reserved=True)
    end.later(1000.0)
    end.core.must_wait(KEY, end.now, is_reserved=False)
    assert end.later(4.9) == []
    assert kinds(end.later(0.1)) == ["Refused"]


def test_opens_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch):
    """A peer cannot fill the memory with transfers that nobody reserves for."""
    monkeypatch.setattr(receivers, "MAX_WAITING", 1)
    end = End()
    end.open()
    (effect,) = end.open(OTHER)
    assert isinstance(effect.message.error, Overloaded)
    assert end.core.is_waiting(KEY)


@pytest.mark.parametrize("is_granted", [False, True])
def test_a_transfer_is_opened_on_one_pair(is_granted: bool):
    """A second opener is refused at once, and the first one keeps what it has."""
    end = End()
    end.granted() if is_granted else end.open()
    end.core.link_up(OTHER_LINK, THEM, RULE)
    (effect,) = end.open(link=OTHER_LINK)
    assert effect.link == OTHER_LINK
    assert isinstance(effect.message.error, RemoteProtocolError)
    assert end.core.is_live(KEY) if is_granted else end.core.is_waiting(KEY)


def test_an_attempt_that_is_opened_anew_while_it_ends_is_refused():
    """Its source has ended the first one, and would wait for an answer; a gateway may order an
    attempt twice."""
    end = End().receiving()
    assert end.open() == []  # said twice
    end.abort()
    end.say(Abort(end.id, None, frames=1))
    (effect,) = end.open()
    assert isinstance(effect.message, Refused)
    for frame_idx in range(3):
        effects = end.arrive(frame_idx)
    assert effects == [ReleaseLease(KEY)]


def test_a_refusal_carries_the_lease_sides_reason():
    """And nothing is kept."""
    end = End()
    end.open()
    no = NoBlocks("full")
    assert end.core.refused(KEY, no, end.now) == [SendReply(LINK, Refused(KEY, no))]
    assert end.core.refused(KEY, no, end.now) == []


def test_an_open_that_comes_after_its_reservations_end_is_refused_at_once():
    """With the reason, and once: neither end waits for what will not come; few are remembered."""
    end = End()
    assert end.abort() == []
    (effect,) = end.open()
    assert isinstance(effect.message, Refused)
    assert isinstance(effect.message.error, TransferFailed)
    assert end.open() == [AskTerms(KEY, US)]
    for number in range(MAX_ENDED + 1):
        key = KEY._replace(request_id=RequestId(b"%16d" % number))
        end.core.give_up(key, NoBlocks("full"), end.now)
    oldest, newest = (
        KEY._replace(request_id=RequestId(b"%16d" % number)) for number in (0, MAX_ENDED)
    )
    assert kinds(end.open(oldest)) == ["AskTerms"]
    assert kinds(end.open(newest)) == ["Refused"]


def test_the_link_with_the_fewest_slots_gets_the_next():
    """A source's third transfer has waited longer, but its first two have all slots."""
    end = End(num_slots=4, window=2)
    keys = [KEY._replace(request_id=RequestId(b"%16d" % number)) for number in range(3)]
    for key in keys:
        end.granted(key=key).announced(0)
    end.core.link_up(OTHER_LINK, THEM, RULE)
    end.open(OTHER, OTHER_LINK)
    (grant,) = end.core.attached(OTHER, 4, 0, end.now)
    for word in (Span(grant.message.transfer_id, 0, 4), Commit(grant.message.transfer_id, 7, 3)):
        assert end.core.message(OTHER_LINK, word, end.now) == []
    posted: list[TransferKey] = []
    for key, frame_idx in ((keys[0], 0), (keys[1], 0), (OTHER, 0), (keys[0], 1)):
        end.arrive(frame_idx, key=key)
        effects = end.place(frame_idx, key=key)
        posted += [it.key for it in effects if type(it).__name__ == "PostReceive"]
    assert posted == [OTHER, OTHER, OTHER, keys[2]]


def test_over_a_slow_link_a_transfer_holds_few_slots():
    """After a frame that took long it posts no more until it has half as many, and one more with
    each that is quick."""
    end = End(num_slots=8).granted(num_tokens=16).announced(0, 4, 8, 12)
    assert end.free_slots == 0
    end.later(3.0)
    came = [end.arrive(frame_idx) + end.place(frame_idx) for frame_idx in range(5)]
    num_posted = [kinds(effects).count("PostReceive") for effects in came]
    assert num_posted == [0, 0, 1, 2, 1]  # of 4, 5, 6, 7 and 8 that it may hold


def test_cancelling_a_waiting_open_refuses_it():
    """The lease side's cancel works before the grant, too."""
    end = End()
    end.open()
    assert kinds(end.abort()) == ["Refused"]
    assert end.abort() == []


def test_slots_go_round_within_a_window():
    """Two transfers share four slots; neither holds more than its window."""
    end = End(num_slots=4, window=3)
    end.granted()
    first = end.id
    posts = end.say(Span(first, 0, 4))
    assert kinds(posts) == ["PostReceive"] * 3 + ["Credit"]
    end.granted(key=OTHER)
    second = end.id
    assert end.say(Span(second, 0, 4)) == []
    posts = end.say(Commit(second, 7, 3))
    assert [(p.key, p.frame.idx) for p in posts[:-1]] == [(OTHER, 0)]
    assert posts[-1].message == Credit(second, 1, (posts[0].slot,))
    end.arrive(0)
    ack, post, credit = end.place(0)
    assert ack.message == Ack(first, 1, done=False)
    assert (post.key, post.frame.idx) == (OTHER, 1)  # it has waited longest
    assert credit.message == Credit(second, 2, (post.slot,))
    assert end.free_slots == 0


def test_a_local_abort_waits_for_what_prefill_has_sent():
    """Receives are not cancelled before prefill says which frames are coming: those land."""
    end = End().receiving()
    assert kinds(end.abort()) == ["StopSending", "QuarantineLease"]
    assert end.abort() == []
    assert end.say(Abort(end.id, None, frames=1)) == [CancelReceive(KEY, 1), CancelReceive(KEY, 2)]
    assert end.free_slots == 5
    assert end.arrive(1, GONE) == []
    assert end.arrive(2, GONE) == []
    assert end.free_slots == 7
    assert end.arrive(0) == [ReleaseLease(KEY)]  # it landed, and is thrown away
    assert end.free_slots == 8
    assert not end.core.is_live(KEY)


def test_blocks_stay_fenced_while_a_copy_runs():
    """A frame that is being placed writes into the blocks: they are not free before it ends."""
    end = End().receiving()
    end.arrive(0)
    end.say(Abort(end.id, None, frames=1))
    end.arrive(1, GONE)
    assert end.arrive(2, GONE) == []
    assert end.free_slots == 7
    assert end.place(0) == [ReleaseLease(KEY)]


def test_an_abort_of_prefill_is_reported_unless_it_is_clean():
    """A clean end releases the lease without an error; a failure is told to the lease side."""
    clean = End().granted()
    assert clean.say(Abort(clean.id, None)) == [ReleaseLease(KEY)]
    failed = End().granted()
    error = TransferFailed("engine")
    assert failed.say(Abort(failed.id, error)) == [ReportFailure(KEY, error), ReleaseLease(KEY)]


def test_a_lost_pair_fails_its_transfers_and_forgets_its_opens():
    """The lease side hears of it at once; posted receives settle as the endpoint closes, and then
    the blocks are free."""
    end = End().receiving()
    end.open(OTHER)
    effects = end.core.link_lost(LINK, GONE, end.now)
    assert effects == [ReportFailure(KEY, GONE), QuarantineLease(KEY), EndLeases(US, GONE)]
    assert not end.core.is_waiting(OTHER)
    assert end.open(OTHER) == []
    end.arrive(0, GONE)
    end.arrive(1, GONE)
    assert end.arrive(2, GONE) == [ReleaseLease(KEY)]


def test_a_worker_that_has_another_pair_is_not_lost():
    """It dialled again before we saw its first pair end: its leases may come over the new one."""
    end = End()
    end.core.link_up(OTHER_LINK, US, RULE)
    assert end.core.link_lost(LINK, GONE, end.now) == []
    assert end.core.link_lost(OTHER_LINK, GONE, end.now) == [EndLeases(US, GONE)]


def test_a_damaged_frame_fails_the_transfer():
    """Nothing of it is acknowledged, prefill is told, the lease side, too."""
    end = End().receiving()
    end.arrive(0)
    assert kinds(end.place(0, BAD)) == ["StopSending", "ReportFailure", "QuarantineLease"]
    assert end.arrive(1) == []  # what lands now is thrown away


def test_a_frame_that_is_lost_fails_the_transfer():
    """A receive that fails without being cancelled."""
    end = End().receiving()
    assert kinds(end.arrive(0, GONE)) == ["StopSending", "ReportFailure", "QuarantineLease"]


def test_what_does_not_settle_closes_the_pair():
    """After 5 s the endpoint is closed; the blocks stay quarantined until that has helped."""
    end = End().receiving()
    end.abort()
    assert end.later(4.9) == []
    for _ in range(2):
        (close,) = end.later(5.01)
        assert isinstance(close, CloseLink)
    assert end.core.is_live(KEY)
    end.core.link_lost(LINK, GONE, end.now)
    for frame_idx in range(3):
        effects = end.arrive(frame_idx, GONE)
    assert effects == [ReleaseLease(KEY)]


@pytest.mark.parametrize("word", ["the next span", "commit"])
def test_a_frame_that_never_comes_fails_the_transfer(word: str):
    """30 s of silence on a posted frame whose KV is computed, as its source has said, though the
    peer lives."""
    end = End().granted(num_tokens=8)
    end.say(Span(end.id, 0, 4))
    end.say(Span(end.id, 4, 8))
    if word == "commit":
        for frame_idx in range(3):
            end.come(frame_idx)
        end.later(1000.0)
        end.say(Commit(end.id, 7, 6))
    end.later(29.0)
    end.come(0 if word == "the next span" else 3)
    assert end.later(29.0) == []
    assert kinds(end.later(1.01)) == ["StopSending", "ReportFailure", "QuarantineLease"]


def test_a_step_may_take_as_long_as_it_likes():
    """A frame that is announced may still be computed, the first one or any after it."""
    end = End().receiving(num_tokens=8)
    for frame_idx in range(3):
        assert end.later(1e6) == []
        end.come(frame_idx)


def test_what_is_not_computed_yet_leaves_slots_free():
    """A link keeps one of four free, which go at once to frames that can come at once."""
    end = End(num_slots=8, window=8).granted(num_tokens=16)
    end.say(Span(end.id, 0, 4))
    end.say(Span(end.id, 4, 8))
    slow = KEY._replace(attempt=1)
    end.granted(key=slow).say(Span(end.id, 0, 4))
    assert end.free_slots == 2
    end.core.link_up(OTHER_LINK, THEM, RULE)
    end.open(OTHER, OTHER_LINK)
    (grant,) = end.core.attached(OTHER, 4, 0, end.now)
    posts = end.core.message(OTHER_LINK, Span(grant.message.transfer_id, 0, 4), end.now)
    assert kinds(posts) == ["PostReceive", "Credit"]
    assert kinds(end.say(Commit(end.id, 7, 3))) == ["PostReceive", "Credit"]


def test_nobody_waits_for_a_prompt_that_queues():
    """Before a span is announced there is no timer: prefill's heartbeats speak for it."""
    end = End().granted()
    assert end.later(1e6) == []


def broken(end: End) -> list[Any]:
    """Messages that break the rules, for a transfer of 4 tokens with [0, 2) announced."""
    return [
        Span(end.id, 1, 3),  # overlaps
        Span(end.id, 3, 4),  # leaves a hole
        Span(end.id, 2, 5),  # beyond the prompt
        Span(end.id, 2, 2),  # empty
        Commit(end.id, 7, 3),  # not everything is announced
    ]


@pytest.mark.parametrize("which", range(5))
def test_a_peer_that_breaks_the_rules_loses_this_transfer_only(which: int):
    """It is aborted as a protocol error, and the lease side hears why."""
    end = End().granted()
    end.say(Span(end.id, 0, 2))
    abort, report, *_ = end.say(broken(end)[which])
    assert isinstance(abort.message.error, RemoteProtocolError)
    assert isinstance(report.error, RemoteProtocolError)


@pytest.mark.parametrize("num_frames", [2, 4])
def test_both_ends_must_count_the_same_frames(num_frames: int):
    """A commit with another count is a violation."""
    end = End().receiving()
    assert kinds(end.say(Commit(end.id, 7, num_frames)))[:2] == ["StopSending", "ReportFailure"]


def test_a_commit_before_any_span_breaks_the_rules():
    """So the table says: RESERVED knows no commit."""
    end = End().granted()
    assert kinds(end.say(Commit(end.id, 7, 0))) == ["StopSending", "ReportFailure", "ReleaseLease"]


def test_repeated_messages_change_nothing():
    """The last span and the commit may come twice; a new span after the commit may not."""
    end = End().receiving()
    assert end.say(Span(end.id, 0, 4)) == []
    assert end.say(Commit(end.id, 7, 3)) == []
    assert end.say(Commit(end.id, 7, 3)) == []
    assert end.say(Span(end.id, 0, 4)) == []
    assert kinds(end.say(Commit(end.id, 8, 3)))[:1] == ["StopSending"]


def test_late_and_foreign_messages_are_dropped():
    """A transfer that is over, or another link's, cannot be named."""
    end = End().granted()
    assert end.core.message(OTHER_LINK, Abort(end.id, GONE), end.now) == []
    assert end.say(Commit(TransferId(b"?" * 16), 7, 0)) == []
    assert end.core.is_live(KEY)


def test_tags_are_never_reused():
    """Every transfer has its own range, from a random start."""
    end = End()
    bases = []
    for number in range(50):
        end.granted(key=TransferKey(RequestId(number.to_bytes(16, "little")), 0, KEY.token))
        bases.append(end.tag_base)
    assert all(b - a == MAX_FRAMES for a, b in itertools.pairwise(bases))
    assert bases[-1] + MAX_FRAMES < 1 << 64
    assert TagRanges(random.Random(2).randbytes).take() != bases[0]


def test_epochs_grow():
    """A later grant has a greater epoch than every earlier one."""
    end = End()
    end.open()
    (first,) = end.core.attached(KEY, 4, 0, end.now)
    end.open(OTHER)
    (second,) = end.core.attached(OTHER, 4, 0, end.now)
    assert second.message.epoch > first.message.epoch
    assert second.message.transfer_id != first.message.transfer_id


def test_an_operation_that_settles_twice_is_our_bug():
    """With the fence, nothing can settle after its transfer is over."""
    end = End().receiving()
    end.come(0)
    with pytest.raises(LocalProtocolError):
        end.arrive(0)
    with pytest.raises(LocalProtocolError):
        end.place(0, key=OTHER)


def test_the_integrity_check_sees_a_lost_slot():
    """The arithmetic stands in the message."""
    end = End()
    end.core._free_slots.pop()
    with pytest.raises(InvariantViolated, match="8 slots != 7 free"):
        end.core.check_integrity()


def test_without_the_fence_everything_is_free_at_once(monkeypatch: pytest.MonkeyPatch):
    """The mistake that the safety tests must see."""
    take_fence_away(monkeypatch)
    end = End().receiving()
    end.arrive(0)
    assert kinds(end.abort()) == ["StopSending", "CancelReceive", "CancelReceive", "ReleaseLease"]
    assert end.free_slots == 8
    assert end.place(0) == end.arrive(1) == []


def test_a_prefix_may_end_before_all_tokens() -> None:
    """The source had less than was asked for: so many tokens are handed over, and no more."""
    end = End()
    end.core.message(LINK, Open(KEY), end.now)
    (granting,) = end.core.attached(KEY, 4, 0, end.now, is_prefix=True)
    transfer_id = granting.message.transfer_id
    end.say(Span(transfer_id, 0, 2))
    for idx in range(3):
        end.come(idx)
    effects = end.say(Commit(transfer_id, 0, 3))
    (hand_over,) = (it for it in effects if isinstance(it, HandOver))
    assert (hand_over.num_tokens, hand_over.num_frames) == (2, 3)
