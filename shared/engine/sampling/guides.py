"""Which tokens may come next where answers follow a grammar: found while the step computes.

    compute thread   |===== forward pass of a step =====|= sample =|
    guide thread     |= take tokens, find masks =|

A mask needs the token before it and no logits, so it is there when they are; and a grammar is made
ready from the moment its request arrives. No torch here. An answer's state lies in its ``Guide``:
who has the grammar and the tokens makes it anew, on any worker.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from shared.errors import LocalProtocolError
from shared.grammar import library, matcher
from shared.model_folder import ModelFolder
from shared.step import Guide, StepRow

MAX_READY = 64
"""Grammars that are kept ready: those asked for last."""

_WORD = np.dtype("<i4")


class RowMask(NamedTuple):
    """What one row may choose, as in ``Masks``, and why its grammar says no more."""

    bits: np.ndarray
    failure: str


class Masks(NamedTuple):
    """What a step's guided rows may choose.

    places: which of the step's sampling rows they are, ascending. bits: uint8 ``[len(places),
    vocab_size / 8]``, lines filled up to words of 32 bits; bit i % 8 of byte i // 8 is set if token
    i may come, as some may in each row. failures: by place, why a grammar can say nothing more;
    such a row allows all, and its token is to be dropped.
    """

    places: Sequence[int]
    bits: np.ndarray
    failures: dict[int, str]

    def addresses(self, num_rows: int) -> array[int]:
        """Return where the mask of each sampling row lies, 0 where it has none."""
        found = array("Q", bytes(8 * num_rows))
        begin, length = self.bits.ctypes.data, self.bits.strides[0]
        for line, place in enumerate(self.places):
            found[place] = begin + line * length
        return found

    def by_row(self, rows: Sequence[StepRow]) -> dict[int, RowMask]:
        """Return them by the rows' places in the step, those that sample nothing counted, too."""
        sampling = [idx for idx, row in enumerate(rows) if row.sample is not None]
        return {
            sampling[place]: RowMask(self.bits[line], self.failures.get(place, ""))
            for line, place in enumerate(self.places)
        }


class _Asked(NamedTuple):
    """A guided row. num_tokens: of its answer so far. last: the token before the one to choose."""

    guide: Guide
    num_tokens: int
    last: int


class Guides:
    """The grammars of one engine's answers. ``expect`` is for any thread, ``begin`` for the compute
    thread."""

    def __init__(
        self, read_tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """read_tokenizer: returns a tokenizer.json; called once, when the first grammar comes."""
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._ready: OrderedDict[str, Future[Any]] = OrderedDict()
        self._tokenizer: Any = None  # the compiler's
        # Two threads: a large grammar on its way must not hold up the masks of others.
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="pdmesh-grammar")
        self._finder = ThreadPoolExecutor(1, thread_name_prefix="pdmesh-guide")

    @classmethod
    def of(
        cls, folder: ModelFolder, vocab_size: int, eos_token_ids: Collection[int]
    ) -> Guides | None:
        """Make them for a model; None: its folder has no tokenizer.json."""
        path = folder.file("tokenizer.json")
        if path is None:
            return None
        return cls(lambda: path.read_text("utf-8"), vocab_size, eos_token_ids)

    def expect(self, grammar: str) -> Future[Any]:
        """Make a grammar ready beside the steps. Raises InvalidRequest: there is no library."""
        library()
        return self._begun(grammar)

    def begin(self, rows: Sequence[StepRow]) -> Future[Masks] | None:
        """Begin to find the masks of a step whose tokens are all there; None: nothing is guided."""
        places: list[int] = []
        asked: list[_Asked] = []
        place = 0
        for row in rows:
            if row.sample is None:
                continue
            if row.sample.guide is not None:
                places.append(place)
                asked.append(_Asked(row.sample.guide, row.sample.index, row.token_ids[-1]))
            place += 1
        return self._finder.submit(self._find, places, asked) if asked else None

    def close(self) -> None:
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._finder.shutdown(wait=False, cancel_futures=True)

    def _begun(self, grammar: str) -> Future[Any]:
        with self._lock:
            found = self._ready.get(grammar)
            if found is None:
                found = self._ready[grammar] = self._compiler.submit(self._compile, grammar)
                if len(self._ready) > MAX_READY:
                    self._ready.popitem(last=False)
            else:
                self._ready.move_to_end(grammar)
            return found

    def _compile(self, grammar: str) -> Any:
        if self._tokenizer is None:
            try:
                text = self._read_tokenizer()
            except OSError as error:  # the folder has gone, or there are too many files open
                with self._lock:
                    self._ready.pop(grammar, None)  # the next request looks again
                why = (error.strerror or "unknown error").lower()
                raise ValueError(f"the model's tokenizer cannot be read: {why}") from error
            try:
                self._tokenizer = library().LLTokenizer(
                    text, n_vocab=self._vocab_size, eos_token=self._eos
                )
            except ValueError:
                # It may have more tokens than the model, which has no rows for the last ones, or
                # lack some that end an answer.
                size = library().LLTokenizer(text).vocab_size
                self._tokenizer = library().LLTokenizer(
                    text,
                    n_vocab=max(self._vocab_size, size),
                    eos_token=[token_id for token_id in self._eos if token_id < size] or None,
                )
        return matcher(self._tokenizer, grammar)

    # --- on the guide thread ---------------------------------------------------------------------

    def _find(self, places: Sequence[int], asked: Sequence[_Asked]) -> Masks:
        bits = np.zeros((len(asked), -(-self._vocab_size // 32)), _WORD)
        begin, length = bits.ctypes.data, bits.strides[0]
        failures: dict[int, str] = {}
        for line, (place, one) in enumerate(zip(places, asked, strict=True)):
            try:
                state = self._advanced(one)
            except ValueError as error:  # the library cannot read the model's tokenizer
                failures[place] = str(error)
            else:
                if self._tokenizer.vocab_size <= self._vocab_size:
                    state.unsafe_compute_mask_ptr(begin + line * length, length)
                else:
                    bits[line] = self._cut_mask(state)
                if state.is_error() or not bits[line].any():
                    failures[place] = str(state.stop_reason())
            if place in failures:
                bits[line] = -1
        return Masks(places, bits.view(np.uint8), failures)

    def _cut_mask(self, state: Any) -> np.ndarray:
        """What may come next, without the tokens that the model has not."""
        whole = np.zeros(-(-self._tokenizer.vocab_size // 32), _WORD)
        state.unsafe_compute_mask_ptr(whole.ctypes.data, whole.nbytes)
        octets = whole.view(np.uint8)
        octets[self._vocab_size // 8] &= (1 << self._vocab_size % 8) - 1
        octets[self._vocab_size // 8 + 1 :] = 0
        return whole[: -(-self._vocab_size // 32)]

    def _advanced(self, one: _Asked) -> Any:
        """The state after all ``num_tokens`` tokens."""
        guide = one.guide
        if guide.state is None:
            # Of many that wait for their first step, the first are no longer kept here.
            ready = guide.ready or self._begun(guide.grammar)
            # A copy: the one that is ready stays at its beginning, for the next answer.
            guide.state = ready.result().deep_copy()
            guide.ready = None
            guide.state.consume_tokens(list(guide.output))
            guide.num_taken = len(guide.output)
        if guide.num_taken == one.num_tokens - 1:
            guide.state.consume_token(one.last)
            guide.num_taken = one.num_tokens
        if guide.num_taken != one.num_tokens:
            raise LocalProtocolError(
                f"a grammar that has taken {guide.num_taken} tokens is asked for {one.num_tokens}"
            )
        return guide.state
