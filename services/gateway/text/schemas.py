"""JSON schemas that clients send: what is wrong with one, and where.

Only what the grammar library does not say: whether an answer to it can end, and the place of a
keyword. Format: https://json-schema.org/draft/2020-12
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urljoin

MAX_DEPTH = 64
MAX_VISITS = 200_000
"""Most parts, and names in them, that are looked at, again and again where references lead to each
other."""

MAX_BASE_CHARS = 512
"""Of what references within a part of a schema are resolved against: each of them holds it."""

MAX_URI_CHARS = 4096
"""Of a reference that is no pointer: Python keeps the last 128 that it has split."""

_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})
_TYPES = _SCALARS | {"object", "array"}
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords that hold values, not schemas."""

_REMARKS = frozenset({"title", "description", "$comment", "default", "examples"})
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
"""With the sign of the numbers that a bound far out leaves."""
_MAX_EXACT = 2**53
# The largest double below 2**63.
_MAX_BOUND = 2**63 - 2**10
"""The library takes numbers for doubles, and those of integers' bounds for 64 bits then."""

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords of which each key is a name, and each value a schema."""

_QUOTED = re.compile(r"""\"([^\"]+)\"|'([^']+)'""")
_PLAINER = (
    ("oneOf constraints", "oneOf", "its alternatives must exclude each other: use anyOf"),
    ("Resource", "$ref", "leads out of the schema: nothing is fetched"),
    ("Pointer", "$ref", "leads to nothing in the schema"),
    ("patternProperty", "patternProperties", ""),
)
"""How a message of the library begins, the keyword that it is about, and a plainer sentence."""


class SchemaFault(NamedTuple):
    """place: below the field that holds the schema, '' = the whole."""

    place: str
    rule: str


def schema_fault(schema: Any) -> SchemaFault | None:
    """Return why no answer can end that matches this schema, None = nothing is known."""
    if not isinstance(schema, dict | bool):
        return SchemaFault("", "must be a JSON schema: an object, or true")
    # First, since all that follows goes down by recursion.
    if _depth(schema) > MAX_DEPTH:
        return SchemaFault("", f"must be nested at most {MAX_DEPTH} levels deep")
    for place, value in _values(schema, ""):
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            return SchemaFault(place, "must be a number that a double can hold")
    for place, key, value in _keywords(schema):
        inexact = _inexact(place, key, value)
        if inexact is not None:
            return inexact
    ends = _Ends(schema)
    if ends.misnamed is not None:
        name, rule = ends.misnamed
        names = (one for one in _keywords(schema) if one[1] in ("$id", "$anchor"))
        place = next((place for place, _, value in names if value == name), "")
        return SchemaFault(place, rule)
    if ends.of(schema):
        return None
    if ends.is_cut:
        return SchemaFault("", "has too many references that lead to each other")
    for place, key, kind in _keywords(schema):
        if key == "type" and isinstance(kind, str) and kind not in _TYPES:
            return SchemaFault(place, f"must be one of {', '.join(sorted(_TYPES))}")
    return SchemaFault(
        _place(ends.endless),
        "no answer ends that matches it: it asks for itself within itself, or for nothing that "
        "there is",
    )


def _inexact(place: str, key: str, value: Any) -> SchemaFault | None:
    """Return why the library would hold an answer to another number than a keyword's."""
    if key in ("const", "enum"):
        for path, one in _values(value, place):
            if _digits_are_lost(one):
                return SchemaFault(path, "is a number of too many digits: make it a text")
    elif isinstance(value, int | float) and value * _BOUNDS.get(key, 0) >= _MAX_EXACT:
        return SchemaFault(place, "leaves only numbers of more than 2**53, which are not held")
    return None


def _digits_are_lost(value: Any) -> bool:
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return abs(value) > _MAX_EXACT
    return isinstance(value, float) and float(f"{value:.15g}") != value


def for_library(schema: Any, *, has_names: bool = False) -> Any:
    """Return a schema without remarks: descriptions and such, which would count as its size, and
    what asks for nothing (formats as ``int32`` and ``password``, ``uniqueItems: false``), for the
    library takes only what it can hold an answer to. Bounds that it would widen are a little
    narrower.

    has_names: see ``parts_of``.
    """
    if isinstance(schema, list):
        return [for_library(one) for one in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", schema).items():
        if has_names:
            kept[key] = for_library(value)
        elif key in ("const", "enum"):
            kept[key] = value
        elif key in _BOUNDS:
            kept[key] = _bound(value)
        elif key not in _REMARKS and not _asks_for_nothing(key, value):
            kept[key] = for_library(value, has_names=key in _NAMED)
    return kept


def moved(schema: Any, root: str, *, has_names: bool = False) -> Any:
    """Return a schema as a part of another, at ``root``: references to its beginning lead there,
    but for those to a beginning that has a name.

    has_names: see ``parts_of``.
    """
    if isinstance(schema, list):
        return [moved(one, root) for one in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    parts = cast("dict[str, Any]", schema)
    if not has_names and isinstance(parts.get("$id"), str):
        return parts
    kept: dict[str, Any] = {}
    for key, value in parts.items():
        if has_names or key not in _VALUES | {"$ref"}:
            kept[key] = moved(value, root, has_names=not has_names and key in _NAMED)
        elif key == "$ref" and isinstance(value, str) and re.match("#(/|$)", value):
            kept[key] = root + value[1:]
        else:
            kept[key] = value
    return kept


def _asks_for_nothing(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in _FORMATS
    return key == "uniqueItems" and value is False


def _bound(bound: Any) -> Any:
    if not isinstance(bound, int | float) or abs(bound) <= _MAX_EXACT:
        return bound
    inner = int(math.nextafter(float(bound), 0))
    return max(-_MAX_BOUND, min(inner, _MAX_BOUND))


def library_fault(schema: Any, message: str) -> SchemaFault:
    """Return what a library's message says of a schema, or of a list of values that hold some, with
    the place of the first keyword that it is about, '' = it names none."""
    message = message.rpartition("failed to compile JSON schema: ")[2]
    rule, words = message, {one for pair in _QUOTED.findall(message) for one in pair if one}
    for begin, keyword, plainer in _PLAINER:
        if message.startswith(begin):
            rule, words = plainer or message, words | {keyword}
    for place, key, value in _keywords(schema):
        if key in ("$ref", "$schema") and "$ref" in words:
            # A message has the reference as it was resolved, or only its resource or pointer.
            whole = str(value)
            forms = {whole, whole.partition("#")[0]} - {""}
            if any(one.endswith(form) or form.endswith(one) for one in words for form in forms):
                return SchemaFault(place, rule)
        elif key in words and not _asks_for_nothing(key, value):
            return SchemaFault(place, rule)
    return SchemaFault("", message)


def _keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """Every keyword with its path and value."""
    for path, part in parts_of(schema):
        for key, value in part.items():
            yield f"{path}.{key}", key, value


def parts_of(
    schema: Any, path: str = "", *, has_names: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within a schema, and itself, with its path: outer ones first. has_names: the
    keys are names, of properties or definitions."""
    if isinstance(schema, list):
        for index, one in enumerate(cast("list[Any]", schema)):
            yield from parts_of(one, f"{path}[{index}]")
    elif isinstance(schema, dict):
        parts = cast("dict[str, Any]", schema)
        if not has_names:
            yield path, parts
        for key, value in parts.items():
            if has_names or key not in _VALUES:
                is_named = not has_names and key in _NAMED
                yield from parts_of(value, f"{path}.{key}", has_names=is_named)


def without_part(schema: Any, part: Any) -> Any:
    """Return a schema in which one part, by identity, takes everything."""
    if schema is part:
        return {}
    if isinstance(schema, list):
        return [without_part(one, part) for one in cast("list[Any]", schema)]
    if isinstance(schema, dict):
        items = cast("dict[str, Any]", schema).items()
        return {key: without_part(value, part) for key, value in items}
    return schema


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Everything in a JSON value that is no list and no object, with its path."""
    if isinstance(value, dict):
        for key, one in cast("dict[str, Any]", value).items():
            yield from _values(one, f"{path}.{key}")
    elif isinstance(value, list):
        for index, one in enumerate(cast("list[Any]", value)):
            yield from _values(one, f"{path}[{index}]")
    else:
        yield path, value


def _depth(value: Any) -> int:
    """Levels of lists and objects, without recursion; stops when there are too many."""
    level: list[Any] = [value]
    depth = 0
    while level and depth <= MAX_DEPTH + 1:
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += cast("dict[str, Any]", one).values()
            elif isinstance(one, list):
                inner += cast("list[Any]", one)
        level = inner
        depth += 1
    return depth - 1


def _place(ref: str) -> str:
    _, _, pointer = ref.partition("#/")
    return f".{pointer.replace('/', '.')}" if pointer else ""


class _Ends:
    """Whether there is an answer of finite length: the least solution of "ends if its parts end",
    where what a reference names does not end until it is shown to."""

    def __init__(self, root: Any) -> None:
        self._resources: dict[str, Any] = {"": root}
        self._refs: dict[int, str] = {}  # by the schema that holds it, as it is resolved
        self._known: dict[str, bool] = {}
        self._num_visits = 0
        self.endless = ""
        self.misnamed: tuple[str, str] | None = None  # a name, and what is wrong with it
        self._index(root, "")
        refs = sorted({ref for ref in self._refs.values() if self._target(ref) is not None})
        self._known = dict.fromkeys(refs, False)
        has_changed = True
        while has_changed and not self.is_cut:
            has_changed = False
            for ref in refs:
                if self.is_cut:
                    break
                if not self._known[ref] and self.of(self._target(ref)):
                    self._known[ref] = has_changed = True
        self.endless = next((ref for ref in refs if not self._known[ref]), "")

    @property
    def is_cut(self) -> bool:
        """Whether it was too much to look at: what was not shown to end may."""
        return self._num_visits >= MAX_VISITS

    def of(self, schema: Any) -> bool:
        """Whether an answer to a schema within the root can end."""
        self._num_visits += 1
        if not isinstance(schema, dict):
            return schema is not False
        parts = cast("Mapping[str, Any]", schema)
        ref = self._refs.get(id(parts))
        if ref is not None and not self._known.get(ref, True):
            return False
        if not all(map(self.of, as_list(parts.get("allOf")))):
            return False
        for name in ("anyOf", "oneOf"):
            choices = as_list(parts.get(name))
            if choices and not any(map(self.of, choices)):
                return False
        if "const" in parts or "enum" in parts:
            return True
        kinds = parts.get("type")
        kinds = [kinds] if isinstance(kinds, str) else as_list(kinds)
        self._num_visits += len(kinds)
        if not kinds or any(kind in _SCALARS for kind in kinds if isinstance(kind, str)):
            # Without a type other kinds of values match as well, whatever an object must have.
            return True
        return ("object" in kinds and self._object_ends(parts)) or (
            "array" in kinds and self._array_ends(parts)
        )

    def _object_ends(self, parts: Mapping[str, Any]) -> bool:
        properties = parts.get("properties")
        known = cast("dict[str, Any]", properties) if isinstance(properties, dict) else {}
        required = [key for key in as_list(parts.get("required")) if isinstance(key, str)]
        self._num_visits += len(required)
        others = parts.get("additionalProperties")
        if not isinstance(others, dict) or "patternProperties" in parts:
            others = None  # the library says what may not be there at all
        return all(self.of(known.get(key, others)) for key in required)

    def _array_ends(self, parts: Mapping[str, Any]) -> bool:
        least = parts.get("minItems", 0)
        least = max(least, 0) if isinstance(least, int) else least
        first = as_list(parts.get("prefixItems"))
        num_first = min(len(first), least) if isinstance(least, int) else 0
        if not all(map(self.of, first[:num_first])):
            return False
        return not isinstance(least, int) or least <= len(first) or self.of(parts.get("items"))

    def _index(self, schema: Any, base: str, *, has_names: bool = False) -> None:
        """Note what references may name ($id, $anchor), and what they name."""
        if isinstance(schema, list):
            for one in cast("list[Any]", schema):
                self._index(one, base)
        if not isinstance(schema, dict):
            return
        parts = cast("dict[str, Any]", schema)
        own, anchor, ref = parts.get("$id"), parts.get("$anchor"), parts.get("$ref")
        if isinstance(own, str):
            base = _joined(base, own).rstrip("#")
            if len(base) > MAX_BASE_CHARS:
                rule = f"makes names of more than {MAX_BASE_CHARS} characters"
                self.misnamed = own, rule
                return
            self._name(base, parts, own)
        if isinstance(anchor, str):
            self._name(f"{base}#{anchor}", parts, anchor)
        if isinstance(ref, str):
            self._refs[id(parts)] = _joined(base, ref)
        for key, value in parts.items():
            if has_names or key not in _VALUES:
                self._index(value, base, has_names=not has_names and key in _NAMED)

    def _name(self, name: str, parts: Mapping[str, Any], own: str) -> None:
        if self._resources.setdefault(name, parts) is not parts:
            self.misnamed = own, f"several parts of the schema are called {own}"

    def _target(self, ref: str) -> Any | None:
        base, _, fragment = ref.partition("#")
        if fragment and not fragment.startswith("/"):
            return self._resources.get(ref)
        return at_pointer(self._resources.get(base), fragment)


def at_pointer(value: Any, fragment: str) -> Any | None:
    """Return what a JSON pointer in a reference's fragment leads to within a value, None =
    nothing."""
    for step in unquote(fragment).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = cast("dict[str, Any]", value).get(key)
        elif isinstance(value, list) and re.fullmatch(r"[0-9]{1,9}", key):
            items = cast("list[Any]", value)
            value = items[int(key)] if int(key) < len(items) else None
        else:
            return None
    return value


def _joined(base: str, ref: str) -> str:
    """A reference as it is resolved; one that is no URI, or too long a one, names nothing."""
    if ref.startswith("#"):
        return base + ref
    if len(ref) > MAX_URI_CHARS:
        return ref
    try:
        return urljoin(base, ref)
    except ValueError:
        return ref


def as_list(value: Any) -> list[Any]:
    """Return a list, and of what is none an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []
