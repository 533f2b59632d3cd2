"""Mathematical equality: right on everyday answers, bounded on hostile ones."""

import threading
import time

import pytest

from arpo_megatron.rewards import verify
from arpo_megatron.rewards.verify import math_equal

EQUAL = [
    ("408", "408"),
    (" 408. ", "408"),
    ("+408", "408"),
    ("007", "7"),
    ("0.50", "0.5"),
    (".5", "0.5"),
    ("1,234", "1234"),
    ("1,234,567.0", "1234567"),
    ("\\$43.00", "43"),
    ("$x+1$", "x+1"),
    ("1/2", "\\frac{1}{2}"),
    ("\\dfrac{1}{2}", "\\frac{1}{2}"),
    ("0.5", "\\frac12"),
    ("-6+3\\sqrt3", "3\\sqrt{3} - 6"),
    ("2^{10}", "1024"),
    ("10^{21}", "1000000000000000000000"),
    ("120", "120^\\circ"),
    ("x=5", "5"),
    ("5", "x = 5"),
    ("50\\%", "0.5"),
    ("(1,2)", "( 1, 2 )"),
    ("\\left(-11, \\frac{28}{3}\\right)", "(-11,28/3)"),
    ("\\{2, 1\\}", "\\{1, 2\\}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("\\text{Tuesday}", "Tuesday"),
    ("\\infty", "\\infty"),
    ("\\frac{\\pi}{2}", "\\pi/2"),
    ("0.333333", "\\frac13"),
    ("\\binom{5}{2}", "10"),
]
DIFFERENT = [
    ("407", "408"),
    ("-6", "6"),
    ("", "5"),
    (" ", " "),
    ("1 2", "12"),
    ("0.51", "0.5"),
    ("1/3", "\\frac{1}{2}"),
    ("(1,2)", "(2,1)"),
    ("[1,2]", "(1,2)"),
    ("\\sqrt{2}", "2"),
    ("x+1", "x+2"),
    ("Tuesday", "Monday"),
    ("No results found.", "417"),
    ("4a8", "408"),
    ("\\frac{1}{", "1"),
    ("12, 13", "12"),
    ("3+", "3"),
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_the_same_value_in_another_form_is_right(answer: str, truth: str) -> None:
    assert math_equal(answer, truth)


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_another_value_is_wrong(answer: str, truth: str) -> None:
    assert not math_equal(answer, truth)


def test_answers_in_digits_never_reach_sympy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(answer: str, truth: str) -> bool:
        raise AssertionError(f"{answer} and {truth} went to math-verify")

    monkeypatch.setattr(verify, "_verified", refuse)
    started = time.perf_counter()
    for number in range(1000):
        assert math_equal(str(number), str(number))
        assert not math_equal(str(number), str(number + 1))
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(
    "answer", ["9^{9^{9}}", "9**9**9", "\\binom{10000000}{5000000}", "{" * 499, "\\frac{" * 200_000]
)
def test_a_hostile_answer_is_wrong_within_the_time_limit(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(verify, "_worker", verify._Worker())  # a new one takes the new limit
    started = time.perf_counter()
    assert not math_equal(answer, "1")
    assert time.perf_counter() - started < 1.0 + 3.0 + 10.0  # limit, grace, start of a worker on a busy machine
    assert math_equal("1/2", "\\frac{1}{2}" if "{" in answer else "\\frac{2}{4}")
    verify._worker._stop()


def test_works_outside_the_main_thread_and_from_several_at_once() -> None:
    results: dict[int, bool] = {}

    def work(number: int) -> None:
        results[number] = math_equal(f"\\frac{{{2 * number}}}{{2}}", f"{number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(1, 9), True)
