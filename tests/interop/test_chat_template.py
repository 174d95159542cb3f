"""Our renderer of chat templates against that of transformers: the same prompt, character by
character."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.text.chat_template import ChatTemplate
from shared.model_folder import DEMO_FOLDER, ModelFolder, SpecialTokens

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " be brief\n"},
    {"role": "user", "content": "hé <b>&\"'🦊"},
    {"role": "assistant", "content": "ok\n"},
    {"role": "user", "content": "more"},
]

CHATML = """
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

WHITESPACE = """
  {% set ns = namespace(count=0) %}
  {% for m in messages %}
    {% set ns.count = ns.count + 1 %}
{{ m | tojson(indent=2) }}
    {% generation %}
{{ m.content }}
    {% endgeneration %}
  {% endfor %}
{{ bos_token }} {{ ns.count }}
"""

ABSENCES = """
{{- messages | tojson }}{% if tools %}tools{% endif %}
{%- if documents is not none %}documents{% endif %}
{{- messages[0].get('name', 'é<>&') | tojson }}{{ messages[-1].content[::-1] }}
"""


@pytest.mark.parametrize("source", [CHATML, WHITESPACE, ABSENCES, "demo"])
def test_a_template_renders_as_in_transformers(source: str) -> None:
    """Whitespace control, JSON, namespaces and absent names behave alike."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    if source == "demo":
        source = ModelFolder(DEMO_FOLDER).chat_template or ""
    theirs, _ = utils.render_jinja_template(
        conversations=[MESSAGES], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    ours = ChatTemplate(source, SpecialTokens(bos="<s>")).render(MESSAGES)
    assert ours == theirs[0]
