"""Faults that pydantic found in a value, in the words of someone who writes a config."""

from collections.abc import Mapping
from typing import Any

_TEXTS = {
    "missing": "is required",
    "missing_argument": "is required",
    "unexpected_keyword_argument": "is unknown",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    "finite_number": "must be a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "string_type": "must be text",
    "path_type": "must be a path",
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    **dict.fromkeys(("dict_type", "dataclass_type"), "must be a mapping of keys to values"),
    "string_too_short": "must not be empty",  # no text has a larger minimum
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
}
"""Text for a fault by pydantic's name for it, with values of its context."""


def fault_text(fault: Mapping[str, Any]) -> str:
    """Return what is wrong with a value, to follow the name of its key; of a check of ours, the check's own text.

    fault: one of pydantic's `ValidationError.errors()`.
    """
    if (text := _TEXTS.get(fault["type"])) is None:
        return str(fault["msg"]).removeprefix("Value error, ")
    context = fault.get("ctx", {})
    whole = {name: int(value) for name, value in context.items() if isinstance(value, float) and value.is_integer()}
    return text.format(**{**context, **whole})
