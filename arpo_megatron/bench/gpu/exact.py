"""Numerical differences: bfloat16 and FP8 against float32, trees against sequences, trainer against engine.

The model is random. Its head is scaled up, so that its distributions are not nearly uniform.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.bench.gpu.measure import Figures, Measurements, packed, quantiles
from arpo_megatron.bench.gpu.random_engines import first_gpu, generate
from arpo_megatron.config import EngineConfig, Fp8Recipe, JobConfig, ModelConfig, ParallelConfig
from arpo_megatron.engine.launch import launch_engine
from arpo_megatron.hardware.placement import check_machine
from arpo_megatron.models.random_init import save_random_weights
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.models.tiny import generated_tokenizer, make_model_directory
from arpo_megatron.packing.packs import split_by_tree
from arpo_megatron.plan.synthetic_trees import MIXES, flattened
from arpo_megatron.tree import Role, RolloutTree

RECIPES = cast("tuple[Fp8Recipe, ...]", get_args(Fp8Recipe))
MODEL = ModelConfig(hidden_size=1024, layers=8, heads=16, kv_heads=8, ffn_size=3072, max_length=4096)
HEAD_SCALE = 4.0
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExactBench:
    """The model and the data that are compared."""

    directory: Path
    """Directory of the model and the engine's log."""
    model: ModelConfig = MODEL
    """Sizes of the model, in bfloat16."""
    mix: str = "reasoning"
    """Mix of the trees."""
    requests: int = 64
    """Requests that the engine samples."""
    tokens: int = 256
    """Tokens of each request."""

    def model_path(self) -> Path:
        """Return the Hugging Face directory of the random model, and write it on first use."""
        path = self.directory / "model"
        if not path.exists():
            partial_path = path.with_name("model.tmp")
            make_model_directory(partial_path, self.model, generated_tokenizer())
            save_random_weights(partial_path, seed=1)
            file = partial_path / "model.safetensors"
            tensors = load_file(file)
            tensors["lm_head.weight"] *= HEAD_SCALE
            save_file(tensors, file, metadata={"format": "pt"})
            partial_path.rename(path)
        return path

    def actor(self, recipe: Fp8Recipe | None) -> Actor:
        """Return the trainer's model in bfloat16 with the FP8 recipe, or in float32 for None."""
        gc.collect()
        layout = ParallelConfig()
        model = replace(self.model, dtype="float32") if recipe is None else replace(self.model, fp8=recipe)
        config = JobConfig(name="gpu-exact", model=model, parallel=layout)
        check_machine(config)
        if not torch.distributed.is_initialized():
            parallel.initialize(layout, seed=1)
        spec = ModelSpec.from_hf(self.model_path())
        return Actor(config, spec, self.model_path(), optimizer=config.optimizer, total_updates=10)

    def measure_recipe(self, recipe: Fp8Recipe) -> Figures:
        """Compare a recipe with float32, trees with sequences, and sequences with themselves packed differently."""
        vocabulary = ModelSpec.from_hf(self.model_path()).vocabulary
        trees = [MIXES[self.mix].tree(seed, vocabulary) for seed in range(2)]
        exact = _leaf_logprobs(self.actor(None), trees)
        actor = self.actor(recipe)
        found = _leaf_logprobs(actor, trees)
        flat, repacked = (_token_logprobs(actor, flattened(trees), budget) for budget in (16384, 4096))
        packs = packed(trees, 16384)
        ratio = actor.update(packs, actor.logprobs(packs)).ratio_max
        noise, tree = _gaps(flat, repacked), _gaps(found, flat)
        noise_rms, tree_rms = (float(np.sqrt(np.mean(gaps**2))) for gaps in (noise, tree))
        return {
            "gap_to_float32": quantiles(_gaps(found, exact)),
            "tree_to_flat": quantiles(tree),
            "flat_to_repacked_flat": quantiles(noise),
            "tree_noise_over_flat_noise": tree_rms / noise_rms if noise_rms else None,
            "ratio_before_update": ratio,
        }

    def measure_engine(self) -> Figures:
        """Compare log-probs and entropies of an engine with those of the trainer in each recipe."""
        path = self.model_path()
        vocabulary = ModelSpec.from_hf(path).vocabulary
        prompts = np.random.default_rng(1).integers(3, vocabulary, (self.requests, 64)).tolist()
        sizes = EngineConfig(max_running_requests=self.requests, max_total_tokens=65536, memory_fraction=0.1)
        log = self.directory / "engine.log"
        with launch_engine(
            path, sizes, dtype="bfloat16", seed=1, log_path=log, placement=first_gpu(colocated=True)
        ) as engine:
            answers = generate(engine.url, prompts, self.tokens)
        trees, entropies = [], []
        for prompt, answer in zip(prompts, answers, strict=True):
            sampled = answer["meta_info"]["output_token_logprobs"]
            tree = RolloutTree("engine", prompt)
            tree.add(0, Role.MODEL, [x[1] for x in sampled], logprobs=[x[0] for x in sampled])
            trees.append(tree)
            entropies.append(np.array(answer["meta_info"]["entropy"]))
        figures: Figures = {"entropy_mean_nats": float(np.mean(np.concatenate(entropies)))}
        for recipe in (None, *RECIPES):
            name = {None: "float32", "none": "bfloat16"}.get(recipe, str(recipe))
            figures[name] = _trainer_gaps(self.actor(recipe), trees, entropies)
        return figures


def exact_measurements(bench: ExactBench) -> Measurements:
    """Return the measurements, the most important ones first."""
    recipes = {f"model {recipe}": partial(bench.measure_recipe, recipe) for recipe in RECIPES}
    return {**recipes, "engine": bench.measure_engine}


def _token_logprobs(actor: Actor, trees: Sequence[RolloutTree], budget: int) -> list[Floats]:
    """Return the log-probs of each tree's tokens in the order of its segments; NaN for tokens that are no target."""
    packs = packed(trees, budget)
    return split_by_tree(packs, actor.logprobs(packs, temperature=1.0), trees)


def _leaf_logprobs(actor: Actor, trees: Sequence[RolloutTree]) -> list[Floats]:
    """Return the log-probs of each trajectory's tokens, in the order of `flattened`."""
    trajectories = []
    for tree, values in zip(trees, _token_logprobs(actor, trees, 16384), strict=True):
        ends = np.cumsum([len(segment) for segment in tree.segments])
        segments = np.split(values, ends[:-1])
        trajectories += [np.concatenate([segments[s] for s in tree.path(leaf)]) for leaf in tree.leaves()]
    return trajectories


def _gaps(left: Sequence[Floats], right: Sequence[Floats]) -> Floats:
    gaps: Floats = np.concatenate(list(left)) - np.concatenate(list(right))
    return np.asarray(gaps[~np.isnan(gaps)])


def _trainer_gaps(actor: Actor, trees: Sequence[RolloutTree], entropies: Sequence[Floats]) -> Figures:
    """Return quantiles of |trainer - engine| for log-probs and entropies of the sampled tokens."""
    packs = packed(trees, 16384)
    logprob_gaps, entropy_gaps = [], []
    found = actor.policy_outputs(packs, temperature=1.0, training=False)
    for pack, logprobs, own in zip(packs, found.logprobs, found.entropies, strict=True):
        logprob_gaps.append(logprobs.astype(np.float64) - pack.sampling_logprobs)
        tokens = zip(pack.tree_index, pack.token_index, strict=True)
        sampled = [entropies[tree][token - len(trees[tree].prompt_ids)] for tree, token in tokens]
        entropy_gaps.append(own - np.array(sampled))
    return {
        "logprob_gap": quantiles(np.concatenate(logprob_gaps)),
        "entropy_gap": quantiles(np.concatenate(entropy_gaps)),
    }
