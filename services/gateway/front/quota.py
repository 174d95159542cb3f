"""How much of a gateway one API key may take: requests a minute, and requests at once.

A request counts once for each of its answers, as everywhere in the gateway: ``n`` answers, or
several prompts, are as many requests. Pure: ``now`` is an argument, in seconds of a clock that
never goes back.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import InvalidRequest, QuotaExceeded

BUSY_RETRY_S = 1.0
"""What a caller with too many requests at once is told to wait: nobody knows when one ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """0 = no limit. requests_per_minute: a minute's worth may come at once, and each comes back
    after its share of a minute (a token bucket)."""

    requests_per_minute: int = 0
    concurrent_requests: int = 0


class Quota:
    """What one key has left. limits: may be replaced while requests run."""

    def __init__(self, limits: KeyLimits) -> None:
        self.limits = limits
        self.num_running = 0
        self._level = float(limits.requests_per_minute)
        self._at = 0.0

    def take(self, now: float, count: int = 1) -> Hold:
        """Let ``count`` requests in, which run until the hold is released.

        Raises QuotaExceeded: not now, with a hint when. InvalidRequest: more than there ever is.
        """
        hold = Hold(self)
        hold.add(now, count)
        return hold

    def spend(self, now: float, count: int, *, num_held: int) -> None:
        """See ``take``; nothing is spent by what is refused. num_held: by the same call, before."""
        rate, at_once = self.limits.requests_per_minute, self.limits.concurrent_requests
        for limit, what in ((rate, "a minute"), (at_once, "at once")):
            if limit and num_held + count > limit:
                raise InvalidRequest(
                    f"this API key may ask for {limit} answers {what}, not for {num_held + count}",
                    param="n",
                )
        if at_once and self.num_running + count > at_once:
            raise QuotaExceeded(
                f"this API key has {self.num_running} requests in progress and may have {at_once}: "
                "wait for one to end",
                code="too_many_concurrent_requests",
                retry_after_s=BUSY_RETRY_S,
            )
        if rate:
            per_s = rate / 60.0
            level = min(float(rate), self._level + max(0.0, now - self._at) * per_s)
            if level < count:
                raise QuotaExceeded(
                    f"this API key may send {rate} requests a minute",
                    code="rate_limit_exceeded",
                    retry_after_s=(count - level) / per_s,
                )
            self._level, self._at = level - count, now
        self.num_running += count


class Hold:
    """The requests of one call, which count as running until ``release``."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._count = 0

    def add(self, now: float, count: int) -> None:
        """Hold ``count`` more. Raises QuotaExceeded, InvalidRequest: see ``Quota.take``."""
        self._quota.spend(now, count, num_held=self._count)
        self._count += count

    def release(self) -> None:
        self._quota.num_running -= self._count
        self._count = 0
