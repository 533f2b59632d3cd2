"""Gradients and updates hold when additions come in any order, as atomics and collectives of a GPU make them.

`pytest --any-order tests/actor` runs every test of the actor so.
"""

import pytest
import torch
import torch.distributed as dist

from arpo_megatron.actor import parallel
from arpo_megatron.config import ParallelConfig
from tests.actor import cases, proof
from tests.actor.test_exactness import LAYOUTS, TOLERANCE, Solutions, errors, runs_of
from tests.any_order import any_order
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(1000)
FOUR_DATA = {"data": 4, "distributed_optimizer": True}
"""Gradients of four ranks are summed; each other layout has groups of two, whose sum has one order, or of all ranks."""


@pytest.fixture(scope="module")
def solutions(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Solutions:
    return Solutions(tmp_path_factory.mktemp("any_order"))


def check(solutions: Solutions, layout: str, problem: str, family: str) -> None:
    found = torch.load(solutions.root / f"{layout}.{problem}.{family}.pt")
    for packing, values in found["gradients"].items():
        for name, error in errors(values, solutions.gradients(problem, family)).items():
            assert error <= TOLERANCE, (layout, packing, name, error)


def test_gradients_of_a_mixture_do_not_rely_on_the_order_of_additions(solutions: Solutions) -> None:
    with any_order() as mode:
        proof.compute(solutions.root, {"alone": {}}, {"alone": [("clip", "experts")]})
    check(solutions, "alone", "clip", "experts")
    assert sum(mode.counts.values()) > 100, "the operations of the mixture are not among those that are changed"


def test_gradients_of_four_ranks_do_not_rely_on_the_order_of_ranks(solutions: Solutions) -> None:
    run_ranks(sum_of_ranks, ranks=4, any_order=True)
    run_ranks(
        proof.compute_and_leave,
        solutions.root,
        {"data": FOUR_DATA},
        {"data": [("clip", "tied")]},
        ranks=4,
        any_order=True,
    )
    check(solutions, "data", "clip", "tied")


def sum_of_ranks() -> None:
    """Assert that the collectives sum in an order that changes, which all ranks draw alike."""
    cases.join(ParallelConfig(data=4))
    sums = []
    for _ in range(12):
        value = torch.tensor([1e8, -1e8, 1.0, 1.0][dist.get_rank()])
        dist.all_reduce(value)
        sums.append(float(value))
        assert parallel.gather_objects(float(value)) == [float(value)] * 4
    assert len(set(sums)) > 1
    parallel.destroy()


@pytest.mark.slow_campaign
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_gradients_of_all_layouts_do_not_rely_on_the_order_of_additions(solutions: Solutions, ranks: int) -> None:
    runs = {
        name: [run for run in runs_of(name, full=True) if run[0] not in ("adamw", "all terms")]
        for name in LAYOUTS[ranks]
    }
    run_ranks(proof.compute_and_leave, solutions.root, LAYOUTS[ranks], runs, ranks=ranks, timeout_s=900, any_order=True)
    for name, own in runs.items():
        for problem, family in own:
            check(solutions, name, problem, family)
