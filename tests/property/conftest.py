"""Hypothesis profiles: ``HYPOTHESIS_PROFILE=thorough make test-all`` searches longer."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_COMMON = settings(
    deadline=None,  # tests never depend on speed
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.register_profile("default", _COMMON, max_examples=120, stateful_step_count=40)
settings.register_profile("thorough", _COMMON, max_examples=600, stateful_step_count=80)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
