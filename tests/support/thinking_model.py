"""A model that thinks first, in a few hundred kB: what it says next follows from its last token
alone, so that real workers write thinking, calls and answers word for word.

Embeddings are unit vectors, attention and MLP add nothing, and the head says which token follows
which. Where a grammar forbids what follows, it closes what is open.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ARGUMENTS = '{"city": "Paris"}'
THOUGHT = "Let me think about it."
ANSWER = "The answer is 42."

_THINKING = ("<think>", "\nLet me", " think about", " it.", "</think>", "\n\n")
_ANSWER = ("\n\n", "The answer", " is 42.", "<|im_end|>")
_CALL = (
    *("\n\n", "<tool_call>", '\n{"name": "get_weather", "arguments": '),
    *(ARGUMENTS, "}\n", "</tool_call>", "<|im_end|>"),
)
_SPECIAL = ("<|im_start|>", "<|im_end|>")
_CLOSING = (ARGUMENTS, "<|im_end|>", "]", "}", '"')  # most wanted first
_SIZE = 384  # of the vocabulary and of a vector: each token has a direction of its own

_TURNS = """\
{%- if tools %}<|im_start|>system
<tools>{{ tools | tojson }}</tools><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% """

_TEMPLATES = {
    "model begins": _TURNS + "endif %}{% endif %}",
    "prompt begins": _TURNS + "else %}<think>\n{% endif %}{% endif %}",
}


def thinking_model(
    folder: Path, begins: Literal["model begins", "prompt begins"] = "model begins"
) -> Path:
    """Write the model folder. begins: who writes ``<think>``, as with Qwen3, or as with
    DeepSeek-R1 and Qwen3.5.

    It calls a tool where a client wants it to: ``call_bias``.
    """
    tokenizer = _tokenizer()
    _save(folder, tokenizer, _TEMPLATES[begins])
    chains = [_THINKING, _ANSWER, _CALL]
    first = "<think>" if begins == "model begins" else " think about"
    follows = {pair: 1.0 for chain in chains for pair in pairwise(chain)}
    follows["\n\n", "<tool_call>"] = 0.9
    ids = {(_id(tokenizer, a), _id(tokenizer, b)): w for (a, b), w in follows.items()}
    ids[_id(tokenizer, "Ċ"), _id(tokenizer, first)] = 1.0
    head = torch.zeros(_SIZE, _SIZE)
    for rank, text in enumerate(reversed(_CLOSING), start=1):
        head[_id(tokenizer, text)] = 0.05 * rank
    for (before, after), weight in ids.items():
        head[after, before] = weight
    _save_weights(folder, tokenizer, head)
    return folder


def call_bias(folder: Path) -> dict[str, float]:
    """Return the ``logit_bias`` with which the model calls its tool."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {str(_id(tokenizer, "<tool_call>")): 4.0}


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    words = dict.fromkeys((*_THINKING, *_ANSWER, *_CALL))
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in words if text not in _SPECIAL]
    )
    return tokenizer


def _id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def _save(folder: Path, tokenizer: Tokenizer, template: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def _save_weights(folder: Path, tokenizer: Tokenizer, head: torch.Tensor) -> None:
    end = _id(tokenizer, "<|im_end|>")
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=_SIZE,
            hidden_size=_SIZE,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=1 << 15,
            tie_word_embeddings=False,
            eos_token_id=end,
            bos_token_id=None,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(_SIZE))
        model.lm_head.weight.copy_(head)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
