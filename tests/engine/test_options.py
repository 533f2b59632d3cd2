"""`engine.options`: passed to SGLang by name, checked against the installed version before anything starts."""

import pytest

from arpo_megatron.engine import options
from arpo_megatron.engine.options import OWN_KEYS, REFUSED, age_options, extra_options, known_options
from arpo_megatron.errors import UserError


def test_options_become_arguments() -> None:
    given = {"kv_cache_dtype": "fp8_e4m3", "enable-hierarchical-cache": True, "chunked_prefill_size": 4096}
    assert extra_options({**given, "enable_mixed_chunk": False}) == {
        "kv-cache-dtype": "fp8_e4m3",
        "enable-hierarchical-cache": None,
        "chunked-prefill-size": 4096,
    }
    assert {"ep_size", "nnodes", "tokenizer_worker_num", "cpu_offload_gb"} <= known_options()


def test_refused_options_are_those_of_the_installed_version() -> None:
    """A name with a typo would refuse nothing."""
    known = known_options()
    assert all(any(name.startswith(start) for name in known) for start in REFUSED)
    assert {name for name in OWN_KEYS if name not in known} <= {"tensor_parallel_size"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("speculative_algorithm", "engine.options.speculative_algorithm is not possible: entropies are measured"),
        ("pp-size", "engine.options.pp-size is not possible: a weight push"),
        ("page_size", "trajectories fork at any token"),
        ("enable-symm-mem", "is not possible: SGLang would change NCCL's settings in the engine only"),
        ("enable_nccl_nvls", "is not possible: SGLang would change NCCL's settings in the engine only"),
        ("tokenizer_worker_num", "is not possible: its processes would serve without the check of tokens"),
        ("dp-size", "set engine.replicas"),
        ("enable_dp_attention", "set engine.replicas"),
        ("nnodes", "is not possible: an engine runs on one node"),
        ("json_model_override_args", "trainer and engine read one config of the model"),
        ("enable_eplb", "a weight push expects each expert once"),
        ("grpc_port", "is not possible: the clients reach one HTTP server"),
        ("ssl_certfile", "is not possible: the clients reach one HTTP server"),
        ("dwdp_size", "a weight push knows tensor and expert parallelism only"),
        (
            "checkpoint_engine_wait_weights_before_ready",
            "is not possible: a weight push writes to parameters on the device",
        ),
        ("attn_cp_size", "a weight push knows tensor and expert parallelism only"),
        ("offload_group_size", "a weight push writes to parameters on the device"),
        ("allow_auto_truncate", "a prompt that the engine has shortened"),
        ("preferred_sampling_params", "is not possible: each request sets its own"),
        ("forward_hooks", "is not possible: the engine runs no code of others"),
        ("custom_sigquit_handler", "is not possible: the engine runs no code of others"),
        ("enable-custom-logit-processor", "is not possible: the engine runs no code of others"),
        ("hicache_storage_backend", "new weights would read the keys and values of old ones"),
        ("enable_lora", "a weight push writes to parameters on the device"),
        ("kv_events_config", "is not possible: the clients reach one HTTP server"),
        ("delete_ckpt_after_loading", "a restarted engine reads the model's files again"),
        ("context_length", "set model.max_length instead"),
        ("modelopt_quant", "set engine.quantization instead"),
        ("base_gpu_id", "the launcher sets it"),
        ("ep_size", "set engine.expert instead"),
        ("tp_size", "set engine.tensor instead"),
        ("enable_fp32_lm_head", "set model.fp32_head instead"),
        ("port", "the launcher sets it"),
        ("enable_priority_scheduling", "set rollout.priority instead"),
        ("schedule-low-priority-values-first", "set rollout.priority instead"),
        ("kv_cache_dtyp", "has no such option; did you mean engine.options.kv_cache_dtype?"),
    ],
)
def test_impossible_options_are_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        extra_options({name: "x"})
    assert message in str(refused.value)


def test_engine_that_cannot_order_requests_by_age_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name.replace("-", "_") for name in age_options({"schedule_policy": "lof"})} <= known_options()
    with pytest.raises(
        UserError, match=r"rollout.priority=age needs engine.options.schedule_policy=fcfs or lof, not lpm"
    ):
        age_options({"schedule-policy": "lpm"})
    monkeypatch.setattr(options, "known_options", lambda: {"enable_priority_scheduling"})
    with pytest.raises(UserError, match="the installed SGLang has no option disable-priority-preemption"):
        age_options({})
