"""SGLang options that a config passes through (`engine.options`), checked against the installed version."""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from arpo_megatron.engine.growing_trees import PRIORITIES
from arpo_megatron.errors import UserError, did_you_mean

_REPLICAS = "a tree would lose its cache between replicas; set engine.replicas"
_ONE_NODE = "an engine runs on one node"
_SERVER = "the clients reach one HTTP server, which checks the token and holds the gate of a push"
_SHARDS = "a weight push knows tensor and expert parallelism only"
_WEIGHTS = "a weight push writes to parameters on the device"
_CODE = "the engine runs no code of others, which could change what it samples"
_STORE = "a push could not empty it, and new weights would read the keys and values of old ones"
_EXPERTS = "a weight push expects each expert once, where engine.expert puts it"
_NCCL = "SGLang would change NCCL's settings in the engine only, and trainer and engine share a group in a push"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("speculative", "decoupled_spec", "dllm_"), "entropies are measured for one token at a time"),
    "pp_size": "a weight push reaches tensor-parallel ranks only",
    "disaggregation": "a tree's prefixes must stay in the cache of the engine that decodes",
    "page_size": "trajectories fork at any token, so a page holds one",
    "allow_auto_truncate": "a tree would be trained on a prompt that the engine has shortened",
    "delete_ckpt_after_loading": "a restarted engine reads the model's files again",
    **dict.fromkeys(
        ("disable_radix_cache", "enable_mis", "strip_thinking_cache"),
        "the branches of a tree share their prefixes through the cache",
    ),
    **dict.fromkeys(("is_embedding", "encoder_only"), "the engine generates text"),
    "skip_tokenizer_init": "stop strings are searched in text",
    "incremental_streaming_output": "the client reads streams whose pieces hold all tokens so far",
    **dict.fromkeys(("stream_interval", "preferred_sampling_params"), "each request sets its own"),
    "tokenizer_worker_num": "its processes would serve without the check of tokens and without the gate of a push",
    **dict.fromkeys(("dp_size", "enable_dp_"), _REPLICAS),
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr"), _ONE_NODE),
    "json_model_override_args": "trainer and engine read one config of the model",
    **dict.fromkeys(("custom_", "enable_custom_logit_processor", "forward_hooks", "trust_remote_code"), _CODE),
    **dict.fromkeys(("hicache_storage", "enable_lmcache", "enable_flexkv", "radix_cache_backend"), _STORE),
    **dict.fromkeys(
        ("cpu_offload_gb", "offload_", "kt_", "enable_lora", "lora_paths", "weight_cache", "checkpoint_engine"),
        _WEIGHTS,
    ),
    **dict.fromkeys(
        ("grpc", "smg_grpc", "sidecar", "ssl_", "admin_api_key", "kv_events_config", "tokenizer_ipc_name"), _SERVER
    ),
    **dict.fromkeys(("attn_cp", "moe_dp", "moe_dense_tp", "use_ray", "elastic_ep", "ep_join", "dwdp_"), _SHARDS),
    **dict.fromkeys(("enable_eplb", "ep_num_redundant_experts", "init_expert_location"), _EXPERTS),
    **dict.fromkeys(("enable_symm_mem", "enable_nccl_nvls", "dcp_size"), _NCCL),
}
"""Start of an option's name -> why the project's additions to the engine cannot serve it."""
OWN_KEYS: Mapping[str, str] = {
    "tp_size": "engine.tensor",
    "tensor_parallel_size": "engine.tensor",
    "ep_size": "engine.expert",
    "max_running_requests": "engine.max_running_requests",
    "max_total_tokens": "engine.max_total_tokens",
    "mem_fraction_static": "engine.memory_fraction",
    "attention_backend": "engine.attention_backend",
    "quantization": "engine.quantization",
    "enable_deterministic_inference": "engine.deterministic",
    **dict.fromkeys(("quantize_and_serve", "modelopt_quant", "rl_quant_profile"), "engine.quantization"),
    "dtype": "model.dtype",
    "context_length": "model.max_length",
    "tokenizer_path": "model.path",
    "enable_fp32_lm_head": "model.fp32_head",
    "random_seed": "seed",
    "enable_priority_scheduling": "rollout.priority",
    "disable_priority_preemption": "rollout.priority",
    "default_priority_value": "rollout.priority",
    "schedule_low_priority_values_first": "rollout.priority",
    **dict.fromkeys(("model_path", "host", "port", "api_key", "weight_version", "load_format"), ""),
    **dict.fromkeys(("device", "base_gpu_id", "gpu_id_step", "nccl_port"), ""),
}
"""Options with a key of their own; "": the launcher sets them."""


def extra_options(options: Mapping[str, bool | float | str]) -> dict[str, object]:
    """Return `engine.options` as command-line options of SGLang; a value of None stands for a flag.

    Raises:
        UserError: the installed SGLang has no such option, or the engine cannot have it.
    """
    known, found = None, dict[str, object]()
    for given, value in options.items():
        name = given.replace("-", "_")
        for refused, why in REFUSED.items():
            if name.startswith(refused):
                raise UserError(f"engine.options.{given} is not possible: {why}")
        if (own := OWN_KEYS.get(name)) is not None:
            raise UserError(f"engine.options.{given}: {f'set {own} instead' if own else 'the launcher sets it'}")
        known = known or known_options()
        if known and name not in known:
            hint = did_you_mean(name, sorted(known), "engine.options.")
            raise UserError(f"engine.options.{given}: the installed SGLang has no such option{hint}")
        if value is not False:
            found[name.replace("_", "-")] = None if value is True else value
    return found


def age_options(options: Mapping[str, bool | float | str]) -> dict[str, object]:
    """Return SGLang's options for `rollout.priority=age`; a value of None stands for a flag.

    Larger priorities come first, and no running request gives way to a waiting one: it would lose its tokens' KV.

    Args:
        options: `engine.options`.

    Raises:
        UserError: the installed SGLang has no such option, or cannot combine it with `schedule_policy`.
    """
    found: dict[str, object] = {
        "enable-priority-scheduling": None,
        "disable-priority-preemption": None,
        "default-priority-value": PRIORITIES - 1,
    }
    known = known_options()
    if missing := [name for name in found if known and name.replace("-", "_") not in known]:
        raise UserError(f"rollout.priority=age: the installed SGLang has no option {missing[0]}")
    policies = {value for name, value in options.items() if name.replace("-", "_") == "schedule_policy"}
    if refused := policies - {"fcfs", "lof"}:
        raise UserError(f"rollout.priority=age needs engine.options.schedule_policy=fcfs or lof, not {refused.pop()}")
    return found


def known_options() -> set[str]:
    """Return the names of the installed SGLang's options; empty if it is not installed.

    They are read from its source: an import takes seconds.
    """
    try:
        source = Path(str(distribution("sglang").locate_file("sglang/srt/server_args.py"))).read_text(encoding="utf-8")
    except (PackageNotFoundError, OSError):
        return set()
    fields = source[source.find("class ServerArgs") :]
    return set(re.findall(r"^    ([a-z]\w+): ", fields, flags=re.MULTILINE))
