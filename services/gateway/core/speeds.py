"""How fast the workers are, by what they report of their own steps: the ``Predictor`` of
``overload.py``. A worker whose predictions have not come true lately predicts nothing. Pure."""

from __future__ import annotations

from services.gateway.core.worker import Worker


class ReportedSpeeds:
    """All workers' speeds; keeps nothing of its own."""

    def queue_s(self, worker: Worker, now: float) -> float:
        """See ``Predictor``."""
        return sum(worker.wait_s(now)) if worker.is_predictable else 0.0

    def prompt_s(self, worker: Worker, num_tokens: int, num_cached: int = 0) -> float:
        """See ``Predictor``: its last token is always computed."""
        if not worker.is_predictable:
            return 0.0
        status = worker.status
        num_cached = min(num_cached, num_tokens - 1)
        return status.prompt_steps.prompt_seconds(num_cached, num_tokens, status.step_tokens)

    def step_s(self, worker: Worker, num_answers: int) -> float:
        """See ``Predictor``: one token each, with as much context as those that it holds have."""
        steps = worker.status.answer_steps
        if not steps.is_known:
            return 0.0
        context = worker.reserved_tokens / worker.num_answers if worker.num_answers else 0.0
        return steps.seconds(num_answers, round(num_answers * context))
