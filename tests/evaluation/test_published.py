"""The published rows name benchmarks of their suite, and cells fit the published averages."""

import math

from arpo_megatron.evaluation.benchmarks import SUITES
from arpo_megatron.evaluation.published import ROWS


def test_published_cells_belong_to_the_suite_and_have_the_published_average() -> None:
    assert len({(row.model, row.method, row.suite, row.k) for row in ROWS}) == len(ROWS)
    complete = 0
    for row in ROWS:
        assert set(row.values) <= set(SUITES[row.suite])
        assert all(0 < value < 100 for value in row.values.values())
        if len(row.values) == len(SUITES[row.suite]) and row.average is not None:
            mean = sum(row.values.values()) / len(row.values)
            assert math.isclose(mean, row.average, abs_tol=0.051), row  # both are rounded to 0.1
            complete += 1
    assert complete == 1


def test_every_model_of_table_1_has_the_same_rows() -> None:
    """Direct reasoning, prompted tools, and the four methods of training, each with its published average."""
    methods = {"no tools", "TIR prompting", "GRPO", "REINFORCE++", "DAPO", "ARPO"}
    table = {row.model: set[str]() for row in ROWS if row.suite == "reasoning"}
    for row in ROWS:
        if row.suite == "reasoning" and row.average is not None:
            table[row.model].add(row.method)
    assert table == dict.fromkeys(("Qwen2.5-3B", "Llama3.1-8B", "Qwen2.5-7B"), methods)
