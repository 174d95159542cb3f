"""Who could send the beginning of a prompt to whom, and how long that would take (Mooncake,
FAST'25, Algorithm 1: the transfer term of a prefill worker's TTFT). Pure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

from services.gateway.core.worker import Worker
from shared.ids import Incarnation
from shared.predict.transfer import KvLink, TransferTimes

if TYPE_CHECKING:
    from services.gateway.core.index.holdings import Holdings

FIRST_FETCH_S = 0.005
"""What a fetch takes beside its bytes, until one over the same pair was seen: two round trips of
messages, gathering and placing."""

MOST_SOURCES = 4
"""Those that have the most of a prompt; nobody else is looked at."""

_LANE = ""  # fetches are told apart by their ends alone


class Hit(NamedTuple):
    """What one worker has of a prompt's beginning, in tokens.

    tokens: has, or is expected to have. in_pool: the leading ones that lie in HBM, where they can
    be sent from, by what it told, or what was predicted to be computed by now. in_dram, on_ssd:
    lie below, and have to be loaded.
    """

    tokens: int
    in_pool: int = 0
    in_dram: int = 0
    on_ssd: int = 0


NOTHING = Hit(0)


class Fetch(NamedTuple):
    """A source, the prompt's leading tokens that it has, and the predicted seconds until they are
    here."""

    source: Incarnation
    num_tokens: int
    seconds: float


LEAST_FETCH_S = 0.1
"""What every fetch may take: predictions of short ones are not worth much."""


class Fetches(Protocol):
    """What a policy may ask of fetches: for one request."""

    @property
    def most_tokens(self) -> int:
        """What the one that has most of the prompt has of it."""
        ...

    def to(self, sink: Worker) -> Fetch | None:
        """Return the best that could be fetched to this worker; None = nobody has more of the
        prompt and a pair with it."""
        ...


class FetchTimes:
    """How long fetches take: as measured over the pair before, else by the speed that its source
    reports."""

    def __init__(self) -> None:
        self._times = TransferTimes()

    def fetched(
        self, source: Incarnation, sink: Incarnation, *, num_bytes: int, seconds: float
    ) -> None:
        """A prefix has come."""
        self._times.observe(KvLink(source, sink, _LANE), num_bytes, seconds)

    def predict(self, source: Worker, sink: Worker, num_bytes: int) -> float | None:
        """Return seconds, what the source sends to others included; None = there is no pair, or
        its speed is not known."""
        status = source.status
        speed = status.speeds.get(sink.incarnation, 0.0)
        if not speed > 0.0:
            return None
        own_s = self._times.between(source.incarnation, sink.incarnation, num_bytes)
        if own_s is None:
            own_s = FIRST_FETCH_S + num_bytes / speed
        return status.egress_bytes / speed + own_s


class OffersOf:
    """What the workers that have the beginning of one prompt could send (``Fetches``): what lies
    in their pools. What they are going to compute cannot be sent yet: asking for it would cost a
    round trip, and the prompt would be computed in the end.

    at: a worker by its place. cached: what each has of the prompt.
    """

    def __init__(
        self,
        at: Callable[[int], Worker | None],
        cached: Holdings,
        times: FetchTimes,
    ) -> None:
        self._cached = cached
        self._times = times
        usable = (
            (num_tokens, worker)
            for place, num_tokens in cached.by_pool()
            if (worker := at(place)) is not None and worker.is_usable
        )
        self._sources = list(islice(usable, MOST_SOURCES))

    def __bool__(self) -> bool:
        return bool(self._sources)

    @property
    def most_tokens(self) -> int:
        """See ``Fetches``."""
        return self._sources[0][0] if self._sources else 0

    def to(self, sink: Worker) -> Fetch | None:
        """See ``Fetches``."""
        own = self._cached.num_tokens(sink.place)
        best: Fetch | None = None
        for num_tokens, source in self._sources:
            # Most comes first. Who has less is never preferred for speed: only of those that have
            # equally much the quickest is taken.
            if num_tokens <= own or (best is not None and num_tokens < best.num_tokens):
                break
            if source is sink:
                continue
            num_bytes = (num_tokens - own) * sink.layout.token_bytes
            seconds = self._times.predict(source, sink, num_bytes)
            if seconds is not None and (best is None or seconds < best.seconds):
                best = Fetch(source.incarnation, num_tokens, seconds)
        return best

    def missing(self, sink: Worker) -> Worker | None:
        """Return who has most of the prompt, more than this worker, and no pair with it."""
        if not self._sources:
            return None
        num_tokens, source = self._sources[0]
        if source is sink or num_tokens <= self._cached.num_tokens(sink.place):
            return None
        return None if sink.incarnation in source.status.paired else source
