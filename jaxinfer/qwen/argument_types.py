"""Values of tool-call arguments: from the text a model writes to the type the tool declares."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

_ORDER = ("null", "integer", "number", "boolean", "object", "array")
"""The order in which a text is tried when several types are allowed; a string comes last."""

_CLASSES: Mapping[str, type | tuple[type, ...]] = {
    "null": type(None),
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
}


def coerce(text: str, schema: Any, root: Any = None) -> Any:
    """The value that a text stands for.

    Args:
        text: as the model wrote it.
        schema: the JSON schema of the parameter; None or one that names no type means string.
        root: the schema that `$ref` refers into.

    Returns the text itself if it is not of any declared type.
    """
    types = declared_types(schema, root)
    for name in _ORDER:
        if name in types:
            found, value = _read(text.strip(), name)
            if found:
                return value
    return text


def declared_types(schema: Any, root: Any = None, depth: int = 8) -> set[str]:
    """The JSON types that a schema allows, through unions and references; empty if unknown."""
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    if "$ref" in schema:
        return declared_types(_resolve(schema["$ref"], root), root, depth - 1)
    for union in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(union), list):
            parts = (declared_types(part, root, depth - 1) for part in schema[union])
            return set().union(*parts)
    if isinstance(schema.get("enum"), list):
        return _types_of(schema["enum"])
    if "const" in schema:
        return _types_of([schema["const"]])
    if "properties" in schema:
        return {"object"}
    return {"array"} if "items" in schema else set()


def _types_of(values: Iterable[Any]) -> set[str]:
    return {name for value in values for name in (*_ORDER, "string") if _is(value, name)}


def _is(value: Any, name: str) -> bool:
    if name == "string":
        return isinstance(value, str)
    if isinstance(value, bool) and name != "boolean":
        return False
    return isinstance(value, _CLASSES[name])


def _resolve(reference: Any, root: Any) -> Any:
    """What a reference within the document points at, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node = root
    for part in reference[1:].split("/")[1:]:
        if not isinstance(node, Mapping):
            return None
        node = node.get(part.replace("~1", "/").replace("~0", "~"))
    return node


def _read(text: str, name: str) -> tuple[bool, Any]:
    """Whether a text is a value of a JSON type, and the value."""
    if name in ("boolean", "null"):
        # Models write Python's spelling as well.
        text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False, None
    if name == "integer" and isinstance(value, float) and math.isfinite(value):
        value = int(value) if value.is_integer() else value
    return _is(value, name), value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
