"""How mathematical answers are written: one form for what never changes the meaning, before anything is computed.

Everything here is linear in the length of the text. What must be computed is `verify`'s.
"""

import re
from decimal import Decimal

from arpo_megatron.rewards.units import NO_UNIT

_INVISIBLE = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:]|\\?\$")
_LOOSE_SPACE = re.compile(r"(?<!\w) | (?!\w)")
_SYNONYMS = (
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\varnothing", "\\emptyset"),
    ("°", "^\\circ"),
    ("**", "^"),
)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,3})?")
_MIXED = re.compile(r"([+-]?\d+) (\d+)/(\d+)")
_POINT_NAME = re.compile(r"[A-Z](?=\(.*\)$)")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf)\{([^{}]*)\}")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\^(?:\\circ|\{\\circ\})")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_COUNTED = re.compile(r"([+-]?[\d.,]+)((?: [a-z]{2,}){1,4})")
_PERCENT = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:\\?%| ?percent|\\(?:text|mbox)\{ ?percent\})")
_UNIT_SPACE = re.compile(r"(?<=\d) (?=[a-z])")
_BASE = re.compile(r"(-?[0-9A-Z]+)_\{?(\d+)\}?")


def canonical(text: str) -> str:
    """The text without white space, signs of money, sizes of brackets and fractions, and names of units and points."""
    text = _INVISIBLE.sub("", text)
    for word, usual in _SYNONYMS:
        text = text.replace(word, usual)
    text = _LOOSE_SPACE.sub("", " ".join(text.split())).removesuffix(".")
    if mixed := _MIXED.fullmatch(text):
        return f"{mixed[1]}\\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    if (counted := _COUNTED.fullmatch(text)) and not (NO_UNIT | {"percent"}) & set(counted[2].split()):
        text = counted[1]
    if _TRIGONOMETRY.search(text):  # the sine of 30 degrees is not that of 30; elsewhere degrees are a unit
        text = _DEGREES.sub(r"{(\1\\cdot\\pi/180)}", text)
    text = _POINT_NAME.sub("", text)
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def settled(answer: str, truth: str) -> bool | None:
    """Whether two canonical texts mean the same, as far as that needs no algebra; None: it does."""
    if answer == truth or _unwrapped(answer) == _unwrapped(truth):
        return bool(truth)
    if not answer:
        return False
    if (same := _as_numbers(answer, truth)) is not None:
        return same
    given, expected = _BASE.fullmatch(answer), _BASE.fullmatch(truth)
    if given and expected:
        return given[1] == expected[1] and int(given[2]) == int(expected[2])
    return None if _brackets_agree(answer, truth) else False


def _as_numbers(answer: str, truth: str) -> bool | None:
    """Of two numbers, with a sign of per cent or without; None: they are something else, or may be rounded.

    50% is 0.5, and 50 as well, because what is expected of "what percent" is written with and without the sign. Below
    1% only a hundredth is meant: 0.35% is not 0.35.
    """
    signs = [_PERCENT.fullmatch(text) for text in (answer, truth)]
    shares = [Decimal(sign[1]) for sign in signs if sign]
    plain = [Decimal(text) for text in (answer, truth) if _NUMBER.fullmatch(text)]
    if len(shares) + len(plain) < 2:
        return None
    if len(plain) == 2:
        whole = all(text.lstrip("+-").isdecimal() for text in (answer, truth))
        return plain[0] == plain[1] or (False if whole else None)
    if len(shares) == 2:
        return shares[0] == shares[1]
    return plain[0] == shares[0] / 100 or (plain[0] == shares[0] and abs(plain[0]) >= 1)


def _unwrapped(text: str) -> str:
    """Without \\text{} and its like around words."""
    plain = _LOOSE_SPACE.sub("", " ".join(_WRAPPER.sub(r"\1", text).split())).removesuffix(".")
    return _UNIT_SPACE.sub("", plain)


def _brackets_agree(answer: str, truth: str) -> bool:
    """False where one is a set and the other an interval or point, or intervals have other ends.

    Only whole answers without brackets inside are compared, and where both have brackets: a list may be written
    without. A vector of more than two numbers may be in round or square ones.
    """
    given, expected = _brackets(answer), _brackets(truth)
    if given is None or expected is None or given == expected:
        return True
    if "{}" in (given, expected):
        return False
    return truth.count(",") != 1


def _brackets(text: str) -> str | None:
    plain = text.replace("\\{", "{").replace("\\}", "}")
    ends = plain[:1] + plain[-1:]
    if len(plain) < 3 or ends not in ("()", "[]", "(]", "[)", "{}") or any(sign in plain[1:-1] for sign in "()[]{}"):
        return None
    return ends
