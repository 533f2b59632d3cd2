"""Token F1 and exact match as SQuAD and HotpotQA compute them."""

import pytest

from arpo_megatron.rewards.qa import exact_match, normalise, token_f1

PAIRS = [  # answer, truth, F1, exact match
    ("Sam Bankman-Fried", "sam bankmanfried", 1.0, 1.0),
    ("The Music Building", "Music building.", 1.0, 1.0),
    ("Berlin", "Berlin, Germany", 2 / 3, 0.0),
    ("British people", "British", 2 / 3, 0.0),
    ("Orbison with T Bone Burnett", "T Bone Burnett", 3 / 4, 0.0),
    ("London", "Berlin", 0.0, 0.0),
    ("yes", "Yes", 1.0, 1.0),
    ("yes it is", "yes", 0.0, 0.0),
    ("no", "yes", 0.0, 0.0),
    ("noanswer", "Paris", 0.0, 0.0),
    ("", "Paris", 0.0, 0.0),
    ("the", "a", 0.0, 1.0),
    ("to be or not to be", "to be", 1 / 2, 0.0),
    ("417", "417", 1.0, 1.0),
]


@pytest.mark.parametrize(("answer", "truth", "f1", "exact"), PAIRS)
def test_f1_and_exact_match_of_known_pairs(answer: str, truth: str, f1: float, exact: float) -> None:
    assert token_f1(answer, truth) == pytest.approx(f1)
    assert token_f1(truth, answer) == pytest.approx(f1)
    assert exact_match(answer, truth) == exact


def test_normalisation_drops_case_punctuation_articles_and_spaces() -> None:
    assert normalise("  The  U.S.A., a   theory\n") == "usa theory"
