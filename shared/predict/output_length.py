"""How long answers become: running quantiles by tenant and length of the prompt.

What an answer's real length will be is nobody's to know before its end: only answers that ended
are looked at.
"""

from __future__ import annotations

from collections import OrderedDict

from shared.predict.quantiles import RunningQuantiles

MAX_TENANTS = 1024
"""Tenants that are remembered; of more the one that was silent longest is forgotten."""

_SIZE = 256
"""The last answers that count, of each tenant and bucket."""

_LEAST = 8
"""Fewer answers than this say nothing: a wider group is asked."""


class _Tenant:
    def __init__(self) -> None:
        self.all = RunningQuantiles(_SIZE)
        self.by_bucket: dict[int, RunningQuantiles] = {}

    def add(self, bucket: int, num_tokens: int) -> None:
        self.all.add(num_tokens)
        self.by_bucket.setdefault(bucket, RunningQuantiles(_SIZE)).add(num_tokens)


class OutputLengths:
    """Quantiles of answers' lengths. Prompts of 2^k up to 2^(k+1) tokens share a bucket."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._everybody = _Tenant()

    def __len__(self) -> int:
        return len(self._tenants)

    def ended(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Take in a whole answer. tenant: '' = of nobody in particular."""
        bucket = num_prompt_tokens.bit_length()
        self._everybody.add(bucket, num_output_tokens)
        if not tenant:
            return
        of_tenant = self._tenants.pop(tenant, None) or _Tenant()
        self._tenants[tenant] = of_tenant
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        of_tenant.add(bucket, num_output_tokens)

    def quantile(self, tenant: str, num_prompt_tokens: int, share: float) -> float | None:
        """Return how long the shorter ``share`` of such answers are at most: of this tenant and
        bucket, else of everybody's bucket, else of the tenant, else of all; None = too few have
        ended."""
        bucket = num_prompt_tokens.bit_length()
        of_tenant = self._tenants.get(tenant)
        everybody = self._everybody
        for known in (
            of_tenant and of_tenant.by_bucket.get(bucket),
            everybody.by_bucket.get(bucket),
            of_tenant and of_tenant.all,
            everybody.all,
        ):
            if known is not None and len(known) >= _LEAST:
                return known.quantile(share)
        return None
