"""Both ends of many transfers against a hostile wire, in every order that Hypothesis thinks of."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shared.errors import InvariantViolated, TransferFailed
from shared.ids import LeaseToken, RequestId
from shared.kv.layout import KvLayout
from shared.transfer.messages import TransferKey
from tests.support.no_fence import take_fence_away
from tests.support.transfer_pair import Choice, TransferPair

PREFILL_BLOCKS = 16
DECODE_BLOCKS = 5
LAYOUT = KvLayout(dtype="uint8", num_layers=2, num_kv_heads=1, head_dim=4)


def a_pair(seed: int, *, receive_slots: int = 2, has_windows: bool = False) -> TransferPair:
    """A pair with far too little of everything."""
    return TransferPair(
        random_bytes=random.Random(seed).randbytes,
        layout=LAYOUT,
        group_bytes=8,
        max_frame_bytes=64 + 32,
        prefill_blocks=PREFILL_BLOCKS,
        decode_blocks=DECODE_BLOCKS,
        block_size=2,
        send_slots=2,
        receive_slots=receive_slots,
        has_windows=has_windows,
    )


def key_of(number: int) -> TransferKey:
    """Attempt 0 of a request."""
    return TransferKey(RequestId(number.to_bytes(16, "little")), 0, LeaseToken(bytes(16)))


def wind_down(pair: TransferPair) -> None:
    """Cancel what is left and let everything settle; then everything must be home, once."""
    for _ in range(100):
        while choices := pair.choices():
            pair.perform(choices[0])
            pair.check()
        for key, job in pair.jobs.items():
            if job.prefill_table is not None:
                pair.abort_prefill(key, TransferFailed("the test is over"))
            if job.decode_end == ["handed over"] and job.decode_table is not None:
                pair.finish(key)
            elif job.decode_table is not None:
                pair.abort_decode(key)
        if not pair.is_connected:
            pair.lose_link(prefill_sees=True, decode_sees=True)
        pair.let_time_pass()
    assert pair.prefill_pool.num_free == PREFILL_BLOCKS
    assert pair.decode_pool.num_free == DECODE_BLOCKS
    assert pair.senders.statistics().num_transfers == 0
    assert pair.senders.statistics().num_free_slots == 2
    received = pair.receivers.statistics()
    assert received.num_live == received.num_settling == received.num_waiting == 0
    for job in pair.jobs.values():
        # Who began it heard the end exactly once; so did who lent it blocks.
        assert len(job.prefill_end) <= 1
        assert len(job.decode_end) <= 1


class SlowWire(RuleBasedStateMachine):
    """Requests come, are cancelled and finish, while data and copies take their time."""

    has_windows = False

    @initialize()
    def start(self) -> None:
        self.pair = a_pair(0, has_windows=self.has_windows)
        self.num_begun = 0
        self.held: set[Choice] = set()

    @rule(
        num_tokens=st.integers(2, 8),
        hit=st.integers(0, 8),
        skip=st.integers(0, 8),
        order=st.sampled_from(["both", "prefill", "decode"]),
    )
    def begin(self, num_tokens: int, hit: int, skip: int, order: str) -> None:
        """A request starts on both ends, or one leg of it comes first."""
        self.num_begun += 1
        key = key_of(self.num_begun)
        if order != "prefill":
            self.pair.reserve(key, num_tokens, min(skip, num_tokens) if skip > 4 else 0)
        if order != "decode":
            self.pair.begin(key, num_tokens, min(hit, num_tokens - 1))

    @rule(which=st.integers(0, 1000), times=st.integers(1, 60))
    def go_on(self, which: int, times: int) -> None:
        """Some of what may happen next happens."""
        for _ in range(times):
            which = which * 1_103_515_245 + 12_345 & 0x7FFFFFFF
            if choices := [choice for choice in self.pair.choices() if choice not in self.held]:
                self.pair.perform(choices[(which >> 8) % len(choices)])
                self.pair.check()

    @rule(num_tokens=st.integers(2, 8), which=st.integers(0, 1000), times=st.integers(20, 100))
    def busy(self, num_tokens: int, which: int, times: int) -> None:
        """A request comes, and a good deal happens."""
        self.begin(num_tokens, 1, 0, "both")
        self.go_on(which, times)

    @rule(which=st.integers(0, 1000))
    def hold(self, which: int) -> None:
        """Data or a copy that is under way will not come through for a long while."""
        slow = [c for c in self.pair.choices() if c[0] in ("gather", "land", "place")]
        if slow:
            self.held.add(slow[which % len(slow)])

    @rule(which=st.integers(0, 1000))
    def abort_amid_copies(self, which: int) -> None:
        """A request is cancelled while its data and copies are slow."""
        self.hold(which)
        self.decode_aborts(which)

    @rule(num_tokens=st.integers(5, 8), which=st.integers(0, 1000), times=st.integers(20, 60))
    def cancelled_and_replaced(self, num_tokens: int, which: int, times: int) -> None:
        """Another request takes the blocks of one whose copies are still under way."""
        self.busy(num_tokens, which, times)
        self.abort_amid_copies(which)
        self.busy(num_tokens, which + 1, 100)

    @rule()
    def let_go(self) -> None:
        """What was held up may happen again."""
        self.held.clear()

    @rule(which=st.integers(0, 100))
    def decode_aborts(self, which: int) -> None:
        """The lease side gives one request up."""
        keys = [key for key, job in self.pair.jobs.items() if job.decode_table is not None]
        if keys:
            self.pair.abort_decode(keys[which % len(keys)])

    @rule(which=st.integers(0, 100))
    def sequence_finishes(self, which: int) -> None:
        """A running sequence ends and its blocks are used again."""
        keys = [
            key
            for key, job in self.pair.jobs.items()
            if job.decode_end == ["handed over"] and job.decode_table is not None
        ]
        if keys:
            self.pair.finish(keys[which % len(keys)])

    @invariant()
    def nothing_is_lost(self) -> None:
        """Slots are accounted for; what runs reads its own KV."""
        if hasattr(self, "pair"):
            self.pair.check()

    def teardown(self) -> None:
        """Everything comes home."""
        if hasattr(self, "pair"):
            wind_down(self.pair)


class HostileWire(SlowWire):
    """Besides, the wire repeats, damages and breaks, and prefill cancels, too."""

    @rule(which=st.integers(0, 100))
    def second_leg(self, which: int) -> None:
        """The leg that was missing comes."""
        jobs = [(k, j) for k, j in self.pair.jobs.items() if not j.prefill_end or not j.decode_end]
        if jobs:
            key, job = jobs[which % len(jobs)]
            if job.decode_table is None and not job.decode_end:
                self.pair.reserve(key, job.num_tokens, 0)
            elif job.prefill_table is None and not job.prefill_end:
                self.pair.begin(key, job.num_tokens, 0)

    @rule(which=st.integers(0, 100), clean=st.booleans())
    def prefill_aborts(self, which: int, clean: bool) -> None:
        """The step loop gives one request up."""
        keys = [key for key, job in self.pair.jobs.items() if job.prefill_table is not None]
        if keys:
            error = None if clean else TransferFailed("cancelled")
            self.pair.abort_prefill(keys[which % len(keys)], error)

    @rule()
    def repeat_command(self) -> None:
        """A command comes twice."""
        self.pair.repeat_command()

    @rule()
    def repeat_reply(self) -> None:
        """A reply comes twice."""
        self.pair.repeat_reply()

    @rule()
    def corrupt(self) -> None:
        """A frame is damaged on its way."""
        self.pair.corrupt_slot()

    @rule(prefill_sees=st.booleans(), decode_sees=st.booleans())
    def lose_link(self, prefill_sees: bool, decode_sees: bool) -> None:
        """The pair breaks; maybe only one end has noticed yet."""
        self.pair.lose_link(prefill_sees=prefill_sees, decode_sees=decode_sees)

    @precondition(lambda self: not self.pair.is_connected)
    @rule()
    def reconnect(self) -> None:
        """Both ends have noticed, their endpoints are closed, and they pair again."""
        self.pair.lose_link(prefill_sees=True, decode_sees=True)
        while not self.pair.is_quiet:
            ends = ("gather", "send_settled", "send_failed", "receive_settled", "receive_cancelled")
            self.pair.perform(next(c for c in self.pair.choices() if c[0] in ends))
        self.pair.connect()

    @rule()
    def time_passes(self) -> None:
        """Somebody's patience ends."""
        self.pair.let_time_pass()


TestHostileWire = HostileWire.TestCase


class HostileWindows(HostileWire):
    """The same where prefill writes decode's slots by itself."""

    has_windows = True


TestHostileWindows = pytest.mark.slow(HostileWindows.TestCase)


class Adversary:
    """A seeded driver for long runs.

    It keeps the pair busy, cancels often, and delays a quarter of all data and copies for as long
    as anything else can happen.
    """

    def __init__(self, seed: int, *, has_windows: bool) -> None:
        self.rng = random.Random(seed)
        self.pair = a_pair(seed, receive_slots=2 + seed % 2, has_windows=has_windows)
        self.seed = seed
        self.slow = ("place", "gather" if has_windows else "land")
        self.num_begun = 0

    def run(self, num_steps: int) -> None:
        """Raises InvariantViolated: somebody read KV that is not theirs."""
        for _ in range(num_steps):
            self._act(self.rng.random())
            self.pair.check()

    def _act(self, dice: float) -> None:
        pair, rng = self.pair, self.rng
        if dice < 0.15:
            self.num_begun += 1
            key, num_tokens = key_of(self.num_begun), rng.randint(3, 8)
            if pair.reserve(key, num_tokens, 0) and not pair.begin(key, num_tokens, 1):
                pair.abort_decode(key)
        elif dice < 0.17:
            if live := [key for key in pair.jobs if pair.receivers.is_live(key)]:
                pair.abort_decode(rng.choice(live))
        elif dice < 0.27:
            running = [
                key
                for key, job in pair.jobs.items()
                if job.decode_end == ["handed over"] and job.decode_table is not None
            ]
            if running:
                pair.finish(running[0])
        elif choices := pair.choices():
            prompt = [choice for choice in choices if not self._is_slow(choice)]
            pair.perform(rng.choice(prompt if prompt and rng.random() < 0.97 else choices))

    def _is_slow(self, choice: Choice) -> bool:
        what, which = choice[0], choice[-1]
        return what in self.slow and isinstance(which, int) and (which * 7919 + self.seed) % 4 == 0


@pytest.mark.parametrize("has_windows", [False, True])
def test_long_runs_with_the_fence_mix_nothing(has_windows: bool):
    """40 seeded runs of 400 events: no foreign KV, and everything comes home."""
    num_handed_over = 0
    for seed in range(40):
        adversary = Adversary(seed, has_windows=has_windows)
        adversary.run(400)
        num_handed_over += adversary.pair.num_handed_over
        wind_down(adversary.pair)
    assert num_handed_over > 40


@pytest.mark.parametrize("has_windows", [False, True])
def test_the_same_runs_without_the_fence_are_caught(
    has_windows: bool, monkeypatch: pytest.MonkeyPatch
):
    """Releasing slots and blocks at once is seen as foreign KV by the very same runs."""
    take_fence_away(monkeypatch)
    caught = 0
    for seed in range(40):
        with contextlib.suppress(InvariantViolated):
            Adversary(seed, has_windows=has_windows).run(400)
            continue
        caught += 1
    assert caught >= 2


@pytest.mark.slow
def test_hypothesis_too_finds_the_missing_fence(monkeypatch: pytest.MonkeyPatch):
    """The state machine above fails without the fence, so it would fail with a broken one."""
    take_fence_away(monkeypatch)

    class NoFence(SlowWire):
        def teardown(self) -> None:
            pass

    search = settings(
        max_examples=500,
        stateful_step_count=40,
        phases=[Phase.generate],  # the shortest example does not matter
        derandomize=True,
        deadline=None,
        database=None,
    )
    with pytest.raises(InvariantViolated, match="foreign KV"):
        run_state_machine_as_test(NoFence, settings=search)
