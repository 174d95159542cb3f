"""Training text of the second bundled model, ``demo-tools``: calls of tools, JSON that fills a
schema, and talk of several turns, beside what ``demo`` learns.

As in ``data.py`` everything is a pure function of a seed and the lists here and in ``words.py``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import data, words
from .data import ASSISTANT, DIGITS, END, SYSTEM, USER, Document

CALL, CALL_END = "<tool_call>", "</tool_call>"
RESPONSE, RESPONSE_END = "<tool_response>", "</tool_response>"
TOOLS, TOOLS_END = "<tools>", "</tools>"
ADDED_TOKENS = (CALL, CALL_END, RESPONSE, RESPONSE_END, TOOLS, TOOLS_END)

CHAT_TEMPLATE = (
    "{%- set begins_with_system = messages and messages[0]['role'] == 'system' -%}"
    "{%- if tools -%}"
    "{{- '<|system|>' -}}"
    "{%- if begins_with_system -%}{{- (messages[0]['content'] | trim) + ' ' -}}{%- endif -%}"
    "{{- '<tools>' -}}"
    "{%- for tool in tools -%}"
    "{{- (' ' if loop.index0 else '') + tool['function']['name'] + '(' -}}"
    "{%- for name, value in "
    "((tool['function']['parameters'] or {})['properties'] or {}).items() -%}"
    "{{- (', ' if loop.index0 else '') + name + ': ' -}}"
    "{{- value['type'] if value is mapping and value['type'] is string else 'any' -}}"
    "{%- endfor -%}"
    "{{- ')' -}}"
    "{%- endfor -%}"
    "{{- '</tools><|end|>' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'tool' -%}"
    "{{- '<|user|><tool_response>' + (message['content'] | trim) + '</tool_response><|end|>' -}}"
    "{%- elif not (tools and loop.first and begins_with_system) -%}"
    "{{- '<|' + message['role'] + '|>' + ((message['content'] or '') | trim) -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '<tool_call>{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": ' -}}"
    "{{- (call['function']['arguments'] | tojson) + '}</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""A tool is shown as its signature, without its description: a model this small reads none."""


@dataclass(frozen=True)
class Parameter:
    """names: one of them is the parameter's. value: makes one."""

    names: tuple[str, ...]
    type: str
    value: Callable[[random.Random], Any]


@dataclass(frozen=True)
class Tool:
    """questions and answer: with the parameters' first names as slots, and ``result``."""

    names: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    questions: tuple[str, ...]
    answer: str
    result: Callable[[random.Random], Any]


def _of(choices: Sequence[str]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(choices) if rng.random() < 0.75 else made_up(rng)


def made_up(rng: random.Random) -> str:
    """Return a name that is in no list."""
    letters = "".join(
        rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))
    )
    return (letters + rng.choice(("", "n", "r", "s", "l"))).capitalize()


def _number(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda rng: rng.randint(low, high if rng.random() < 0.7 else 10)


def _key(rng: random.Random) -> str:
    return f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}"


def _digits(rng: random.Random) -> str:
    return f"{rng.randint(0, 9999):04d}"


def _time(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 15, 30, 45)):02d}"


def _sentence(rng: random.Random) -> str:
    place, animal = rng.choice(words.PLACES), rng.choice(words.ANIMALS)
    return rng.choice(
        (
            f"the {animal} is in the {place}",
            f"I am in {rng.choice(words.CITIES)}",
            f"the {rng.choice(words.THINGS)} is {rng.choice(words.ADJECTIVES)}",
            f"we eat {rng.choice(words.FOODS)}",
            f"it is {rng.choice(words.WEATHER)}",
        )
    )


CITY = Parameter(("city", "location", "place", "town"), "string", _of(words.CITIES))
PERSON = Parameter(("name", "person", "who", "to"), "string", _of(words.NAMES))
COUNT = Parameter(("count", "number", "amount"), "integer", _number(1, 99))

KNOWN_TOOLS: tuple[Tool, ...] = (
    Tool(
        ("get_weather", "weather", "current_weather"),
        (CITY,),
        (
            "What is the weather in {city}?",
            "What's the weather in {city}?",
            "What is the weather like in {city}?",
            "How is the weather in {city} today?",
            "Tell me the weather in {city}.",
            "Is it cold in {city}?",
            "Weather in {city}?",
        ),
        "The weather in {city} is {result}.",
        lambda rng: rng.choice(words.WEATHER),
    ),
    Tool(
        ("get_time", "time_in", "clock"),
        (CITY,),
        ("What time is it in {city}?", "Tell me the time in {city}.", "Time in {city}?"),
        "It is {result} in {city}.",
        _time,
    ),
    Tool(
        ("add", "sum", "add_numbers"),
        (
            Parameter(("a", "x", "left", "first"), "integer", _number(0, 999)),
            Parameter(("b", "y", "right", "second"), "integer", _number(0, 999)),
        ),
        ("Add {a} and {b}.", "What is {a} plus {b}?", "Add {a} to {b}.", "What is {a} + {b}?"),
        "{a} + {b} = {result}.",
        lambda rng: rng.randint(0, 1998),
    ),
    Tool(
        ("multiply", "times", "product"),
        (
            Parameter(("a", "x", "left", "first"), "integer", _number(0, 999)),
            Parameter(("b", "y", "right", "second"), "integer", _number(0, 999)),
        ),
        ("Multiply {a} by {b}.", "What is {a} times {b}?", "Multiply {a} and {b}."),
        "{a} times {b} is {result}.",
        lambda rng: rng.randint(0, 9999),
    ),
    Tool(
        ("send_message", "tell", "send_mail"),
        (PERSON, Parameter(("text", "message", "body"), "string", _sentence)),
        (
            "Tell {name} that {text}.",
            "Send {name} the message: {text}.",
            "Write to {name} that {text}.",
        ),
        "I told {name} that {text}.",
        lambda rng: rng.choice(("ok", "done", "sent")),
    ),
    Tool(
        ("book_table", "reserve", "book"),
        (CITY, Parameter(("guests", "people", "seats"), "integer", _number(1, 20))),
        (
            "Book a table for {guests} in {city}.",
            "Book a table in {city} for {guests} people.",
            "I want a table for {guests} people in {city}.",
        ),
        "A table for {guests} in {city} is booked: {result}.",
        _digits,
    ),
    Tool(
        ("set_alarm", "wake_up", "alarm"),
        (Parameter(("time", "at", "hour"), "string", _time),),
        ("Wake me at {time}.", "Set an alarm for {time}.", "Set the alarm to {time}."),
        "The alarm is set for {time}.",
        lambda rng: rng.choice(("ok", "done")),
    ),
    Tool(
        ("buy", "order_food", "order"),
        (COUNT, Parameter(("food", "item", "what"), "string", _of(words.FOODS))),
        ("Buy {count} {food}.", "Please order {count} {food}.", "I want to buy {count} {food}."),
        "I ordered {count} {food}.",
        lambda rng: rng.choice(("ok", "done")),
    ),
    Tool(
        ("find_animal", "find", "look_for"),
        (
            Parameter(("animal", "what"), "string", _of(words.ANIMALS)),
            Parameter(("place", "where"), "string", _of(words.PLACES)),
        ),
        (
            "Is there a {animal} in the {place}?",
            "Find the {animal} in the {place}.",
            "Look for a {animal} in the {place}.",
        ),
        "The {animal} in the {place}: {result}.",
        lambda rng: rng.choice(("yes", "no")),
    ),
    Tool(
        ("get_person", "look_up_person", "get_user"),
        (PERSON,),
        ("Who is {name}?", "Look up {name}.", "What do we know of {name}?"),
        "{name}: {result}.",
        lambda rng: f"lives in {rng.choice(words.CITIES)}",
    ),
    Tool(
        ("open_door", "open_lock", "unlock"),
        (
            Parameter(("key", "lock", "door"), "string", _key),
            Parameter(("code", "digits", "pin"), "string", _digits),
        ),
        ("Open the {key} with the code {code}.", "Use the code {code} to open the {key}."),
        "The {key} is open.",
        lambda rng: rng.choice(("ok", "open")),
    ),
    Tool(
        ("get_code", "look_up_code", "code_of"),
        (Parameter(("key", "of", "item"), "string", _key),),
        ("Look up the code of the {key}.", "Find out the code of the {key}."),
        words.RECALL_ANSWER.replace("{code}", "{result}"),
        _digits,
    ),
    Tool(
        ("set_light", "switch_light", "light"),
        (
            Parameter(("room", "place", "where"), "string", _of(words.PLACES)),
            Parameter(("on", "is_on"), "boolean", lambda rng: rng.random() < 0.5),
        ),
        ("Turn the light in the {room} {on}.", "Switch the light {on} in the {room}."),
        "The light in the {room} is {on}.",
        lambda rng: rng.choice(("ok", "done")),
    ),
    Tool(
        ("search", "search_web", "web_search"),
        (
            Parameter(
                ("query", "q", "text"),
                "string",
                lambda rng: _key(rng) if rng.random() < 0.5 else rng.choice(words.CITIES),
            ),
        ),
        ("Search for {query}.", "Search the web for {query}.", "Look for {query} on the web."),
        "I found this: {result}.",
        _sentence,
    ),
    Tool(
        ("get_price", "price", "price_of"),
        (Parameter(("thing", "item", "product"), "string", _of(words.THINGS)),),
        (
            "What is the price of the {thing}?",
            "How much is the {thing}?",
            "What does the {thing} cost?",
        ),
        "The {thing} costs {result}.",
        lambda rng: rng.randint(1, 999),
    ),
)

ARGUMENT_NAMES = (
    "size",
    "color",
    "length",
    "width",
    "height",
    "speed",
    "level",
    "title",
    "label",
    "kind",
    "group",
    "owner",
    "date",
    "year",
    "user",
    "source",
    "target",
    "file",
    "path",
    "limit",
    "value",
    "mode",
    "note",
    "price",
    "weight",
)
VERBS = (
    "make",
    "set",
    "get",
    "move",
    "start",
    "stop",
    "run",
    "read",
    "write",
    "list",
    "check",
    "update",
    "delete",
    "create",
)


@dataclass(frozen=True)
class Made:
    """A tool of one document. shown: by its parameters' names, their types."""

    name: str
    shown: dict[str, str]
    arguments: dict[str, Any]
    question: str
    answer: str
    result: Any


def _spoken(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def known_tool(rng: random.Random, tool: Tool) -> Made:
    """Return one of a kind that training knows, with values of this time."""
    name = tool.names[0] if rng.random() < 0.6 else rng.choice(tool.names)
    shown: dict[str, str] = {}
    arguments: dict[str, Any] = {}
    slots: dict[str, str] = {}
    for parameter in tool.parameters:
        chosen = parameter.names[0] if rng.random() < 0.6 else rng.choice(parameter.names)
        value = parameter.value(rng)
        shown[chosen], arguments[chosen] = parameter.type, value
        slots[parameter.names[0]] = _spoken(value)
    result = tool.result(rng)
    question = rng.choice(tool.questions).format(**slots)
    return Made(
        name, shown, arguments, question, tool.answer.format(**slots, result=result), result
    )


def any_tool(rng: random.Random) -> Made:
    """Return a tool with a made-up name, called by that name."""
    noun = rng.choice((*words.NOUNS, *words.THINGS, made_up(rng).lower()))
    name = rng.choice((f"{rng.choice(VERBS)}_{noun}", noun, made_up(rng).lower()))
    shown: dict[str, str] = {}
    arguments: dict[str, Any] = {}
    said: list[str] = []
    joint = rng.choice((" ", " = ", " is ", ": "))
    for key in rng.sample(ARGUMENT_NAMES, rng.randint(1, 3)):
        if rng.random() < 0.5:
            shown[key], value = "integer", rng.randint(0, 999)
        else:
            shown[key] = "string"
            lists = (words.NAMES, words.CITIES, words.THINGS, words.ADJECTIVES)
            value = rng.choice(rng.choice(lists)) if rng.random() < 0.7 else made_up(rng).lower()
        arguments[key] = value
        said.append(f"{key}{joint}{value}")
    listed = " and ".join(said) if len(said) < 3 else ", ".join(said[:-1]) + " and " + said[-1]
    question = rng.choice(("Call {} with {}.", "Use {} with {}.", "Run {} with {}.")).format(
        name, listed
    )
    result = rng.choice((rng.randint(0, 999), rng.choice(words.MOODS), "done"))
    return Made(name, shown, arguments, question, f"The result is {result}.", result)


def signature(name: str, shown: dict[str, str]) -> str:
    """Return a tool as the chat template shows it."""
    return f"{name}({', '.join(f'{key}: {kind}' for key, kind in shown.items())})"


def call_text(made: Made) -> str:
    """Return a call as the model writes it."""
    arguments = json.dumps(made.arguments)
    return f'{CALL}{{"name": {json.dumps(made.name)}, "arguments": {arguments}}}{CALL_END}'


def _tool(rng: random.Random) -> Made:
    return any_tool(rng) if rng.random() < 0.4 else known_tool(rng, rng.choice(KNOWN_TOOLS))


def _result_text(rng: random.Random, made: Made) -> str:
    if rng.random() < 0.4:
        return json.dumps({rng.choice(("result", "value", "answer", made.name)): made.result})
    return str(made.result)


def tool_document(rng: random.Random, tokens: int) -> Document:
    """Return a chat with tools: their list, questions, calls, results and answers."""
    del tokens
    made = {one.name: one for one in (_tool(rng) for _ in range(rng.choice((1, 1, 2, 3))))}
    tools = list(made.values())
    out = data._Builder()  # pyright: ignore[reportPrivateUsage]
    said = f"{rng.choice(words.SYSTEM_PROMPTS)} " if rng.random() < 0.25 else ""
    listed = " ".join(signature(one.name, one.shown) for one in tools)
    out.add(f"{SYSTEM}{said}{TOOLS}{listed}{TOOLS_END}{END}")
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.2:
            question, answer, digits, weight = plain_turn(rng)
            out.add_turn(question, answer, digits, weight)
            continue
        chosen = rng.choice(tools)
        out.add(f"{USER}{chosen.question}{END}{ASSISTANT}")
        out.add(call_text(chosen), DIGITS)
        out.add(END, DIGITS)
        if rng.random() < 0.5:
            result = _result_text(rng, chosen)
            out.add(f"{USER}{RESPONSE}{result}{RESPONSE_END}{END}{ASSISTANT}")
            out.add(chosen.answer + END, DIGITS)
    return out.document("tools")


_FIELDS: tuple[tuple[str, str, str, Callable[[random.Random], Any]], ...] = (
    ("age", "integer", "is {} years old", _number(1, 99)),
    ("city", "string", "lives in {}", _of(words.CITIES)),
    ("food", "string", "likes to eat {}", lambda rng: rng.choice(words.FOODS)),
    ("animal", "string", "has a {}", lambda rng: rng.choice(words.ANIMALS)),
    ("mood", "string", "is {} today", lambda rng: rng.choice(words.MOODS)),
    ("code", "string", "has the code {}", _digits),
)


def schema_case(rng: random.Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return sentences, a JSON schema, and the value of the schema that they say."""
    value: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    if rng.random() < 0.65:
        name = _of(words.NAMES)(rng)
        facts = [("name", "string", name)]
        parts: list[str] = []
        for key, kind, said, make in rng.sample(_FIELDS, rng.randint(1, 3)):
            made = make(rng)
            facts.append((key, kind, made))
            parts.append(said.format(made))
        if rng.random() < 0.5:
            text = f"{name} " + " and ".join(parts) + "."
        else:
            text = " ".join(f"{name} {part}." for part in parts)
        if rng.random() < 0.3:
            rng.shuffle(facts)
    else:
        facts = []
        said = []
        for key in rng.sample(ARGUMENT_NAMES, rng.randint(1, 4)):
            is_number = rng.random() < 0.5
            lists = (words.NAMES, words.CITIES, words.THINGS, words.ADJECTIVES)
            made = rng.randint(0, 999) if is_number else rng.choice(rng.choice(lists))
            facts.append((key, "integer" if is_number else "string", made))
            said.append(f"The {key} is {made}.")
        rng.shuffle(facts)
        text = " ".join(said)
    for key, kind, made in facts:
        value[key] = made
        properties[key] = {"type": kind}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return text, schema, value


def asked_schema(rng: random.Random, schema: dict[str, Any]) -> str:
    """Return a wish for a JSON answer, in one of several ways."""
    properties: dict[str, Any] = schema["properties"]
    roll = rng.random()
    if roll < 0.35:
        names = list(properties)
        listed = ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]
        return f"Answer as JSON with {listed}."
    if roll < 0.55:
        shape = ", ".join(f'"{key}": {value["type"]}' for key, value in properties.items())
        return f"Answer as JSON: {{{shape}}}"
    if roll < 0.8:
        return f"Answer as JSON of this schema: {json.dumps(schema)}"
    titled = {
        key: {"title": key.capitalize(), "type": value["type"]} for key, value in properties.items()
    }
    theirs = {
        "properties": titled,
        "required": schema["required"],
        "title": rng.choice(("Person", "Answer", "Item", "User")),
        "type": "object",
    }
    return f"Answer as JSON of this schema: {json.dumps(theirs)}"


def schema_document(rng: random.Random, tokens: int) -> Document:
    """Return a chat in which sentences are told as JSON of a schema."""
    out = data._Builder()  # pyright: ignore[reportPrivateUsage]
    for _ in range(2 if tokens > 250 and rng.random() < 0.5 else 1):
        text, schema, value = schema_case(rng)
        wish = asked_schema(rng, schema)
        roll = rng.random()
        if roll < 0.25:
            out.add(f"{SYSTEM}{wish}{END}{USER}{text}{END}{ASSISTANT}")
        elif roll < 0.4:
            out.add(f"{USER}{wish} {text}{END}{ASSISTANT}")
        else:
            out.add(f"{USER}{text} {wish}{END}{ASSISTANT}")
        out.add(json.dumps(value) + END, DIGITS)
    return out.document("schema")


UNKNOWN = (
    "What is the capital of {city}?",
    "Who is the king of {city}?",
    "How do I cook {food}?",
    "Why is the {thing} {adjective}?",
    "Write a poem about a {animal}.",
    "What is a {thing}?",
    "Do you like {food}?",
    "What do you think of {city}?",
    "How far is it to {city}?",
    "Can you sing?",
    "Write a program in Python.",
    "Explain how a {thing} works.",
    "What happened in {year}?",
    "What is the meaning of life?",
    "Translate {food} to French.",
    "What is love?",
    "Is {city} bigger than {city2}?",
)
UNKNOWN_ANSWER = "I do not know that. I remember codes, do small sums and tell short stories."
NOT_KNOWN = " not known to me"
UNKNOWN_CODE = "The code of the {key} is" + NOT_KNOWN + "."
"""Begins as the answer that tells a code, so that the key stands before the word that says whether
it was told: finding what came after a key is what the model can do. Where the first word said it,
the model did not look, and told no more than what was likely."""


def plain_turn(rng: random.Random) -> tuple[str, str, str, float]:
    """Return a turn that needs nothing that was said before."""
    roll = rng.random()
    if roll < 0.3:
        question, answer, result = data._sum(rng)  # pyright: ignore[reportPrivateUsage]
        return question, answer, result, data.ANSWER
    if roll < 0.5:
        question = data._fill(rng.choice(UNKNOWN), rng)  # pyright: ignore[reportPrivateUsage]
        return question, UNKNOWN_ANSWER, "", data.ANSWER
    question, answer, weight = data._talk_turn(rng)  # pyright: ignore[reportPrivateUsage]
    return question, answer, "", weight


def dialogue_document(rng: random.Random, tokens: int) -> Document:
    """Return a chat of several turns of different kinds, some about what was said before."""
    out = data._Builder()  # pyright: ignore[reportPrivateUsage]
    facts: dict[str, str] = {}
    name = ""
    last = ""
    if rng.random() < 0.2:
        out.add(f"{SYSTEM}{rng.choice(words.SYSTEM_PROMPTS)}{END}")
    for turn in range(rng.randint(2, 6)):
        roll = rng.random()
        weight, digits = data.ANSWER, ""
        if roll < 0.22:
            told: list[str] = []
            for _ in range(rng.randint(1, 3)):
                key, code = _key(rng), _digits(rng)
                if key not in facts:
                    facts[key] = code
                    told.append(data._fact(rng, key, code))  # pyright: ignore[reportPrivateUsage]
            question, answer = " ".join(told), words.ACKNOWLEDGEMENT
            if not told:
                continue
        elif roll < 0.45 and facts:
            key = rng.choice(list(facts))
            question = data._question(rng, key)  # pyright: ignore[reportPrivateUsage]
            answer, digits = words.RECALL_ANSWER.format(key=key, code=facts[key]), facts[key]
        elif roll < 0.52:
            key = _key(rng)
            if key in facts:
                continue
            question = data._question(rng, key)  # pyright: ignore[reportPrivateUsage]
            answer, digits = UNKNOWN_CODE.format(key=key), NOT_KNOWN
        elif roll < 0.6 and not name:
            name = _of(words.NAMES)(rng)
            question = rng.choice(("My name is {}.", "I am {}.", "Call me {}.")).format(name)
            answer = f"Nice to meet you, {name}."
        elif roll < 0.7 and name:
            question = rng.choice(("What is my name?", "Who am I?", "Do you know my name?"))
            answer, weight = f"Your name is {name}.", DIGITS
        elif roll < 0.76 and last:
            question = rng.choice(("Say that again.", "What did you say?", "Please repeat that."))
            answer = last
        else:
            question, answer, digits, weight = plain_turn(rng)
        if data.approximate_tokens("".join(out.parts)) > tokens and turn > 1:
            break
        out.add_turn(question, answer, digits, weight)
        last = answer
    return out.document("dialogue")


def told_document(rng: random.Random, tokens: int) -> Document:
    """Return a chat that tells codes in one turn, nothing beside them, and asks in the next for
    some of them and for one that it did not tell."""
    del tokens
    out = data._Builder()  # pyright: ignore[reportPrivateUsage]
    count = rng.choice((1, 1, 1, 2, 3))
    keys = data._keys(rng, count + 1)  # pyright: ignore[reportPrivateUsage]
    facts = {key: _digits(rng) for key in keys[:count]}
    told = " ".join(data._fact(rng, *fact) for fact in facts.items())  # pyright: ignore[reportPrivateUsage]
    out.add_turn(told, words.ACKNOWLEDGEMENT)
    for key in rng.sample(keys, rng.randint(1, count + 1)):
        question = data._question(rng, key)  # pyright: ignore[reportPrivateUsage]
        answer, said = UNKNOWN_CODE.format(key=key), NOT_KNOWN
        if key in facts:
            answer, said = words.RECALL_ANSWER.format(key=key, code=facts[key]), f" {facts[key]}"
        out.add_turn(question, answer, said)
    return out.document("told")


MIX: tuple[tuple[data.Maker, float], ...] = (
    (data.recall_document, 0.26),
    (data.arithmetic_document, 0.08),
    (data.talk_document, 0.06),
    (data.repeat_document, 0.03),
    (tool_document, 0.31),
    (schema_document, 0.12),
    (dialogue_document, 0.14),
    (told_document, 0.2),
)


def sequence(rng: random.Random, tokens: int) -> list[Document]:
    """Return documents of at least ``tokens`` tokens: one row of a training batch, to be cut."""
    makers, weights = zip(*MIX, strict=True)
    documents: list[Document] = []
    left = tokens
    if tokens > 600 or rng.random() < 0.2:
        share = 1.0 if rng.random() < 0.5 else rng.uniform(0.4, 1.0)
        documents.append(data.recall_document(rng, int(tokens * share)))
        left -= data.approximate_tokens(documents[-1].text)
    while left > 0:
        documents.append(rng.choices(makers, weights)[0](rng, min(left, 256)))
        left -= data.approximate_tokens(documents[-1].text)
    return documents
