"""Notation of mathematical answers: one form for variants that never change the meaning, before anything is computed.

Everything here is linear in the length of the text. `verify` does the computing.
"""

import re
import unicodedata
from collections.abc import Collection
from decimal import Decimal
from fractions import Fraction

from arpo_megatron.rewards.math.units import without_unit

_INVISIBLE = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:]|\\?\$|[€£]")
_LOOSE_SPACE = re.compile(r"(?<!\w) | (?!\w)")
_SYNONYMS = (
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\varnothing", "\\emptyset"),
    ("°", "^\\circ"),
    ("p.m.", "pm"),
    ("a.m.", "am"),
    ("≈", "\\approx"),
    ("**", "^"),
    ("\u2212", "-"),
    *(
        (sign, f"\\frac{{{above}}}{{{below}}}")
        for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
        for above, _, below in [unicodedata.normalize("NFKC", sign).partition("\u2044")]
    ),
)
_ROOT = re.compile(r"(?<![²³⁴-⁹])√ ?(\d+(?:\.\d+)?|[a-zA-Z]|\([^()]*\)|(?=\{))")
_DASH = re.compile(
    r"(?:^|(?<=[(\[{,=^]))\u2013(?=[\d.\\a-zA-Z(])"
)  # an en dash as minus; between numbers it means "to"
_GROUPS_OF_THREE = re.compile(r"(?<![\d.])\d{1,3}(?:\\ \d{3})+(?!\d)")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,3})?")
_MIXED = re.compile(r"([+-]?\d+) (\d+)/(\d+)")
_POINT_NAME = re.compile(r"[A-Z](?=\(.*\)$)")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf)\{([^{}]*)\}")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\^(?:\\circ|\{\\circ\})")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(
    rf"([+-]?\d{{1,15}}(?:\.\d{{1,15}})?)(?: |\\(?:text|mbox)\{{ ?)({'|'.join(_SCALES)})(?:\}}|(?= )|$)"
)
_SCIENTIFIC = re.compile(r"([+-]?\d{1,15}(?:\.\d{0,12})?)(?:e|(?:\\times|\\cdot|\*)10\^)\{?([+-]?\d{1,3})\}?")
_REPEATING = re.compile(r"(?<!\d)(\d{0,20})\.(\d{0,20})\\overline\{(\d{1,20})\}")
_PART_OF = re.compile(r"(?<![\w/^_}])(\d+)/(\d+) (?=[a-zA-Z])")
_BACKSLASH = "\\"
_SHORT_FRACTION = re.compile(r"\\frac (\d) (\d)")
_UNCERTAIN = re.compile(
    r"(?<![\w^.])\d[\d.]*(?:\\q?quad|\\ |[ ~'\"])+\d"  # two numbers, which would be added
    r"|\\[lc]?dots|…|\.\."  # something is left out
    r"|[\d)\]}]_"  # a base
)
_PERCENT = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:\\?%| ?percent|\\(?:text|mbox)\{ ?percent\})")
_UNIT_SPACE = re.compile(r"(?<=\d) (?=[a-z])")
_BASE = re.compile(r"(-?[0-9A-Z]+)_\{?(\d+)\}?")


def canonicalise(text: str, other_unit: Collection[str] = (), *, expected: bool = False) -> str:
    """Return the text without white space, currency signs, sizes of brackets and fractions, and names of units and
    points.

    Args:
        text: an answer, or the expected one.
        other_unit: the words of the other answer's unit.
        expected: whether this is the expected answer.
    """
    text = _INVISIBLE.sub("", text)
    for word, usual in _SYNONYMS:
        text = text.replace(word, usual)
    text = " ".join(text.split()).removesuffix(".")
    text = _GROUPS_OF_THREE.sub(lambda found: found[0].replace("\\ ", ""), _DASH.sub("-", text))
    text = _ROOT.sub(lambda found: f"\\sqrt{{{found[1]}}}" if found[1] else "\\sqrt", text)
    if text.isdecimal():
        return text
    if (whole := _WRAPPER.fullmatch(text)) and whole[1].strip()[:1].isdecimal():
        text = whole[1].strip()
    if scaled := _SCALED.match(text):
        text = f"{Decimal(scaled[1]) * _SCALES[scaled[2]]:f}{text[scaled.end() :]}"
    if _TRIGONOMETRY.search(text):  # sin of 30 degrees is not sin of 30; elsewhere degrees are a unit
        text = _DEGREES.sub(r"{(\1\\cdot\\pi/180)}", text)
    text = _LOOSE_SPACE.sub("", without_unit(text, other_unit, expected=expected)).removesuffix(".")
    if mixed := _MIXED.fullmatch(text):
        return f"{mixed[1]}\\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    if scientific := _SCIENTIFIC.fullmatch(text):
        return f"{Decimal(scientific[1]).scaleb(int(scientific[2])):f}"
    text = _REPEATING.sub(_fraction, _PART_OF.sub(r"\\frac{\1}{\2}", _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)))
    if text.endswith("%") and not re.search("[,;=]", text) and not _PERCENT.fullmatch(text):
        text = f"\\frac{{{text.rstrip('%').removesuffix(_BACKSLASH)}}}{{100}}"
    text = _POINT_NAME.sub("", text)
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def is_unambiguous(answer: str) -> bool:
    """Whether a canonical text has one meaning: LaTeX parsers accept two numbers in a row, dots and bases without
    error.
    """
    return not _UNCERTAIN.search(answer)


def compare_without_algebra(answer: str, truth: str) -> bool | None:
    """Whether two canonical texts are equal, if that can be decided without algebra; None: it cannot."""
    if answer == truth or same_text(answer, truth):
        return bool(truth)
    if not answer:
        return False
    if (same := _as_numbers(answer, truth)) is not None:
        return same
    given, expected = _BASE.fullmatch(answer), _BASE.fullmatch(truth)
    if given and expected:
        return given[1] == expected[1] and int(given[2]) == int(expected[2])
    if given and given[1].isdecimal() and _NUMBER.fullmatch(truth):
        return False
    return None if _brackets_agree(answer, truth) else False


def same_text(answer: str, truth: str) -> bool:
    r"""Whether two texts are equal except for white space and \text{}; blank texts are not."""
    expected = _unwrap(truth)
    return bool(expected) and _unwrap(answer) == expected


def _as_numbers(answer: str, truth: str) -> bool | None:
    """Compare two numbers, with or without a per cent sign; None if one of them is not a number.

    50% is 0.5, and also 50, because answers to "what percent" are written with and without the sign. Below 1% only a
    hundredth is accepted: 0.35% is not 0.35.
    """
    signs = [_PERCENT.fullmatch(text) for text in (answer, truth)]
    shares = [Decimal(sign[1]) for sign in signs if sign]
    plain = [Decimal(text) for text in (answer, truth) if _NUMBER.fullmatch(text)]
    if len(shares) + len(plain) < 2:
        return None
    if len(plain) == 2:
        return nearly_equal(plain[0], plain[1])
    if len(shares) == 2:
        return shares[0] == shares[1]
    return plain[0] == shares[0] / 100 or (plain[0] == shares[0] and abs(plain[0]) >= 1)


def nearly_equal(given: Decimal, expected: Decimal) -> bool:
    """Whether both are equal, or one is rounded to at least six decimals with four significant digits."""
    if given == given.to_integral_value() and expected == expected.to_integral_value():
        return given == expected
    return abs(given - expected) <= min(Decimal("5e-7"), abs(expected) / 10**4)


def _fraction(repeating: re.Match[str]) -> str:
    r"""Return a fraction for a repeating decimal: 0.1666..., written 0.1\overline{6}, is 15/90."""
    whole, first, period = repeating.groups()
    value = Fraction(
        int(f"{whole}{first}{period}") - int(f"0{whole}{first}"), (10 ** len(period) - 1) * 10 ** len(first)
    )
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _unwrap(text: str) -> str:
    r"""Remove \text{} and similar wrappers around words."""
    plain = _LOOSE_SPACE.sub("", " ".join(_WRAPPER.sub(r"\1", text).split())).removesuffix(".")
    return _UNIT_SPACE.sub("", plain)


def _brackets_agree(answer: str, truth: str) -> bool:
    """Return False if one is a set and the other an interval or point, or if intervals have different ends.

    Only whole answers without inner brackets are compared, and only if both have brackets: a list may be written
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
