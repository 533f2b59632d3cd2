"""What unit an answer names, so that 12 minutes are not 12 hours.

Names are compared, nothing is converted: 60 minutes are not 1 hour. Where only one side names a unit there is nothing
to compare, because the expected texts of the benchmarks often leave it out.
"""

import re
from collections.abc import Iterator

_TEXT = r"\\(?:text|textbf|textit|mbox|mathrm|mathbf)\{"
_POWER = r"\.?(?:\^\{?[23]\}?)?"
_WORD = rf"[A-Za-z]+{_POWER}"
_IN_TEXT = re.compile(rf"(?<=.)((?:{_TEXT}[^{{}}]*\}}{_POWER}[ /]?)+)$")
_PLAIN = re.compile(rf"(?:[A-Za-z] ?= ?)?[+-]?[\d.,/ ]*\d ?({_WORD}(?:[ /]{_WORD})*)")
_SIGNS = ((re.compile(r"\\[!,;: ]|~"), " "), (re.compile(r"°|\^(?:\\circ|\{\\circ\})"), r"\\text{ degrees }"))
_PERCENT = (re.compile(r"\\?%"), r"\\text{ percent }")
_DOLLARS = re.compile(r"\s*[+-]?(?:\\\$|\$(?=[^$]*$))")
_NAMES = re.compile(r"([a-z]+)(?:\^\{?([23])\}?)?|(/)")
_POWERS = {"2": "square", "3": "cubic"}
_PLURALS = (("ies", "y"), ("ches", "ch"), ("shes", "sh"), ("xes", "x"), ("s", ""))

_MEASURES = {
    name: names.split()[0]
    for names in (
        *("square sq", "cubic cu", "per", "percent", "degree deg", "radian rad", "dollar usd", "cent", "euro"),
        *("second s sec", "minute min", "hour h hr", "day", "week", "month", "year yr", "am", "pm"),
        *("inch in", "foot ft feet", "yard yd", "mile mi", "acre", "gallon", "pound lb", "ounce oz", "ton"),
        *("m meter metre", "km kilometer kilometre", "cm centimeter centimetre", "mm millimeter millimetre"),
        *("g gram", "kg kilogram", "mg milligram", "l liter litre", "ml milliliter millilitre"),
        *("person people", "child children"),
    )
    for name in names.split()
}
"""The ways to write a measure, in the singular -> its name here."""
_COUNTED = {"unit"}
"""Words that only say that there is a unit."""
NO_UNIT = frozenset(("and", "or", "to", "times", "over", "pi", "sqrt", "half", "dozen", "sin", "cos", "tan", "log"))
NO_UNIT |= {"hundred", "thousand", "million", "billion", "trillion", "plus", "minus", "more", "less", "than"}
NO_UNIT |= {"is", "are", "was", "not", "no", "wrong", "if", "but", "except", "without"}
"""Words that make what stands behind a number something else than a unit."""


def same_unit(answer: str, truth: str) -> bool:
    """False where both texts name a unit, and not the same.

    Measures and their powers must agree in order; of other words one side may say more ("apples", "red apples").
    """
    given, expected = unit_of(answer), unit_of(truth)
    if not given or not expected:
        return True
    measures = [[word for word in words if word in _MEASURES.values()] for words in (given, expected)]
    return measures[0] == measures[1] and (set(given) <= set(expected) or set(expected) <= set(given))


def unit_of(text: str) -> list[str]:
    """The words of the unit behind a value, in one form for all ways to write them; none where there is no unit."""
    money = ["dollar"] if _DOLLARS.match(text) else []
    for pattern, usual in (*_SIGNS, _PERCENT):
        text = pattern.sub(usual, text)
    text = " ".join(text.replace("\\$", "").replace("$", "").split()).removesuffix(".")
    if found := _IN_TEXT.search(text):
        words = _words(re.sub(_TEXT, " ", found[1]).replace("}", " "))
        plain = False
    elif found := _PLAIN.fullmatch(text):
        words, plain = _words(found[1]), True
    else:
        return money
    if any(word in NO_UNIT for word in words) or re.search(r"\d", re.sub(r"\^ ?\{?[23]", "", found[1])):
        return []
    if plain and any(len(word) < 3 and word not in _MEASURES.values() for word in words):
        return []  # 5xy is a product
    return money + [word for word in words if word not in _COUNTED]


def _words(text: str) -> list[str]:
    return list(_read(re.sub(r" (?=\^)", "", " ".join(text.lower().replace(".", "").split()))))


def _read(text: str) -> Iterator[str]:
    """Words in the singular, abbreviations written out, powers before what they belong to."""
    for found in _NAMES.finditer(text.replace("mph", "miles per hour")):
        word, power, slash = found.groups()
        if slash:
            yield "per"
            continue
        if word == "in" and found.end() < len(text):  # "in total" is no inch
            continue
        if power:
            yield _POWERS[power]
        yield _MEASURES.get(word) or _MEASURES.get(_singular(word)) or _singular(word)


def _singular(word: str) -> str:
    for ending, instead in _PLURALS:
        if len(word) > 2 and word.endswith(ending) and not word.endswith("ss"):
            return word.removesuffix(ending) + instead
    return word
