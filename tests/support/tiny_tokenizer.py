"""A byte-level BPE tokenizer small enough to read: 8 special tokens, 256 bytes, and a few
merges."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.grammars import Grammars
from services.gateway.text.text_model import TextModel
from shared.model_folder import SpecialTokens
from tests.support.grammars import check_in_place

SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>", "<system>", "<tool>", "<a>", "<b>")
EOS = 1
VOCAB_SIZE = 300  # a few rows more than the tokenizer knows, as real models have

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

_MERGES = ("t h", "th e", "i n", "a n", "an d", "Ġ the", "Ġ a", "e r", "l l", "o n")

NUM_TOKENS = len(SPECIAL) + 256 + len(_MERGES)


def tiny_tokenizer() -> Tokenizer:
    """Return a fresh tokenizer; ids: special tokens, bytes in the alphabet's order, merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    merges: list[tuple[str, str]] = []
    for merge in _MERGES:
        left, right = merge.split()
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def tiny_text_model(template: str | None = TEMPLATE) -> TextModel:
    """Return a TextModel over the tiny tokenizer."""
    chat_template = None if template is None else tiny_template(template)
    return TextModel(tiny_tokenizer(), chat_template, grammars=Grammars(check_in_place))


@cache
def tiny_template(template: str) -> ChatTemplate:
    """Return a template, compiled once for all: that takes longer than most answers."""
    return ChatTemplate(template, SpecialTokens(eos="<eos>"))
