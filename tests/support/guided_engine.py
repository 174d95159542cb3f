"""Engines whose answers follow grammars over the tiny tokenizer."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from shared.engine.fake import FakeEngine
from shared.engine.sampling.guides import Guides
from tests.support.tiny_tokenizer import tiny_tokenizer


def tiny_guides(vocab_size: int, eos: tuple[int, ...]) -> Guides:
    """Guides over the tiny tokenizer."""
    return Guides(lambda: tiny_tokenizer().to_str(), vocab_size, eos)


class GuidedFakeEngine(FakeEngine):
    """The fake engine with the tiny tokenizer, so that its answers may follow grammars."""

    def __init__(self, **settings: Any) -> None:
        model = settings["model"]
        super().__init__(**settings, guides=tiny_guides(model.vocab_size, model.eos_token_ids))

    def expect(self, grammar: str) -> Future[Any]:
        """At once: a compiler's thread knows no virtual time."""
        ready = super().expect(grammar)
        ready.result()
        return ready
