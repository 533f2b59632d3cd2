"""A plan says what a job needs, and refuses what cannot run."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from arpo_megatron import resolve
from arpo_megatron.errors import UserError
from arpo_megatron.plan import GPUS, Hardware, plan
from arpo_megatron.plan.nodes import nodes_of
from arpo_megatron.plan.report import render, words
from arpo_megatron.plan.search import on_nodes, scaled, search

H100 = GPUS["h100-80"]
REAL = [name for name in resolve.recipe_names() if not resolve.resolve(name).model.made]


@pytest.mark.parametrize("recipe", REAL)
def test_every_layout_of_a_recipe_fits_on_its_gpus(recipe: str) -> None:
    for variant in resolve.variant_names(recipe):
        hardware = GPUS["h200" if variant == "h200" else "h100-80"]
        found = plan(resolve.resolve(f"{recipe}+{variant}"), hardware)
        assert found.fits, (variant, found.reason)
        if variant.endswith(("node", "nodes")):
            assert f"{found.nodes.total}node" == variant.removesuffix("s")
            assert found.nodes.gpus == found.nodes.total * hardware.gpus, "no GPU is left idle"


@pytest.mark.parametrize(
    ("recipe", "overrides", "gpu", "reason"),
    [
        ("deepsearch_14b", ["parallel.tensor=1", "parallel.sequence=false", "parallel.data=16"], "h100-80", "training"),
        ("deepsearch_14b", ["parallel.recompute=none", "train.token_budget=65536"], "h100-80", "activations"),
        ("deepsearch_14b", ["engine.memory_fraction=0.8"], "h100-80", "rollout needs"),
        ("deepsearch_14b", ["engine.memory_fraction=0.09"], "h100-80", "fewer than model.max_length"),
        ("deepsearch_14b", ["parallel.tensor=16", "parallel.data=1"], "h100-80", "give parallel.tensor=8"),
        ("deepsearch_14b", ["engine.tensor=16", "engine.replicas=1"], "h100-80", "exceeds the 8 GPUs"),
        ("deepsearch_14b", ["engine.replicas=8"], "h100-80", "cannot be colocated with 16 trainer ranks"),
        ("deepsearch_14b", ["parallel.pipeline=16", "parallel.tensor=1", "parallel.sequence=false",
                            "parallel.data=1"], "h100-80", "layers (40) cannot be divided"),
        ("deepsearch_14b+fp8", [], "a100-80", "no FP8 products"),
        ("deepsearch_14b", ["engine.quantization=fp8"], "h100-80", "not possible with a qwen3 model"),
        ("deepsearch_32b+8nodes", [], "h100-80", "unknown variant"),
        ("moe_30b_a3b", ["parallel.expert=3", "parallel.data=6"], "h100-80", "experts (128) cannot be divided"),
        ("deepsearch_32b+2nodes", ["optimizer.offload=false"], "h100-80", "needs"),
        ("deepsearch_14b", ["algorithm.router_replay=rollout"], "h100-80", "no experts"),
    ],
)  # fmt: skip
def test_what_cannot_run_does_not_fit_and_the_reason_says_why(
    recipe: str, overrides: list[str], gpu: str, reason: str
) -> None:
    try:
        found = plan(resolve.resolve(recipe, words=overrides), GPUS[gpu])
    except UserError as error:
        assert reason in str(error)
        return
    assert not found.fits
    assert reason in (found.reason or "")


def test_offloading_is_planned_in_host_memory() -> None:
    job = resolve.resolve("deepsearch_32b+2nodes")
    there, here = (plan(replace(job, optimizer=replace(job.optimizer, offload=value)), H100) for value in (True, False))
    assert there.memory.training["optimizer"] == 0 < here.memory.training["optimizer"]
    assert there.memory.host["optimizer"] > here.memory.training["optimizer"]
    assert there.step_seconds["optimizer"] > 10 * here.step_seconds["optimizer"]


def test_more_ranks_divide_the_optimizer_and_the_work() -> None:
    two, four = (plan(resolve.resolve(f"deepsearch_14b+{n}nodes"), H100) for n in (2, 4))
    assert four.memory.training["optimizer"] == pytest.approx(two.memory.training["optimizer"] / 2)
    assert four.memory.training["weights"] == two.memory.training["weights"]
    assert four.step_seconds["forward_backward"] == pytest.approx(two.step_seconds["forward_backward"] / 2)


def test_ranks_without_a_tree_of_their_own_gain_nothing() -> None:
    """Eight questions a minibatch: with 32 data-parallel ranks three in four have nothing to do."""
    some, many = (plan(resolve.resolve(f"deepsearch_14b+{n}nodes"), H100) for n in (4, 16))
    assert many.step_seconds["forward_backward"] == some.step_seconds["forward_backward"]


def test_decoding_is_bounded_by_the_memory_and_training_by_the_products() -> None:
    """The parts change with the hardware's figures that they come from, and with no other."""
    job = resolve.resolve("deepsearch_14b")
    before = plan(job, H100).step_seconds
    memory = plan(job, replace(H100, memory_speed=2 * H100.memory_speed)).step_seconds
    products = plan(job, replace(H100, bf16_flops=2 * H100.bf16_flops)).step_seconds
    assert memory["decode"] < 0.8 * before["decode"] and products["decode"] == before["decode"]
    assert products["forward_backward"] < 0.6 * before["forward_backward"]
    assert memory["forward_backward"] == before["forward_backward"]
    assert products["prefill"] == pytest.approx(before["prefill"] / 2)


def test_training_takes_no_less_than_its_flops_at_the_peak() -> None:
    found = plan(resolve.resolve("deepsearch_14b"), H100)
    floor = 6 * found.parameters * found.tokens / (found.nodes.gpus * H100.bf16_flops)
    assert floor < found.step_seconds["forward_backward"] < 5 * floor


def test_split_engines_have_nodes_of_their_own_and_roll_out_meanwhile() -> None:
    found = plan(resolve.resolve("deepsearch_14b+split"), H100)
    assert (found.nodes.trainer, found.nodes.engine) == (2, 2)
    assert "kv_cache" in found.memory.engine and "kv_cache" not in found.memory.rollout
    assert found.seconds < sum(found.step_seconds.values())


@pytest.mark.parametrize(
    ("overrides", "trainer", "engine"),
    [
        ([], 2, 0),
        (["engine.placement=split"], 2, 2),
        (["engine.placement=auto"], 2, 0),
        (["parallel.data=1", "engine.replicas=1", "engine.placement=split"], 1, 0),
    ],
)
def test_nodes_follow_from_ranks_engines_and_placement(overrides: list[str], trainer: int, engine: int) -> None:
    found = nodes_of(resolve.resolve("deepsearch_14b", words=overrides), 8)
    assert (found.trainer, found.engine) == (trainer, engine)


def test_a_number_of_nodes_takes_the_recipes_layout_or_more_data_parallel_ranks() -> None:
    assert on_nodes("deepsearch_14b", 4, H100) == resolve.resolve("deepsearch_14b+4nodes")
    three = on_nodes("deepsearch_14b", 3, H100)
    assert (three.parallel.data, three.engine.replicas) == (6, 6)
    with pytest.raises(UserError, match="cannot be divided"):
        scaled(resolve.resolve("deepsearch_14b"), 1, 6)
    assert on_nodes("deepsearch_14b+fp8", 4, H100) == resolve.resolve("deepsearch_14b+fp8+4nodes")


def test_the_words_of_a_found_layout_give_its_plan() -> None:
    job = resolve.resolve("deepsearch_14b")
    found = search(job, H100)
    assert len(found.best) == 5
    assert found.fit + sum(count for _, count in found.failed) == found.tried
    own = plan(job, H100)
    for best in found.best:
        again = plan(resolve.resolve("deepsearch_14b", words=words(best, job).split()), H100)
        assert again.fits and again.to_dict() == best.to_dict()
        assert best.seconds <= own.seconds


def test_an_unknown_gpu_is_named() -> None:
    with pytest.raises(UserError, match="unknown GPU 'h1000'; known: h100-80, h200, a100-80"):
        Hardware.named("h1000")


def test_parts_add_up_in_text() -> None:
    found = plan(resolve.resolve("deepsearch_14b"), H100)
    text = render(found)
    assert "Qwen/Qwen3-14B, 14.77 billion parameters" in text
    assert text.endswith("fits\n")
    for part in (*found.memory.training, *found.memory.rollout, *found.step_seconds):
        assert part.replace("_", " ") in text


def arpo(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "arpo_megatron", *arguments], capture_output=True, text=True)


def test_the_command_gives_one_json_object_and_fails_where_the_job_does_not_fit() -> None:
    done = arpo("plan", "moe_30b_a3b", "--json", "--no-search")
    found = json.loads(done.stdout)
    assert (done.returncode, found["fits"], found["parameters"]) == (0, True, 30_532_122_624)
    assert {"weights", "gradients", "optimizer", "activations", "logits"} <= found["memory_per_rank_bytes"].keys()
    assert {"prefill", "decode", "forward_backward", "weight_push"} <= found["step_seconds"].keys()
    done = arpo("plan", "moe_30b_a3b", "--gpu", "h100-80", "--no-search", "engine.memory_fraction=0.9")
    assert done.returncode == 1 and "does not fit: rollout needs" in done.stdout


def test_planning_needs_neither_torch_nor_the_models_files(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom arpo_megatron import resolve\nfrom arpo_megatron.plan import GPUS, plan\n"
        "from arpo_megatron.plan.search import search\n"
        "assert plan(resolve.resolve('reasoning_3b'), GPUS['h100-80']).fits\n"
        "print(*sorted({'torch', 'transformers', 'megatron', 'sglang', 'nemo_run'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
