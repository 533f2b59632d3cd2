"""How exact the GPU computes: the model in bfloat16 and FP8 against float32, trees against sequences, trainer against
engine.

A random model stands for a trained one; its head is scaled up, so that its distributions are not nearly uniform.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast, get_args

import numpy as np
import requests
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.flex_attention import flex_plan
from arpo_megatron.actor.microbatch import ContextShard, MicroBatches
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.bench.gpu.journal import Figures, Part, quantiles
from arpo_megatron.bench.gpu.kernels import error_parts
from arpo_megatron.config import EngineConfig, Fp8Recipe, JobConfig, ModelConfig, ParallelConfig
from arpo_megatron.engine.launch import launch_engine
from arpo_megatron.hardware.placement import ON_CPU, Placement
from arpo_megatron.models.random_init import save_random_weights
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.models.tiny import generated_tokenizer, make_model_directory
from arpo_megatron.packing.layout import TreePack
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.plan.synthetic_trees import MIXES, flattened
from arpo_megatron.tree import Role, RolloutTree

RECIPES = cast("tuple[Fp8Recipe, ...]", get_args(Fp8Recipe))
MODEL = ModelConfig(hidden_size=1024, layers=8, heads=16, kv_heads=8, ffn_size=3072, max_length=4096)
HEAD_SCALE = 4.0
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Exactness:
    """What is compared.

    Attributes:
        directory: for the model and the engine's log.
        model: its shape; the number format is bfloat16.
        mix: family of the trees.
        requests: sampled by the engine.
        tokens: of each of them.
    """

    directory: Path
    model: ModelConfig = MODEL
    mix: str = "reasoning"
    requests: int = 64
    tokens: int = 256

    def weights(self) -> Path:
        """The Hugging Face directory of the random model, made where it is missing."""
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
        """The trainer's model in bfloat16 with that recipe; None: in float32."""
        gc.collect()
        layout = ParallelConfig()
        model = replace(self.model, dtype="float32") if recipe is None else replace(self.model, fp8=recipe)
        config = JobConfig(name="gpu-exact", model=model, parallel=layout)
        if not torch.distributed.is_initialized():
            parallel.initialize(layout, seed=1)
        spec = ModelSpec.from_hf(self.weights())
        return Actor(config, spec, self.weights(), optimizer=config.optimizer, total_updates=10)

    def trees(self) -> list[RolloutTree]:
        """Of the mix, in the model's vocabulary."""
        vocabulary = ModelSpec.from_hf(self.weights()).vocabulary
        return [MIXES[self.mix].tree(seed, vocabulary) for seed in range(2)]


def exact_parts(what: Exactness) -> list[Part]:
    """In order of value."""
    return [
        *error_parts(),
        *(Part(f"model {recipe}", partial(_prepare_model, what, recipe)) for recipe in RECIPES),
        Part("engine", partial(_prepare_engine, what)),
    ]


def _packed(trees: Sequence[RolloutTree], budget: int) -> list[TreePack]:
    return pack_trees(trees, supervised_credit(trees), token_budget=budget, share_prompt=False)


def _prepare_model(what: Exactness, recipe: Fp8Recipe) -> Callable[[], Figures]:
    trees = what.trees()
    packs = _packed(trees, 16384)
    for pack in packs:
        flex_plan(pack.subtree_end, np.arange(pack.inherited, len(pack.subtree_end)))

    def measure() -> Figures:
        flat = flattened(trees)
        scores = {}
        for name, actor_recipe in (("float32", None), ("found", recipe)):
            actor = what.actor(actor_recipe)
            scores[name] = _by_leaf(actor, trees, 16384)
            if name == "found":
                repacked = [_by_token(actor, flat, budget) for budget in (16384, 4096)]
                old = actor.logprobs(packs)
                ratio = actor.update(packs, old).ratio_max
            del actor
        noise, tree = _gaps(repacked[0], repacked[1]), _gaps(scores["found"], repacked[0])
        noise_rms, tree_rms = (float(np.sqrt(np.mean(gaps**2))) for gaps in (noise, tree))
        return {
            "gap_to_float32": quantiles(_gaps(scores["found"], scores["float32"])),
            "tree_to_flat": quantiles(tree),
            "flat_to_repacked_flat": quantiles(noise),
            "tree_noise_over_flat_noise": tree_rms / noise_rms if noise_rms else None,
            "ratio_before_update": ratio,
        }

    return measure


def _by_token(actor: Actor, trees: Sequence[RolloutTree], budget: int) -> list[Floats]:
    """Log-probs of each tree's tokens, segments one after the other; NaN where a token is no target."""
    found = [np.full(tree.unique_tokens, np.nan) for tree in trees]
    packs = _packed(trees, budget)
    for pack, values in zip(packs, actor.logprobs(packs, temperature=1.0), strict=True):
        for tree, place, value in zip(pack.tree_index, pack.token_index, values, strict=True):
            found[tree][place] = value
    return found


def _by_leaf(actor: Actor, trees: Sequence[RolloutTree], budget: int) -> list[Floats]:
    """Log-probs of each trajectory's tokens, in the order of `flattened`."""
    trajectories = []
    for tree, values in zip(trees, _by_token(actor, trees, budget), strict=True):
        ends = np.cumsum([len(segment) for segment in tree.segments])
        pieces = np.split(values, ends[:-1])
        trajectories += [np.concatenate([pieces[s] for s in tree.path(leaf)]) for leaf in tree.leaves()]
    return trajectories


def _gaps(left: Sequence[Floats], right: Sequence[Floats]) -> Floats:
    gaps: Floats = np.concatenate(list(left)) - np.concatenate(list(right))
    return np.asarray(gaps[~np.isnan(gaps)])


def _prepare_engine(what: Exactness) -> Callable[[], Figures]:
    weights = what.weights()
    vocabulary = ModelSpec.from_hf(weights).vocabulary
    prompts = np.random.default_rng(1).integers(3, vocabulary, (what.requests, 64)).tolist()

    def measure() -> Figures:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        place = Placement(gpus, engine_gpu=0, shared=True) if gpus else ON_CPU
        sizes = EngineConfig(max_running_requests=what.requests, max_total_tokens=65536, memory_fraction=0.1)
        log = what.directory / "engine.log"
        with launch_engine(weights, sizes, dtype="bfloat16", seed=1, log_path=log, placement=place) as engine:
            body = {
                "input_ids": prompts,
                "sampling_params": {"temperature": 1.0, "max_new_tokens": what.tokens, "ignore_eos": True},
                "return_logprob": True,
            }
            answers = requests.post(f"{engine.url}/generate", json=body, timeout=600).json()
        trees, entropies = [], []
        for prompt, answer in zip(prompts, answers, strict=True):
            sampled = answer["meta_info"]["output_token_logprobs"]
            tree = RolloutTree("engine", prompt)
            tree.add(0, Role.MODEL, [x[1] for x in sampled], logprobs=[x[0] for x in sampled])
            trees.append(tree)
            entropies.append(np.array(answer["meta_info"]["entropy"]))
        return {"startup_s": round(engine.startup_s, 1), **_against_trainer(what, trees, entropies)}

    return measure


def _against_trainer(what: Exactness, trees: list[RolloutTree], entropies: list[Floats]) -> Figures:
    """Quantiles of |trainer - engine| by recipe of the trainer."""
    figures: Figures = {}
    packs = _packed(trees, 16384)
    for recipe in (None, *RECIPES):
        name = {None: "float32", "none": "bfloat16"}.get(recipe, str(recipe))
        try:
            found = _scores(what.actor(recipe), packs)
        except Exception as error:  # one recipe that fails must not hide the others
            figures[name] = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]}
            continue
        logprobs = np.concatenate([ours - pack.sampling_logprobs for (ours, _), pack in zip(found, packs, strict=True)])
        starts = [len(tree.prompt_ids) for tree in trees]
        gaps = []
        for (_, ours), pack in zip(found, packs, strict=True):
            places = zip(pack.tree_index, pack.token_index, strict=True)
            gaps.append(ours - np.array([entropies[tree][place - starts[tree]] for tree, place in places]))
        figures[name] = {"logprob_gap": quantiles(logprobs), "entropy_gap": quantiles(np.concatenate(gaps))}
    figures["entropy_mean_nats"] = float(np.mean(np.concatenate(entropies)))
    return figures


@torch.no_grad()
def _scores(actor: Actor, packs: Sequence[TreePack]) -> list[tuple[Floats, Floats]]:
    """Log-probs and entropies of each pack's targets."""
    actor.model.set_is_first_microbatch()
    found = []
    with MicroBatches(packs, None, ContextShard(multiple_of=actor.config.pack_multiple)) as batches:
        for index in range(len(packs)):
            logprobs, entropies = actor.model(*batches.make(index).inputs)
            found.append((logprobs.double().cpu().numpy(), entropies.double().cpu().numpy()))
    return found
