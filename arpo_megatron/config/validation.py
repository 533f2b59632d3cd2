"""Rules between config values. Each violation raises ValueError with the one line that a user reads."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arpo_megatron.config import Fp8Recipe, JobConfig, ModelConfig, ParallelConfig

FP8_TOKENS: Mapping[str, int] = {"none": 1, "current": 16, "blockwise": 128}
"""The number of tokens of an FP8 product on one rank is a multiple of this: the gradient of a weight sums over them.

Trees need no alignment. A scale of the `blockwise` recipe covers 128 features of one token in the forward pass and in
the gradient of the input (1 x 128 blocks along the features), so no token's result depends on a neighbour. Only the
weight gradient quantizes 128 tokens of a feature together, in a sum that mixes all tokens anyway. The scales of
`current` cover a whole tensor, which no alignment changes."""
FP8_FEATURES: Mapping[str, int] = {"none": 1, "current": 16, "blockwise": 128}
"""Rows and columns of a rank's part of an FP8 weight are multiples of this."""

FLASH_HEADS = (8, 128)
"""Head widths of FlexAttention's FLASH backend on Hopper: multiples of the first, up to the second.

The tensors' rows are multiples of 16 bytes. Beyond 128 its forward kernel takes fewer than 128 keys at once, and a
block of the mask (`ATTENTION_BLOCK`) must be one such tile."""

PROTOCOL_TAGS = ("think", "result", "answer")
"""Tags that are not tools."""
_TAG_NAME = re.compile(r"[A-Za-z_][\w.-]*")
OF_FILES = ("path", "reader", "split", "columns", "verifier", "search_cache")
"""Keys of section `data` that only data.kind=files reads. (`max_prompt_tokens` may stay when a recipe has set it.)"""


def check_parallel(parallel: "ParallelConfig") -> None:
    """Check the rules within section `parallel`."""
    if parallel.sequence and parallel.tensor == 1:
        raise ValueError("parallel.sequence=true needs parallel.tensor > 1")
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ValueError(f"parallel.virtual_pipeline={parallel.virtual_pipeline} needs parallel.pipeline > 1")
    if parallel.recompute == "selective" and not parallel.recompute_modules:
        raise ValueError("parallel.recompute=selective needs parallel.recompute_modules=[mlp] or others")
    if parallel.recompute_layers is not None and parallel.recompute != "full":
        raise ValueError(
            f"parallel.recompute_layers={parallel.recompute_layers} needs parallel.recompute=full, not "
            f"{parallel.recompute}: give parallel.recompute_layers=null too"
        )
    if parallel.tensor * parallel.context * parallel.data % parallel.expert:
        raise ValueError(
            f"parallel.expert={parallel.expert} does not divide parallel.tensor * parallel.context * parallel.data = "
            f"{parallel.tensor * parallel.context * parallel.data}"
        )


def check_job(config: "JobConfig") -> None:
    """Check the rules between sections. Raises ValueError with the keys and their values."""
    if config.algorithm.minibatches > config.train.tasks_per_step:
        raise ValueError(
            f"algorithm.minibatches={config.algorithm.minibatches} exceeds train.tasks_per_step="
            f"{config.train.tasks_per_step}: a batch holds at least one task"
        )
    _check_fp8(config)
    if config.model.attention_backend == "flash" and config.model.dtype != "bfloat16":
        raise ValueError(f"model.attention_backend=flash needs model.dtype=bfloat16, not {config.model.dtype}")
    if config.engine.deterministic and config.engine.attention_backend == "flashinfer":
        raise ValueError(
            "engine.deterministic=true needs engine.attention_backend=fa3 or triton: with flashinfer SGLang turns its "
            "prefix cache off"
        )
    if config.engine.deterministic and config.engine.tensor > 1:
        raise ValueError(
            f"engine.deterministic=true needs engine.tensor=1, not {config.engine.tensor}: the engine's collectives "
            "would add in another order than the trainer's"
        )
    _check_engine(config)
    if config.algorithm.router_replay != "none" and config.engine.router == "sglang":
        raise ValueError(
            "algorithm.router_replay=rollout needs engine.router=auto or none: SGLang's router hides expert routes"
        )
    if config.train.keep_best and config.evaluation.every is None:
        raise ValueError("train.keep_best needs evaluation.every=N, whose held-out success ranks the checkpoints")
    if config.sync.directory is not None and config.sync.transport != "disk":
        raise ValueError(f"sync.directory needs sync.transport=disk, not {config.sync.transport}")
    if config.model.is_generated:
        _check_generated_model(config.model, config.parallel)
        if config.algorithm.router_replay != "none":
            raise ValueError("algorithm.router_replay=rollout needs a model with experts at model.path")
    _check_data(config)
    _check_tools(config)
    _check_limits(config)
    _check_staleness(config)
    group = config.train.group_tokens
    if group is not None and group < config.train.token_budget:
        raise ValueError(
            f"train.group_tokens={group} must hold at least one pack, train.token_budget={config.train.token_budget}"
        )
    _check_optimizer(config)
    _check_sft(config)
    if config.evaluation.tasks > config.data.held_out:
        raise ValueError(f"evaluation.tasks={config.evaluation.tasks} exceeds data.held_out={config.data.held_out}")
    pool = config.engine.max_total_tokens
    if pool is not None and pool < config.model.max_length:
        raise ValueError(f"engine.max_total_tokens={pool} cannot hold one model.max_length={config.model.max_length}")


def _check_limits(config: "JobConfig") -> None:
    """Check that limits are for tools of the job, and that the engine can reach them."""
    rollout, evaluation = config.rollout, config.evaluation
    tools = ("search", "python") if rollout.tools is None else rollout.tools
    keys = ("at_limit", "max_response_tokens", "max_tool_tokens", "answer_tokens")
    of_rollout = [getattr(rollout, key) for key in keys]
    of_evaluation = [
        other if (own := getattr(evaluation, key)) is None else own for key, other in zip(keys, of_rollout, strict=True)
    ]
    for section, (at_limit, response, result, answer) in (("rollout", of_rollout), ("evaluation", of_evaluation)):
        needed = result + (response // 8 if answer is None else answer)
        if at_limit == "answer_now" and needed >= response:
            raise ValueError(
                f"{section}.at_limit=answer_now keeps room for max_tool_tokens + answer_tokens = {needed}, which "
                f"max_response_tokens={response} has not: lower one of them"
            )
    for key, names in (
        ("rollout.max_calls_by_tool", rollout.max_calls_by_tool),
        ("rollout.refuse_repeated", rollout.refuse_repeated),
        ("rollout.deterministic_tools", rollout.deterministic_tools),
        ("evaluation.max_calls_by_tool", evaluation.max_calls_by_tool or ()),
        ("evaluation.refuse_repeated", evaluation.refuse_repeated or ()),
    ):
        if unknown := sorted(set(names) - set(tools)):
            raise ValueError(f"{key} names {unknown[0]!r}, which is not a tool of the job ({', '.join(tools)})")


def _check_tools(config: "JobConfig") -> None:
    if config.rollout.environment is not None:
        _check_environment(config)
    elif config.reward.kind == "environment":
        raise ValueError("reward.kind=environment needs rollout.environment=NAME")
    if config.rollout.tools is not None:
        _check_tool_names(config.rollout.tools)


def _check_environment(config: "JobConfig") -> None:
    """Refuse what a job with tools has and a job with an environment does not use."""
    rollout, evaluation = config.rollout, config.evaluation
    if rollout.tools is not None:
        raise ValueError("rollout.environment and rollout.tools exclude each other: an environment has its own actions")
    if rollout.stop_at_answer or evaluation.stop_at_answer:
        raise ValueError("rollout.environment needs stop_at_answer=false: the environment reads the answer")
    if "answer_now" in (rollout.at_limit, evaluation.at_limit):
        raise ValueError("rollout.environment needs at_limit=end: an answer is an action, so the limit holds for it")
    if rollout.protocol != "tags":
        raise ValueError(
            f"rollout.protocol={rollout.protocol} is not used with rollout.environment={rollout.environment}, which "
            "reads whole turns: remove it"
        )
    if config.reward.kind in ("arpo", "arpo_released"):
        raise ValueError(
            f"reward.kind={config.reward.kind} scores the tags of tools, which rollout.environment="
            f"{rollout.environment} has not: set reward.kind=environment, or FILE.py:NAME of your own"
        )
    of_tools = ("tool_call_parser", "system_prompt", "max_calls_by_tool", "refuse_repeated", "deterministic_tools")
    for section, values in (("rollout", rollout), ("evaluation", evaluation)):
        if given := [name for name in of_tools if getattr(values, name, None)]:
            raise ValueError(
                f"{section}.{given[0]} is not used with rollout.environment={rollout.environment}: remove it"
            )


def _check_tool_names(names: Sequence[str]) -> None:
    if not names:
        raise ValueError("rollout.tools is empty: rollout.max_tool_calls=0 is a job without tools")
    for name in names:
        if name in PROTOCOL_TAGS or not _TAG_NAME.fullmatch(name):
            raise ValueError(
                f"rollout.tools: {name!r} cannot be a tag: it needs letters, digits, _ . or -, and {PROTOCOL_TAGS} are "
                "tags of the protocol"
            )
        if names.count(name) > 1:
            raise ValueError(f"rollout.tools names {name!r} twice")


def _check_optimizer(config: "JobConfig") -> None:
    for name, optimizer in (("optimizer", config.optimizer), ("sft.optimizer", config.sft.optimizer)):
        if optimizer.offload and not (config.parallel.distributed_optimizer and config.model.dtype == "bfloat16"):
            raise ValueError(
                f"{name}.offload=true needs parallel.distributed_optimizer=true and model.dtype=bfloat16: Megatron "
                "offloads the master weights of its distributed optimizer"
            )
        if optimizer.offload_fraction != 1.0 and not optimizer.offload:
            raise ValueError(f"{name}.offload_fraction={optimizer.offload_fraction} needs {name}.offload=true")


def _check_staleness(config: "JobConfig") -> None:
    rollout = config.rollout
    if rollout.max_staleness and rollout.oversampling:
        raise ValueError("rollout.oversampling needs rollout.max_staleness=0: trees then stay in flight anyway")
    if rollout.across_push == "keep_kv" and not rollout.max_staleness:
        raise ValueError("rollout.across_push=keep_kv needs rollout.max_staleness > 0: no tree is in flight at a push")
    if rollout.stale == "drop" and not rollout.max_staleness:
        raise ValueError("rollout.stale=drop needs rollout.max_staleness > 0: without it no tree is stale")


def _check_sft(config: "JobConfig") -> None:
    sft = config.sft
    if sft.data is None:
        if sft.held_out_share:
            raise ValueError(f"sft.held_out_share={sft.held_out_share} needs sft.data=FILE")
        if sft.max_tokens is not None:
            raise ValueError(f"sft.max_tokens={sft.max_tokens} needs sft.data=FILE")
        return
    if not sft.steps:
        raise ValueError("sft.data is not read with sft.steps=0: give sft.steps=N, too")
    if config.model.is_generated:
        raise ValueError("sft.data needs model.path=DIR of a model with a chat template: a generated model has none")
    if sft.max_tokens is not None and sft.max_tokens > config.model.max_length:
        raise ValueError(f"sft.max_tokens={sft.max_tokens} exceeds model.max_length={config.model.max_length}")


def _check_data(config: "JobConfig") -> None:
    data = config.data
    unread = OF_FILES if data.is_generated else ("tasks",)
    default = type(data)()
    if given := [name for name in unread if getattr(data, name) != getattr(default, name)]:
        fix = "give data.kind=files, too, or remove it" if data.is_generated else f"leave it at {default.tasks}"
        raise ValueError(f"data.{given[0]} is not read with data.kind={data.kind}: {fix}")
    if data.is_generated:
        check_tasks(config, data.tasks, f"data.tasks={data.tasks}")
        return
    if data.path is None:
        raise ValueError("data.kind=files needs data.path=FILE")
    if data.max_prompt_tokens >= config.model.max_length:
        raise ValueError(
            f"data.max_prompt_tokens={data.max_prompt_tokens} leaves no room in model.max_length="
            f"{config.model.max_length}"
        )
    if config.sft.steps and config.sft.data is None:
        raise ValueError("sft.steps > 0 needs sft.data=FILE with data.kind=files: questions hold no demonstrations")


def check_tasks(config: "JobConfig", tasks: int, source: str) -> None:
    """Raise ValueError if a step begins with more trees than there are training tasks.

    Args:
        config: the job.
        tasks: number of training tasks.
        source: where that number comes from, for the message.
    """
    trained, in_flight, rollout = config.train.tasks_per_step, config.trees_in_flight(0), config.rollout
    demand = f"train.tasks_per_step={trained}"
    if in_flight > trained:
        key = "max_staleness" if rollout.max_staleness else "oversampling"
        demand += f" with rollout.{key}={getattr(rollout, key)} starts {in_flight} trees at once, which"
    if max(in_flight, trained) > tasks:
        raise ValueError(f"{demand} exceeds {source}")


def _check_generated_model(model: "ModelConfig", parallel: "ParallelConfig") -> None:
    """Divisibility rules of tensor parallelism and grouped attention."""
    if model.hidden_size % model.heads:
        raise ValueError(f"model.hidden_size={model.hidden_size} is not a multiple of model.heads={model.heads}")
    head = model.hidden_size // model.heads
    if head % 2:
        raise ValueError(
            f"model.hidden_size={model.hidden_size} / model.heads={model.heads}: rotary positions need an even quotient"
        )
    check_heads(model, head)
    if model.heads % model.kv_heads:
        raise ValueError(f"model.heads={model.heads} is not a multiple of model.kv_heads={model.kv_heads}")
    chunks = parallel.pipeline * parallel.virtual_pipeline
    if model.layers % chunks:
        raise ValueError(
            f"model.layers={model.layers} is not a multiple of parallel.pipeline={parallel.pipeline} x "
            f"parallel.virtual_pipeline={parallel.virtual_pipeline}"
        )
    if parallel.expert > 1:
        raise ValueError(f"parallel.expert={parallel.expert} needs a model with experts at model.path")
    if model.router_aux_loss:
        raise ValueError(f"model.router_aux_loss={model.router_aux_loss} needs a model with experts at model.path")
    for name in ("kv_heads", "ffn_size"):
        if getattr(model, name) % parallel.tensor:
            raise ValueError(
                f"model.{name}={getattr(model, name)} is not a multiple of parallel.tensor={parallel.tensor}"
            )
    check_fp8_widths(
        model.fp8,
        hidden=model.hidden_size,
        queries=model.heads * head // parallel.tensor,
        keys=model.kv_heads * head // parallel.tensor,
        ffn=model.ffn_size // parallel.tensor,
    )
    check_fp8_layers(model, model.layers, parallel)


def check_heads(model: "ModelConfig", width: int) -> None:
    """Raise ValueError if `model.attention_backend` has no kernels for heads of this width."""
    multiple, largest = FLASH_HEADS
    if model.attention_backend == "flash" and (width % multiple or width > largest):
        raise ValueError(
            f"model.attention_backend=flash needs heads whose width is a multiple of {multiple} and at most {largest}, "
            f"not {width}: give model.attention_backend=auto"
        )


def _check_fp8(config: "JobConfig") -> None:
    model = config.model
    if model.transformer_impl == "transformer_engine" and model.dtype != "bfloat16":
        raise ValueError(f"model.transformer_impl=transformer_engine needs model.dtype=bfloat16, not {model.dtype}")
    if model.fp8 == "none":
        if model.bf16_edge_layers:
            raise ValueError(f"model.bf16_edge_layers={model.bf16_edge_layers} has no effect with model.fp8=none")
        return
    if model.dtype != "bfloat16":
        raise ValueError(f"model.fp8={model.fp8} needs model.dtype=bfloat16, not {model.dtype}")


def _check_engine(config: "JobConfig") -> None:
    if config.engine.tensor % config.engine.expert:
        raise ValueError(
            f"engine.tensor={config.engine.tensor} is not a multiple of engine.expert={config.engine.expert}"
        )
    if config.engine.quantization == "none":
        return
    if config.model.dtype != "bfloat16":
        raise ValueError(f"engine.quantization=fp8 needs model.dtype=bfloat16, not {config.model.dtype}")
    if config.sync.transport == "disk":
        raise ValueError("engine.quantization=fp8 needs sync.transport=network or ipc: files are not quantized")


def check_fp8_widths(fp8: "Fp8Recipe", *, hidden: int, queries: int, keys: int, ffn: int) -> None:
    """Check the rows and columns of a layer's weights, as one rank holds them.

    Args:
        fp8: the recipe.
        hidden: width of the residual stream.
        queries: rows of the query projection.
        keys: rows of the key projection.
        ffn: width of the MLP, or of an expert.

    Raises:
        ValueError: one of them is not the multiple that the products need.
    """
    fused = {"hidden size": hidden, "query width": queries, "query, key and value width": queries + 2 * keys}
    check_multiples(f"model.fp8={fp8}: the", "of a rank", fused | {"MLP width": ffn}, FP8_FEATURES[fp8])


def check_multiples(before: str, after: str, widths: Mapping[str, int], multiple: int) -> None:
    """Raise ValueError if a width is not a multiple, in words between `before` and `after` the width's name."""
    for name, width in widths.items():
        if width % multiple:
            raise ValueError(f"{before} {name} {after} ({width}) is not a multiple of {multiple}")


def check_fp8_layers(model: "ModelConfig", layers: int, parallel: "ParallelConfig") -> None:
    """Raise ValueError if `model.bf16_edge_layers` exceeds the layers of a pipeline stage."""
    if model.bf16_edge_layers > layers // parallel.pipeline:
        raise ValueError(
            f"model.bf16_edge_layers={model.bf16_edge_layers} exceeds the {layers // parallel.pipeline} layers of a "
            "pipeline stage"
        )
