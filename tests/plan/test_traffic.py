"""Bytes per step through the links, next to the seconds that a plan expects."""

import pytest

from arpo_megatron.jobs import resolve
from arpo_megatron.plan import GPUS, plan
from arpo_megatron.plan.traffic import step_traffic

H100 = GPUS["h100-80"]


@pytest.mark.parametrize("recipe", ["deepsearch_14b+1node", "deepsearch_32b+16nodes", "moe_30b_a3b+split"])
def test_no_phase_of_a_plan_is_faster_than_its_floor(recipe: str) -> None:
    job = resolve.resolve(recipe)
    found, floors = plan(job, H100), {item.name: item.floor_s for item in step_traffic(job, H100)}
    assert floors["gradients and weights"] < found.seconds_by_part["update"]["gradient_reduction"]
    assert floors["weight push"] < found.seconds_by_phase["push"]
    assert floors["rollouts"] < found.seconds_by_phase["rollout"]
    dimensions = [name for name in floors if name.endswith("parallelism")]
    assert dimensions
    for name in dimensions:
        planned = (found.seconds_by_part[phase][name.replace(" ", "_")] for phase in ("logprobs", "update"))
        assert floors[name] < sum(planned)


def test_tensor_parallel_bytes_are_those_of_two_all_reduces_per_layer_and_pass() -> None:
    """In a ring all-reduce each of 8 ranks sends 2 x 7/8 of a bfloat16 hidden state; recomputation makes 4 passes."""
    job = resolve.resolve("deepsearch_32b+4nodes", overrides=["parallel.recompute_layers=null"])
    (rollouts, tensor, gradients, push, saved) = step_traffic(job, H100)
    own = plan(job, H100).tokens / job.parallel.data  # nested packs compute every token once
    assert tensor.size == pytest.approx(64 * 4 * 2 * 2 * 7 / 8 * 5120 * 2 * own, rel=0.01)
    assert rollouts.size == pytest.approx(tensor.size / 4, rel=0.01), "a forward pass, and as many engines as replicas"
    assert (tensor.link, gradients.link, push.link) == ("GPU to its node", "GPU to other nodes", "GPU to its node")
    assert push.size == pytest.approx(2 * plan(job, H100).parameters / 8)
    assert saved.size == 14 * plan(job, H100).parameters


def test_push_through_files_is_a_write_and_a_read_per_engine() -> None:
    job = resolve.resolve("deepsearch_32b+4nodes", overrides=["sync.transport=disk"])
    (push,) = [item for item in step_traffic(job, H100) if item.name == "weight push"]
    assert (push.size, push.link) == (5 * 2 * plan(job, H100).parameters, "filesystem")
    assert push.floor_s < plan(job, H100).seconds_by_phase["push"]
