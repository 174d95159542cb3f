"""Calls of tools, and thinking, found in the text of an answer as it comes, in the ways that models
write them.

    hermes     text <tool_call>{"name": "f", "arguments": {…}}</tool_call> …     Hermes, Qwen
    llama3     {"name": "f", "parameters": {…}}; …                               Llama 3.1 and later
    mistral    [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]                  Mistral; also f{…}
    pythonic   [f(a=1), g(b="x")]                                                Llama 4, ToolACE

Others stand on the pages ``xml_calls.py``, ``section_calls.py`` and ``harmony.py``.

Text before a call leaves at once, but for what may be the beginning of one. A call leaves in parts
where its name comes first: the name, then its arguments as they come. What looks like a call and is
none is text. Knows no tokens and no wire format.
"""
