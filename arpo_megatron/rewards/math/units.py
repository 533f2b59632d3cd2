"""The unit that an answer names, so that 12 minutes are not 12 hours.

Names are compared, nothing is converted: 60 minutes are not 1 hour. If only one side names a unit there is nothing to
compare, because the expected texts of the benchmarks often leave it out. A word counts as a unit only if it looks like
one: 3 halves, 3 doubled and 3 mod seven are not 3.
"""

import re
from collections.abc import Collection, Iterator

_TEXT = r"\\(?:text|textbf|textit|mbox|mathrm|mathbf)\{"
_POWER = r"\.?(?:\^\{?[23]\}?)?"
_WORD = rf"[A-Za-z]+{_POWER}"
_IN_TEXT = re.compile(rf"(?<=.)((?:{_TEXT}[^{{}}]*\}}{_POWER}[ /]?)+)$")
_PLAIN = re.compile(rf"(?:[A-Za-z] ?= ?)?[+-]?[\d.,:/ ]*\d ?({_WORD}(?:[ /]{_WORD})*)")
_BEHIND = re.compile(rf"(?<=[\w)}}!])\s?((?:{_TEXT}[A-Za-z ./-]*\}}{_POWER}[ /]?)+)$")
_BEHIND_PLAIN = re.compile(rf"(?:(?<=[\d)}}]) |(?<=\d))({_WORD}(?:[ /]{_WORD})*)$")
_DEGREE = r"(?:°|\^(?:\\circ|\{\\circ\}))"
_TEMPERATURES = tuple(
    (re.compile(rf"{_DEGREE} ?(?:{name[0]}|{_TEXT} ?{name[0]}\}})$"), rf"\\text{{ degrees {name} }}")
    for name in ("Celsius", "Fahrenheit")
)
_SIGNS = (
    (re.compile(r"\\[!,;: ]|~"), " "),
    (re.compile(r"\b([ap])\.m\."), r"\1m"),
    *_TEMPERATURES,
    (re.compile(_DEGREE), r"\\text{ degrees }"),
)
_PERCENT = (re.compile(r"\\?%"), r"\\text{ percent }")
_ANY = re.compile("[A-Za-z%°$€£]")
_DIGITS = re.compile(r"[+-]?[\d.,:/ ]+")
_TO_THE_POWER = (("squared", "^2"), ("cubed", "^3"))
_DOLLARS = re.compile(r"\s*[+-]?(?:\\\$|\$(?=[^$]*$))")
_MONEY = {"€": "euro", "£": "pound"}
_NAMES = re.compile(r"([a-z]+)(?:\^\{?([23])\}?)?|(/)")
_POWERS = {"2": "square", "3": "cubic"}
_PLURALS = (("ies", "y"), ("ches", "ch"), ("shes", "sh"), ("xes", "x"), ("s", ""))

_MEASURES = {
    name: names.split()[0]
    for names in (
        *("square sq", "cubic cu", "per", "percent", "degree deg", "celsius", "fahrenheit", "radian rad"),
        *("dollar usd", "cent", "euro"),
        *("second s sec", "minute min", "hour h hr", "day", "week", "month", "year yr", "am", "pm"),
        *("inch in", "foot ft feet", "yard yd", "mile mi", "acre", "gallon", "pound lb", "ounce oz", "ton"),
        *("m meter metre", "km kilometer kilometre", "cm centimeter centimetre", "mm millimeter millimetre"),
        *("g gram", "kg kilogram", "mg milligram", "l liter litre", "ml milliliter millilitre"),
        *("person people", "child children"),
    )
    for name in names.split()
}
"""Spellings of a measure, in the singular -> its name here."""
_SYMBOLS = frozenset(("N", "J", "W", "V", "K", "Hz", "Pa", "kW", "mol"))
r"""Units if they are set in \text{}; elsewhere they are variables."""
_COUNTED = {"unit"}
"""Words that only say that there is a unit."""
NO_UNIT = frozenset(("and", "or", "to", "times", "over", "pi", "sqrt", "half", "dozen", "sin", "cos", "tan", "log"))
NO_UNIT |= {"hundred", "thousand", "million", "billion", "trillion", "plus", "minus", "more", "less", "than"}
NO_UNIT |= {"is", "are", "was", "not", "no", "wrong", "if", "but", "except", "without", "versus", "vs"}
NO_UNIT |= {"squared", "cubed", "doubled", "tripled", "halved", "factorial"}
NO_UNIT |= {"mod", "modulo", "choose", "point", "power"}
"""Words that are not a unit after a number."""
_NUMERAL = re.compile(
    r"(?:zero|one|two|three|four|five|six|seven|eight?|nine?|ten|eleven|twelve|twelf|\w{3,5}teen|\w{3,5}t(?:y|ie)|dozen"
    r"|hundred|thousand|\w{1,6}illion|half|halve|third|quarter|fif|hal)(?:e?s|th|ths|fold)?"
)
_PEOPLE_AND_SHEEP = frozenset(("people", "children", "men", "women", "feet", "teeth", "mice", "geese", "sheep", "fish"))


def same_unit(given: list[str], expected: list[str]) -> bool:
    """Return False if both sides name a unit (`unit_of`), and not the same one.

    Measures and their powers must agree in order. Of other words one side may have more ("apples", "red apples").
    """
    if not given or not expected:
        return True
    measures = [[word for word in words if word in _MEASURES.values()] for words in (given, expected)]
    return measures[0] == measures[1] and (set(given) <= set(expected) or set(expected) <= set(given))


def unit_of(text: str) -> list[str]:
    """Return the words of the unit after a value, in one form for all spellings; empty without a unit."""
    if not _ANY.search(text):
        return []
    sign = text.strip().lstrip("+-")[:1]
    money = ["dollar"] if _DOLLARS.match(text) else [_MONEY[sign]] if sign in _MONEY else []
    for pattern, usual in (*_SIGNS, _PERCENT):
        text = pattern.sub(usual, text)
    text = re.sub("[€£]", "", text.replace("\\$", "").replace("$", ""))
    text = _in_powers(" ".join(text.split()).removesuffix("."))
    if found := _IN_TEXT.search(text):
        words = _words(re.sub(_TEXT, " ", found[1]).replace("}", " "))
        plain = False
    elif found := _PLAIN.fullmatch(text):
        words, plain = _words(found[1]), True
    else:
        return money
    if any(map(_no_unit, words)) or re.search(r"\d", re.sub(r"\^ ?\{?[23]", "", found[1])):
        return []
    if plain and any(len(word) < 3 and word not in _MEASURES.values() for word in words):
        return []  # 5xy is a product
    return money + [word for word in words if word not in _COUNTED]


def without_unit(text: str, named: Collection[str], *, expected: bool) -> str:
    """Return a value without its unit, or the text itself if it is not certain that it ends with a unit.

    Args:
        text: with single spaces.
        named: the words of the other side's unit, which count as units here, too.
        expected: this is the expected answer, in which any word not known to be something else is a unit.
    """
    if text[-1:].isdecimal() and "^" not in text:
        return text
    for sign, _ in (*_TEMPERATURES, _SIGNS[-1]):
        if (found := sign.search(text, max(0, len(text) - 20))) and found.end() == len(text):
            return text[: found.start()]
    text = _in_powers(text)
    if found := _BEHIND.search(text):
        unit = re.sub(_TEXT, " ", found[1]).replace("}", " ")
        certain, symbol = True, unit.strip() in _SYMBOLS
    elif found := _BEHIND_PLAIN.search(text):
        unit, symbol = found[1], False
        words = _words(unit)
        if found[0][0] == " " and _DIGITS.fullmatch(text[: found.start()]):
            certain = True
        else:  # 5m and \sqrt{3} m may be products
            certain = set(words) <= set(named) or (len(unit) > 1 and all(word in _MEASURES.values() for word in words))
    else:
        return text
    value = text[: found.start()].rstrip()
    likely = expected or value == "1"
    return value if symbol or (certain and _is_unit(unit.lower(), named, likely=likely)) else text


def _is_unit(text: str, named: Collection[str], *, likely: bool) -> bool:
    """Whether this is a known measure, a plural, or a word of the other side; if a unit is likely, also any longer
    word.
    """
    written, words = re.findall("[a-z]+", text), _words(text)
    if any(map(_no_unit, written)) or not words:
        return False
    measures = [word in _MEASURES.values() for word in words]
    if set(words) <= set(named) or any(measures) or any(map(_plural, written)):
        return True
    return likely and all(len(word) > 2 for word in words)


def _plural(word: str) -> bool:
    return word in _PEOPLE_AND_SHEEP or (len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")))


def _no_unit(word: str) -> bool:
    return word in NO_UNIT or bool(_NUMERAL.fullmatch(word))


def _in_powers(text: str) -> str:
    """Write meters squared as m^2; leave 3 squared."""
    for word, power in _TO_THE_POWER:
        if text.endswith(f" {word}") and text[-len(word) - 2].isalpha():
            text = text.removesuffix(f" {word}") + power
    return text


def _words(text: str) -> list[str]:
    return list(_read(re.sub(r" (?=\^)", "", " ".join(text.lower().replace(".", "").split()))))


def _read(text: str) -> Iterator[str]:
    """Yield words in the singular, abbreviations written out, powers before the words they belong to."""
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
