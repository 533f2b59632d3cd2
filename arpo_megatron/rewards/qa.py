"""Exact match and token F1 of short answers, normalised as in SQuAD (arXiv 1606.05250, section 6.1)."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:bf|it|rm|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}")
_UNGRADED = ("yes", "no", "noanswer")


def normalise(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation, articles and repeated white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def without_latex(text: str) -> str:
    r"""Return an answer in words without the commands around them: \text{Paris} -> Paris."""
    while (plain := _TEXT_COMMAND.sub(r"\1", text)) != text:
        text = plain
    return text.replace("\\ ", " ").replace("~", " ")


def best(measure: Callable[[str, str], float], answer: str, truths: Sequence[str]) -> float:
    """Return the largest value of a measure of an answer over all right answers."""
    return max(measure(answer, truth) for truth in truths)


def exact_match(answer: str, truth: str) -> float:
    """Return 1.0 if both texts are equal after normalisation, else 0.0."""
    return float(normalise(answer) == normalise(truth))


def token_f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of token precision and recall after normalisation, in [0, 1].

    "yes", "no" and "noanswer" are right or wrong as a whole, as in HotpotQA's scorer.
    """
    given, expected = normalise(answer), normalise(truth)
    if given != expected and (given in _UNGRADED or expected in _UNGRADED):
        return 0.0
    given_tokens, expected_tokens = given.split(), expected.split()
    common = sum((Counter(given_tokens) & Counter(expected_tokens)).values())
    if common == 0:
        return 0.0
    return 2.0 * common / (len(given_tokens) + len(expected_tokens))
