"""Recipes have the values of the paper, and `arpo show` names the source of every value."""

import dataclasses
import json
from pathlib import Path

import pytest

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.explain import render, sources
from arpo_megatron.jobs.inputs import check_inputs
from arpo_megatron.models.known import KNOWN_MODELS, load_spec


def value(job: JobConfig, key: str) -> object:
    found: object = job
    for part in key.split("."):
        found = getattr(found, part)
    return found


def test_all_recipes_of_the_project_are_listed() -> None:
    wanted = "quickstart sft_7b reasoning_3b reasoning_7b reasoning_8b deepsearch_8b deepsearch_14b deepsearch_32b"
    assert {*wanted.split(), "moe_30b_a3b"} <= set(resolve.recipe_names())
    assert not [name for name in resolve.recipe_names() if name.startswith("_")]


RELEASED = {
    "reasoning_7b": ((16, 8, 2), 128, 16, (1536, 4096), 3),
    "deepsearch_8b": ((16, 8, 2), 128, 16, (2000, 10000), 6),
    "deepsearch_14b": ((12, 6, 2), 64, 8, (2000, 6192), 6),
}
"""Values in the authors' scripts: samples, initial, beam; prompts a step and an update; prompt, response; calls."""


@pytest.mark.parametrize("recipe", RELEASED)
def test_recipes_have_the_hyper_parameters_of_the_released_scripts(recipe: str) -> None:
    job = resolve.resolve(recipe)
    forks, prompts, batch, (prompt, response), calls = RELEASED[recipe]
    algorithm = job.algorithm
    assert (algorithm.group_size, algorithm.initial_rollouts, algorithm.beam_size) == forks
    assert (algorithm.branch_probability, algorithm.entropy_weight) == (0.5, 0.2)
    assert (job.train.tasks_per_step, job.train.tasks_per_step // algorithm.minibatches) == (prompts, batch)
    assert (job.data.max_prompt_tokens, job.rollout.max_response_tokens) == (prompt, response)
    assert job.model.max_length == prompt + response
    assert (job.rollout.max_tool_calls, job.rollout.temperature, job.rollout.top_p) == (calls, 1.0, 1.0)
    assert (job.optimizer.lr, job.optimizer.schedule, job.optimizer.weight_decay) == (1e-6, "constant", 0.01)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.2, 0.2, 3.0)
    assert (algorithm.kl_coefficient, algorithm.entropy_coefficient, algorithm.loss_aggregation) == (
        0.0,
        0.0,
        "token-mean",
    )


@pytest.mark.parametrize("recipe", [name for name in resolve.recipe_names() if name.startswith("sft_")])
def test_sft_has_the_hyper_parameters_of_the_authors(recipe: str) -> None:
    job = resolve.resolve(recipe)
    optimizer = job.sft.optimizer
    assert (optimizer.lr, optimizer.schedule, optimizer.warmup_fraction) == (7e-6, "cosine", 0.1)
    assert (job.sft.batch, optimizer.min_lr_ratio, optimizer.beta2, optimizer.weight_decay) == (16, 0.0, 0.999, 0.0)
    assert (job.model.max_length, job.sft.steps * job.sft.batch) == (15000, pytest.approx(3 * 54000, rel=0.001))


@pytest.mark.parametrize("recipe", resolve.recipe_names())
def test_variants_resolve_and_change_what_they_name(recipe: str) -> None:
    for variant in resolve.variant_names(recipe):
        layers = resolve.layers(f"{recipe}+{variant}")
        job = resolve.resolve(f"{recipe}+{variant}")
        changed = {key for key, source in sources(layers).items() if str(source) == f"variant {variant}"}
        assert changed, variant
        for layer in layers:
            if str(layer) == f"variant {variant}":
                ((section, keys),) = layer.values.items()
                ((key, expected),) = keys.items()
                assert value(job, f"{section}.{key}") == expected


def test_fp8_takes_the_values_of_the_last_layout_in_any_order() -> None:
    name = "reasoning_8b+2nodes+16nodes"
    before, after, own = (
        resolve.resolve(each) for each in (f"{name}+fp8", "reasoning_8b+fp8+16nodes", "reasoning_8b+fp8")
    )
    assert before == after and before.parallel.recompute == "none"
    assert own == resolve.resolve("reasoning_8b+1node+fp8") and own.parallel.recompute == "full"


def test_later_variant_wins_and_override_wins_over_all() -> None:
    assert resolve.resolve("deepsearch_14b+4nodes+2nodes").parallel.data == 4
    assert (
        resolve.resolve("deepsearch_14b+4nodes", overrides=["parallel.data=2", "engine.replicas=2"]).parallel.data == 2
    )


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ("deepsearch_14b+4node", "unknown variant '4node' of deepsearch_14b; did you mean 4nodes?"),
        ("quickstart+fp8", "unknown variant 'fp8' of quickstart, which has none"),
        ("deepsearch_15b+fp8", "unknown recipe 'deepsearch_15b'; did you mean deepsearch_14b?"),
        ("_bases", "unknown recipe '_bases'"),
    ],
)
def test_misspelt_recipe_or_variant_is_one_line(recipe: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        resolve.resolve(recipe)
    assert line in str(error.value)


FROM_AEPO = dict.fromkeys(("entropy_advantage", "probe_slope", "streak_penalty"), "preset aepo")


def test_show_names_the_source_of_each_value(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train: {steps: 7}\n")
    text = render("deepsearch_14b+fp8", file=file, overrides=["optimizer.lr=2e-6", "engine.hang_timeout_s=120"])
    lines = {line.split(":")[0].strip(): line for line in text.splitlines() if "#" in line}
    for key, source in (
        ("tasks_per_step", "base deep_search_large"),
        ("hub_id", "recipe deepsearch_14b"),
        ("fp8", "variant fp8"),
        ("steps", f"file {file}"),
        ("lr", "override"),
        ("hang_timeout_s", "override"),  # an override is shown even if it equals the default
    ):
        assert lines[key].endswith(f"# {source}"), lines[key]
    assert "clip_grad: 1.0\n" in text, "defaults are not marked"


@pytest.mark.parametrize(
    ("variant", "override", "expected"),
    [
        ("aepo", "algorithm.name=dapo", {}),
        ("reinforce_plus_plus", "algorithm.name=aepo", FROM_AEPO),
        ("aepo", "algorithm.params.probe_slope=1", FROM_AEPO | {"probe_slope": "override"}),
    ],
)
def test_show_names_the_source_of_each_param(variant: str, override: str, expected: dict[str, str]) -> None:
    text = render(f"deepsearch_14b+{variant}", overrides=[override])
    section = text.partition("\nalgorithm:\n")[2].partition("\n  group_size:")[0]
    numbers = section.partition("  params:")[2].splitlines()
    assert numbers.pop(0).strip() == ("" if expected else "{}")
    assert {line.split(":")[0].strip(): line.partition("# ")[2] for line in numbers} == expected


@pytest.mark.parametrize("recipe", ["moe_30b_a3b+2nodes", "deepsearch_14b+aepo"])
def test_output_of_show_is_a_config_file_of_the_same_job(recipe: str, tmp_path: Path) -> None:
    file = tmp_path / "shown.yaml"
    file.write_text(render(recipe))
    assert resolve.load(file) == resolve.resolve(recipe)


def test_show_has_every_key() -> None:
    text = render("quickstart")
    for section in dataclasses.fields(JobConfig):
        assert f"{section.name}:" in text


def test_job_without_weights_names_what_to_download() -> None:
    with pytest.raises(UserError, match=r"fetch Qwen/Qwen3-14B .*--local-dir DIR"):
        check_inputs(resolve.resolve("deepsearch_14b"))


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    spec = KNOWN_MODELS["Qwen/Qwen3-8B"]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocabulary,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"layers 36, but Qwen/Qwen3-14B has 40.*give model.hub_id=null too"):
        check_inputs(resolve.resolve("deepsearch_14b", overrides=[f"model.path={tmp_path}"]))
    model = resolve.resolve("deepsearch_14b", overrides=[f"model.path={tmp_path}", "model.hub_id=null"]).model
    assert load_spec(model).layers == 36


def test_unknown_model_without_files_cannot_be_planned() -> None:
    with pytest.raises(UserError, match="sizes are not known without its files"):
        load_spec(resolve.resolve("deepsearch_14b", overrides=["model.hub_id=some/model"]).model)
