"""Plans: memory, time and layouts of a job, and why a job cannot run."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.plan import GPUS, Hardware, JobEstimate, plan
from arpo_megatron.plan.nodes import scale_to_nodes
from arpo_megatron.plan.parameters import stage_parameters, whole_model
from arpo_megatron.plan.report import render, render_search
from arpo_megatron.plan.search import search

H100 = GPUS["h100-80"]
REAL = [name for name in resolve.recipe_names() if not resolve.resolve(name).model.is_generated]


@pytest.mark.parametrize("recipe", REAL)
def test_recipe_layouts_fit_their_gpus(recipe: str) -> None:
    names = set(resolve.variant_names(recipe))
    assert names >= {"1node", "2nodes", "4nodes", "16nodes", "h200"} or names >= {"1gpu", "2gpus", "4gpus", "1node"}
    for variant in resolve.variant_names(recipe):
        hardware = GPUS[resolve.gpu_of(f"{recipe}+{variant}")]
        found = plan(resolve.resolve(f"{recipe}+{variant}"), hardware)
        assert found.fits, (variant, found.reason)
        assert not found.warnings, variant
        assert found.seconds_by_phase.get("push", 0) <= 5, variant
        if variant.endswith(("node", "nodes")):
            assert f"{found.nodes}node" == variant.removesuffix("s")
            assert found.layout and found.layout.gpus_used == found.nodes * hardware.gpus, "no GPU is left idle"
        if variant.endswith(("gpu", "gpus")):
            assert f"{found.gpus}gpu" == variant.removesuffix("s")


NEEDS_WHOLE_EXPERTS = {"16nodes": 4, "split": 4, "h200": 8}
"""Layouts of the mixture whose trainer ranks have parts of FP8 blocks, and the expert parallelism that ends that."""


@pytest.mark.parametrize("recipe", [name for name in REAL if "fp8_engine" in resolve.variant_names(name)])
def test_fp8_engines_use_the_same_gpus_in_every_layout(recipe: str) -> None:
    for layout in resolve.layout_names(recipe):
        hardware = GPUS[resolve.gpu_of(f"{recipe}+{layout}")]
        plain, *both = (
            resolve.resolve(f"{recipe}+{variants}")
            for variants in (layout, f"{layout}+fp8_engine", f"fp8_engine+{layout}")
        )
        assert both[0] == both[1]
        assert both[0].parallel == plain.parallel
        assert both[0].engine.replicas * both[0].engine.tensor == plain.engine.replicas * plain.engine.tensor
        found = plan(both[0], hardware)
        if recipe == "moe_30b_a3b" and layout in NEEDS_WHOLE_EXPERTS:
            assert "MLP width of trainer ranks (192)" in (found.reason or "")
            override = f"parallel.expert={NEEDS_WHOLE_EXPERTS[layout]}"
            found = plan(resolve.resolve(f"{recipe}+{layout}+fp8_engine", overrides=[override]), hardware)
        if layout == "a100":
            assert "no FP8 products" in (found.reason or "")
        else:
            assert found.fits, (layout, found.reason)


@pytest.mark.parametrize(
    ("recipe", "overrides", "gpu", "reason"),
    [
        ("deepsearch_14b", ["parallel.tensor=1", "parallel.sequence=false", "parallel.data=16"], "h100-80", "training"),
        ("deepsearch_14b", ["parallel.recompute=none", "parallel.recompute_layers=null",
                            "train.token_budget=65536"], "h100-80", "activations"),
        ("deepsearch_14b", ["engine.memory_fraction=0.8"], "h100-80", "rollout needs"),
        ("deepsearch_14b", ["engine.memory_fraction=0.045"], "h100-80", "fewer than model.max_length"),
        ("deepsearch_14b", ["parallel.tensor=16", "parallel.data=1"], "h100-80", "give parallel.tensor=8"),
        ("deepsearch_14b", ["engine.tensor=16", "engine.replicas=1"], "h100-80", "exceeds the 8 GPUs"),
        ("deepsearch_14b", ["engine.replicas=4"], "h100-80", "than there are trainer ranks: 32 GPUs, 16 ranks"),
        ("deepsearch_14b", ["parallel.pipeline=16", "parallel.tensor=1", "parallel.sequence=false",
                            "parallel.data=1"], "h100-80", "layers (40) cannot be divided"),
        ("deepsearch_14b", ["parallel.recompute=full", "parallel.recompute_layers=41"], "h100-80",
         "give parallel.recompute_layers=40 or null"),
        ("deepsearch_14b+fp8", [], "a100-80", "no FP8 products"),
        ("reasoning_4b+a100+fp8_engine", [], "a100-80", "no FP8 products, and SGLang would"),
        ("moe_30b_a3b+fp8_engine", ["engine.expert=1"], "h100-80", "engine.expert=4 divides no expert"),
        ("deepsearch_32b+8nodes", [], "h100-80", "unknown variant"),
        ("moe_30b_a3b", ["parallel.expert=3", "parallel.data=6"], "h100-80", "experts (128) cannot be divided"),
        ("deepsearch_32b+1node", ["optimizer.offload=false"], "h100-80", "needs"),
        ("deepsearch_14b", ["algorithm.router_replay=rollout"], "h100-80", "give algorithm.router_replay=none"),
    ],
)  # fmt: skip
def test_impossible_job_has_a_reason(recipe: str, overrides: list[str], gpu: str, reason: str) -> None:
    try:
        found = plan(resolve.resolve(recipe, overrides=overrides), GPUS[gpu])
    except UserError as error:
        assert reason in str(error)
        return
    assert not found.fits
    assert reason in (found.reason or "")


def passes(found: JobEstimate) -> float:
    """Return the seconds of an update's forward and backward passes."""
    update = found.seconds_by_part["update"]
    return sum(update.values()) - update["gradient_reduction"] - update["optimizer"]


def test_offloaded_state_counts_as_host_memory() -> None:
    job = resolve.resolve("deepsearch_32b+1node")
    there, here = (plan(replace(job, optimizer=replace(job.optimizer, offload=value)), H100) for value in (True, False))
    assert there.memory.training["optimizer"] == 0 < here.memory.training["optimizer"]
    assert there.memory.host["optimizer"] > here.memory.training["optimizer"]
    assert there.seconds_by_part["update"]["optimizer"] > 10 * here.seconds_by_part["update"]["optimizer"]
    half = plan(replace(job, optimizer=replace(job.optimizer, offload=True, offload_fraction=0.5)), H100)
    assert half.memory.training["optimizer"] == pytest.approx(here.memory.training["optimizer"] / 2)
    assert half.memory.host["optimizer"] == pytest.approx(there.memory.host["optimizer"] / 2)
    with pytest.raises(UserError, match=r"offload_fraction=0\.5 needs optimizer\.offload=true"):
        resolve.resolve("deepsearch_14b", overrides=["optimizer.offload_fraction=0.5"])


@pytest.mark.parametrize("nodes", ["1node", "4nodes", "16nodes"])
def test_expert_gradients_are_reduced_over_expert_replicas(nodes: str) -> None:
    """Expert parallelism 8: with tensor 4 x data 2 one rank has an expert, with 4 x 8 four, with 4 x 32 sixteen."""
    tensor, data = {"1node": (4, 2), "4nodes": (4, 8), "16nodes": (4, 32)}[nodes]
    layout = [f"parallel.tensor={tensor}", f"parallel.data={data}", "parallel.sequence=true", "parallel.expert=8"]
    job = resolve.resolve(f"moe_30b_a3b+{nodes}", overrides=["optimizer.offload=false", "parallel.pipeline=1", *layout])
    found = plan(job, H100)
    copies = {"1node": 1, "4nodes": 4, "16nodes": 16}[nodes]
    held = stage_parameters(KNOWN_MODELS["Qwen/Qwen3-30B-A3B"], job.parallel, 0)
    own = held.dense / job.parallel.data + held.experts / copies
    assert found.memory.training["optimizer"] == 12 * own
    # Of its own: reads the gradient for norm (4) and step (4), reads and writes weights and moments (24), writes the
    # weight (2). Of all: zeroes the gradient (4). At 0.7 of the memory's speed.
    updates, size = job.algorithm.minibatches, 34 * own + 4 * held.total
    assert found.seconds_by_part["update"]["optimizer"] == pytest.approx(updates * size / (0.7 * H100.memory_speed))
    away = held.dense * (1 - 1 / job.parallel.data) + held.experts * (1 - 1 / copies)
    link = H100.link if nodes == "1node" else H100.network
    assert found.seconds_by_part["update"]["gradient_reduction"] == pytest.approx(updates * 6 * away / (0.7 * link))


def test_data_parallel_ranks_divide_optimizer_and_work() -> None:
    two, four = (
        plan(resolve.resolve(f"deepsearch_14b+{n}nodes", overrides=["parallel.recompute_layers=null"]), H100)
        for n in (2, 4)
    )
    assert four.memory.training["optimizer"] == pytest.approx(two.memory.training["optimizer"] / 2)
    assert four.memory.training["weights"] == two.memory.training["weights"]
    assert passes(two) / 2 < passes(four) < 1.2 * passes(two) / 2, (
        "of fewer trees the slowest rank has more of the work"
    )
    assert 0 < two.imbalance < four.imbalance < 0.2


def test_ranks_without_trees_are_a_warning() -> None:
    """Eight tasks per update: of 32 data-parallel ranks, three in four have nothing to do."""
    some, many = (
        plan(resolve.resolve("deepsearch_14b", overrides=[f"parallel.data={n}", f"engine.replicas={n}"]), H100)
        for n in (8, 32)
    )
    assert passes(many) == passes(some)
    assert not some.warnings
    assert "warning: parallel.data=32, but 8 trees an update: 24 of 32 ranks wait" in render(many)


def test_parts_of_a_step_depend_on_their_own_hardware_values_only() -> None:
    job = resolve.resolve("deepsearch_14b")
    before, memory, products = (
        plan(job, hardware).seconds_by_part
        for hardware in (
            H100,
            replace(H100, memory_speed=2 * H100.memory_speed),
            replace(H100, bf16_flops=2 * H100.bf16_flops),
        )
    )
    assert memory["rollout"]["decode"] < 0.8 * before["rollout"]["decode"] == 0.8 * products["rollout"]["decode"]
    assert products["rollout"]["prefill"] == pytest.approx(before["rollout"]["prefill"] / 2)
    for phase in ("logprobs", "update"):
        for part in ("attention", "matrix_products"):
            assert products[phase][part] == pytest.approx(before[phase][part] / 2)
            assert memory[phase][part] == before[phase][part]
        kernels, one = "memory_bound_kernels", before[phase]
        assert memory[phase][kernels] == pytest.approx(one[kernels] / 2) and products[phase][kernels] == one[kernels]
        saved = 2 * one["head"] - memory[phase]["head"] - products[phase]["head"]
        assert saved == pytest.approx(one["head"] / 2), "the head has products and memory-bound kernels"


def test_push_time_is_that_of_the_busiest_rank() -> None:
    one, split = (plan(resolve.resolve(f"deepsearch_14b+{variant}"), H100) for variant in ("1node", "split"))
    size = 2 * one.parameters
    jobs = [resolve.resolve(f"deepsearch_14b+{variant}") for variant in ("1node", "split")]
    near, far = (size * max(1 / job.engine.tensor, job.engine.replicas / job.parallel.world_size) for job in jobs)
    assert one.seconds_by_phase["push"] == pytest.approx(1 + near / (0.7 * H100.link))
    assert split.seconds_by_phase["push"] == pytest.approx(1 + far / (0.7 * H100.network))
    gloo, files = (
        plan(resolve.resolve("deepsearch_14b+1node", overrides=[f"sync.transport={kind}"]), H100)
        for kind in ("network", "disk")
    )
    assert gloo.seconds_by_phase["push"] == pytest.approx(1 + near / 4e9)
    engines = jobs[0].engine.replicas
    assert files.seconds_by_phase["push"] == pytest.approx(1 + (1 + engines) * size / H100.filesystem)


@pytest.mark.parametrize("recipe", ["deepsearch_14b", "deepsearch_32b", "moe_30b_a3b"])
def test_planned_push_takes_seconds_and_does_not_grow_with_nodes(recipe: str) -> None:
    job = resolve.resolve(f"{recipe}+4nodes")
    jobs = [scale_to_nodes(job, nodes, 8) for nodes in (2, 4, 8, 16)]
    seconds = [plan(job, H100).seconds_by_phase["push"] for job in jobs]
    assert max(seconds) <= 1.5
    assert seconds == pytest.approx([seconds[0]] * 4)


def test_push_to_fp8_engines_takes_about_half_the_time() -> None:
    one, fp8 = (
        plan(resolve.resolve(f"deepsearch_14b+4nodes{more}"), H100).seconds_by_phase["push"] - 1
        for more in ("", "+fp8_engine")
    )
    assert 0.5 < fp8 / one < 0.6


def test_push_holds_two_buckets() -> None:
    for variant in ("1node", "split"):
        assert (
            plan(resolve.resolve(f"deepsearch_14b+{variant}"), H100).memory.rollout["push_buckets"] == 2 * 256 * 2**20
        )


def test_step_is_not_shorter_than_its_longest_response() -> None:
    job = resolve.resolve("deepsearch_14b+16nodes")
    weights = 2 * whole_model(KNOWN_MODELS["Qwen/Qwen3-14B"]).total / job.engine.tensor
    one = weights / (0.7 * H100.memory_speed) + 0.003  # one path reads the weights once per token
    assert job.rollout.max_response_tokens * one < plan(job, H100).seconds_by_part["rollout"]["decode"]


def test_training_is_not_faster_than_the_peak() -> None:
    found = plan(resolve.resolve("deepsearch_14b"), H100)
    floor = 6 * found.parameters * found.tokens / (16 * H100.bf16_flops)
    assert floor < passes(found) < 5 * floor


def test_split_engines_overlap_with_training() -> None:
    found = plan(resolve.resolve("deepsearch_14b+split"), H100)
    assert found.layout and (found.layout.trainer_nodes, found.layout.engine_nodes) == (2, 2)
    assert "kv_cache" in found.memory.engine and "kv_cache" not in found.memory.rollout
    assert found.seconds < sum(found.seconds_by_phase.values())


def test_saves_lending_and_start_are_counted() -> None:
    job = resolve.resolve("deepsearch_14b")
    found, split = plan(job, H100), plan(resolve.resolve("deepsearch_14b+split"), H100)
    assert found.seconds_by_phase["lend"] > 0
    assert "lend" not in split.seconds_by_phase
    rare = plan(replace(job, train=replace(job.train, save_every=50)), H100)
    assert found.seconds_by_phase["save"] == pytest.approx(10 * rare.seconds_by_phase["save"])
    # 14.8 billion parameters of 14 bytes at 0.1 GB/s: longer than five steps, which wait for it.
    slow = plan(job, replace(H100, filesystem=1e8))
    assert 5 * slow.seconds == pytest.approx(14 * slow.parameters / 1e8, rel=0.01)
    assert slow.start_seconds - found.start_seconds == pytest.approx(2 * 2 * slow.parameters * (1 / 1e8 - 1 / 2e9))
    hours = (found.start_seconds + found.steps * found.seconds) * 16 / 3600
    assert found.gpu_hours == pytest.approx(hours)


def test_keys_and_values_in_fp8_are_half_as_large() -> None:
    half, same = (
        plan(resolve.resolve("deepsearch_14b", overrides=[f"engine.options={{{name}: {dtype}}}"]), H100)
        for name, dtype in (("kv-cache-dtype", "fp8_e4m3"), ("kv_cache_dtype", "bfloat16"))
    )
    assert half.memory.kv_tokens == pytest.approx(2 * same.memory.kv_tokens, abs=1)
    assert same.memory.kv_tokens == plan(resolve.resolve("deepsearch_14b"), H100).memory.kv_tokens


def test_sft_plan_has_no_engines() -> None:
    job = resolve.resolve("sft_7b")
    found, layouts = plan(job, H100), search(job, H100)
    assert found.decode_batch == found.memory.kv_tokens == 0
    assert "an update, seconds" in render(found) and "16 conversations" in render(found)
    for text in (render(found), render_search(layouts)):
        assert "engine" not in text and " 0 tokens" not in text
    assert len(layouts.best) == 5


def test_unknown_gpu_is_reported() -> None:
    with pytest.raises(UserError, match="unknown GPU 'h1000'; known: h100-80, h200, a100-80, l40s"):
        Hardware.named("h1000")


def test_rendered_parts_add_up() -> None:
    found = plan(resolve.resolve("deepsearch_14b"), H100)
    text = render(found)
    assert "Qwen/Qwen3-14B, 14.77 billion parameters" in text
    assert text.endswith("fits\n")
    for part in (*found.memory.training, *found.memory.rollout, *found.seconds_by_phase):
        assert part.replace("_", " ") in text
    assert found.seconds == pytest.approx(sum(found.seconds_by_phase.values()))
    for phase in ("rollout", "logprobs", "update"):
        first, *rest = text[text.index(f"\n  {phase} ") + 1 :].splitlines()
        parts = found.seconds_by_part[phase]
        assert first.split() == [phase, f"{sum(parts.values()):.1f}"]
        assert [line.split()[-1] for line in rest[: len(parts)]] == [f"{seconds:.1f}" for seconds in parts.values()]


def test_phases_of_a_plan_have_the_names_of_a_runs_metrics() -> None:
    measured = Path(__file__).parents[2].joinpath("docs", "reference", "run-directory.md").read_text()
    phases = [plan(resolve.resolve(job), H100).seconds_by_phase for job in ("deepsearch_14b", "sft_7b")]
    assert [*phases[0]] == ["rollout", "lend", "logprobs", "update", "push", "save"] and [*phases[1]] == [
        "update",
        "save",
    ]
    assert all(f"| `seconds/{phase}` |" in measured for phase in phases[0])


def arpo(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "arpo_megatron", *arguments], capture_output=True, text=True)


def test_plan_command_prints_json_and_fails_if_the_job_does_not_fit() -> None:
    done = arpo("plan", "moe_30b_a3b", "--json", "--no-search")
    found = json.loads(done.stdout)
    assert (done.returncode, found["fits"], found["parameters"]) == (0, True, 30_532_122_624)
    assert {"weights", "gradients", "optimizer", "activations", "logits"} <= found["memory_per_rank_bytes"].keys()
    assert {"rollout", "logprobs", "update", "push"} <= found["seconds_by_phase"].keys()
    assert 0 < found["repeated_share"] < 0.2
    assert {"attention", "memory_bound_kernels", "head"} <= found["seconds_by_part"]["update"].keys()
    searched = json.loads(arpo("plan", "sft_7b", "--json").stdout)
    assert searched["tried"] == searched["fit"] + sum(searched["failed"].values()) and len(searched["best"]) == 5
    assert all(reason and count > 0 for reason, count in searched["failed"].items())
    done = arpo("plan", "moe_30b_a3b", "--gpu", "h100-80", "--no-search", "engine.memory_fraction=0.9")
    assert done.returncode == 1 and "does not fit: rollout needs" in done.stdout
    assert (
        f"of the tokens that the trainer computes, {found['repeated_share']:.1%} are repeated ancestors" in done.stdout
    )


def test_plan_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom arpo_megatron.jobs import resolve\nfrom arpo_megatron.plan import GPUS, plan\n"
        "from arpo_megatron.plan.search import search\n"
        "assert plan(resolve.resolve('reasoning_3b'), GPUS['h100-80']).fits\n"
        "print(*sorted({'torch', 'transformers', 'megatron', 'sglang', 'nemo_run'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_plan_takes_limits_of_tools_from_their_definition(tmp_path: Path) -> None:
    def of(*overrides: str, rate: float = 1.0) -> JobEstimate:
        web = f"{{provider: searxng, url: 'http://x', requests_per_s: {rate}}}"
        (tmp_path / "tools.yaml").write_text(f"search: {{engine: web, web: {web}}}")
        return plan(resolve.resolve("deepsearch_14b", overrides=overrides), H100)

    file = f"sandbox.file={tmp_path / 'tools.yaml'}"
    free, slow = of(), of(file, rate=0.01)
    assert slow.seconds_by_part["rollout"]["tools"] > 10 * free.seconds_by_part["rollout"]["tools"], (
        "the rate of web searches bounds a step"
    )
    assert of(file, rate=1e6).seconds_by_part == free.seconds_by_part
    assert (
        of(file, "sandbox.replicas=4", rate=0.01).seconds_by_part["rollout"]["tools"]
        == slow.seconds_by_part["rollout"]["tools"] / 4
    )
    assert (
        of("rollout.tool_timeout_s=1").seconds_by_part["rollout"]["tools"]
        == free.seconds_by_part["rollout"]["tools"] / 2
    )
    assert "tool call(s) a path of 2 s each\n" in render(free), "what no definition has is an assumption that is shown"
    assert "web searches at 0.01 a second or fewer (search.web.requests_per_s)" in render(of(file, rate=0.01))
