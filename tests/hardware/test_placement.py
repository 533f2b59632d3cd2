"""Placement is a pure function of config and GPUs; an unsuitable machine is a one-line error."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from arpo_megatron.config import EngineConfig, JobConfig, ParallelConfig
from arpo_megatron.engine.launch import engine_options
from arpo_megatron.errors import UserError
from arpo_megatron.hardware import placement, transformer_engine
from arpo_megatron.hardware.environment import process_environment, trainer_environment
from arpo_megatron.hardware.placement import ON_CPU, Placement
from arpo_megatron.jobs import resolve


def job(*, ranks: int = 1, engine: int = 1) -> JobConfig:
    return JobConfig(name="test", parallel=ParallelConfig(data=ranks), engine=EngineConfig(tensor=engine))


@pytest.mark.parametrize(
    ("ranks", "engine", "gpus", "expected"),
    [
        (1, 1, 0, Placement(0, 0, colocated=False)),
        (1, 1, 1, Placement(1, 0, colocated=True)),
        (1, 1, 2, Placement(2, 1, colocated=False)),
        (4, 4, 8, Placement(8, 4, colocated=False)),
        (8, 2, 8, Placement(8, 0, colocated=True)),
    ],
)
def test_auto_placement_shares_only_if_there_are_too_few_gpus(ranks, engine, gpus, expected) -> None:
    assert Placement.of(job(ranks=ranks, engine=engine), gpus) == expected


def test_engine_replicas_take_consecutive_gpus() -> None:
    config = JobConfig(name="test", parallel=ParallelConfig(data=4), engine=EngineConfig(tensor=2, replicas=2))
    place = Placement.of(config, 8)
    assert [place.of_engine(index, config.engine).engine_gpu for index in range(2)] == [4, 6]
    assert Placement.of(config, 7).colocated
    assert Placement.of(config, 0).of_engine(1, config.engine) == ON_CPU


def test_memory_fraction_is_smaller_for_shared_gpus_unless_set() -> None:
    colocated, alone = Placement.of(job(), 1), Placement.of(job(), 2)
    assert colocated.memory_fraction(EngineConfig()) < alone.memory_fraction(EngineConfig())
    assert colocated.memory_fraction(EngineConfig(memory_fraction=0.9)) == 0.9


def test_platform_cpu_hides_gpus_from_all_processes() -> None:
    for environment in (process_environment("cpu"), trainer_environment("cpu")):
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert trainer_environment("auto", emulate_te=True).items() > process_environment("cpu").items()
    for environment in (process_environment("auto"), trainer_environment("auto")):
        assert "CUDA_VISIBLE_DEVICES" not in environment
    assert placement.gpu_count("cpu") == 0


def not_installed(package: str) -> str:
    raise PackageNotFoundError(package)


@pytest.mark.parametrize(
    ("overrides", "gpus", "line"),
    [
        (["parallel.data=2"], 1, "2 trainer ranks need 2 GPUs, but torch finds 1"),
        (["engine.tensor=4"], 2, "4 engine.tensor * engine.replicas need 4 GPUs, but torch finds 2"),
        (["engine.placement=split"], 1, "1 for engines, but torch finds 1: set engine.placement=colocated"),
        (["model.fp8=current"], 0, "transformer-engine 2.11.0, but transformer-engine is not installed: pip install"),
        (["model.fp8=current"], 1, "model.fp8=current needs transformer-engine[pytorch] 2.11.0"),
        (["model.transformer_impl=transformer_engine", "model.dtype=bfloat16"], 1, "needs transformer-engine[pytorch]"),
        (
            ["optimizer.offload=true", "parallel.distributed_optimizer=true", "model.dtype=bfloat16"],
            0,
            "optimizer.offload=true needs a GPU",
        ),
        (["sync.transport=ipc"], 2, "needs engine.placement=colocated"),
        (
            ["model.attention_backend=flash", "model.dtype=bfloat16"],
            0,
            "attention_backend=flash needs a GPU: give model",
        ),
    ],
)
def test_check_machine_error_is_one_line(overrides, gpus, line, monkeypatch) -> None:
    monkeypatch.setattr(placement, "_visible_gpus", lambda: gpus)
    monkeypatch.setattr(transformer_engine, "version", not_installed)
    with pytest.raises(UserError) as caught:
        placement.check_machine(resolve.resolve("quickstart", overrides=overrides))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_blockwise_needs_products_of_cuda_12_9(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_visible_gpus", lambda: 1)
    monkeypatch.setattr(placement, "extension_fault", lambda: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.version.cuda", "12.8")
    placement.check_machine(resolve.resolve("quickstart", overrides=["model.fp8=current"]))
    with pytest.raises(UserError, match=r"blockwise needs a torch for CUDA 12\.9 or newer, but this is one for 12\.8"):
        placement.check_machine(resolve.resolve("quickstart", overrides=["model.fp8=blockwise"]))


def test_transformer_engine_of_another_version_or_torch_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its Python is here without an extension, which fails like an extension for another torch: on import."""
    monkeypatch.setattr(placement, "_visible_gpus", lambda: 1)
    for module in (placement, transformer_engine):
        monkeypatch.setattr(module, "extension_installed", lambda: True)
    for overrides in (["model.fp8=blockwise"], ["model.dtype=bfloat16"]):
        config = resolve.resolve("quickstart", overrides=overrides)
        with monkeypatch.context() as patched:
            patched.setattr(transformer_engine, "version", lambda package: "2.20.2+abc")
            with pytest.raises(UserError, match=r"needs transformer-engine 2\.11\.0 instead of 2\.20\.2 \(pip install"):
                placement.check_machine(config)
        with pytest.raises(UserError, match=r"needs a transformer-engine for this torch \(pip install .*\): \w+"):
            placement.check_machine(config)
    placement.check_machine(resolve.resolve("quickstart", overrides=["model.dtype=float32"]))


def test_recomputed_norms_need_transformer_engines_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_visible_gpus", lambda: 1)
    chosen = ["parallel.recompute=selective", "parallel.recompute_modules=[layernorm, moe_act]"]
    for dtype, installed in (("bfloat16", False), ("float32", True)):
        monkeypatch.setattr(placement, "extension_installed", lambda installed=installed: installed)
        with pytest.raises(UserError, match=r"recompute_modules=layernorm needs .*: model\.dtype=bfloat16 and pip"):
            placement.check_machine(resolve.resolve("quickstart", overrides=[*chosen, f"model.dtype={dtype}"]))
    monkeypatch.setattr(placement, "extension_installed", lambda: True)
    monkeypatch.setattr(placement, "extension_fault", lambda: None)
    placement.check_machine(resolve.resolve("quickstart", overrides=[*chosen, "model.dtype=bfloat16"]))


def test_import_that_ends_without_a_message_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer_engine._import_error.cache_clear()
    monkeypatch.setattr(transformer_engine, "extension_installed", lambda: True)
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert str(transformer_engine.extension_fault()).endswith("the import ended with exit code 1")
    transformer_engine._import_error.cache_clear()


def test_import_that_hangs_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    transformer_engine._import_error.cache_clear()
    monkeypatch.setattr(transformer_engine, "extension_installed", lambda: True)
    monkeypatch.setattr(transformer_engine, "IMPORT_LIMIT_S", 0.2)
    monkeypatch.setattr("sys.executable", str(sleeper))
    assert str(transformer_engine.extension_fault()).endswith("the import took more than 0.2 s")
    transformer_engine._import_error.cache_clear()


@pytest.mark.parametrize(
    ("capability", "torch_version", "installed", "line"),
    [
        ((10, 0), "2.13.0+cu130", True, r"needs a Hopper GPU \(compute capability 9\.0\), but this GPU has 10\.0"),
        ((8, 0), "2.13.0+cu130", True, r"needs a Hopper GPU \(compute capability 9\.0\), but this GPU has 8\.0"),
        ((9, 0), "2.11.0+cu130", True, r"needs torch 2\.13 or newer, not 2\.11\.0\+cu130"),
        ((9, 0), "2.13.0+cu130", False, "needs FlashAttention 4: pip install --pre flash-attn-4"),
        ((9, 0), "2.13.0+cu130", True, None),
        ((9, 0), "2.14.1", True, None),
    ],
)
def test_flash_attention_needs_its_gpu_torch_and_package(
    capability, torch_version, installed, line, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = resolve.resolve("quickstart", overrides=["model.attention_backend=flash", "model.dtype=bfloat16"])
    monkeypatch.setattr(placement, "_visible_gpus", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("torch.__version__", torch_version)
    monkeypatch.setattr(placement, "version", (lambda package: "4.0.0b18") if installed else not_installed)
    if line is None:
        placement.check_machine(wanted)
        return
    with pytest.raises(UserError, match=rf"^model\.attention_backend=flash {line}$"):
        placement.check_machine(wanted)


def test_fp8_engines_need_products_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = resolve.resolve("quickstart", overrides=["engine.quantization=fp8", "model.dtype=bfloat16"])
    monkeypatch.setattr(placement, "_visible_gpus", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    placement.check_machine(wanted)
    for found in ((8, 0), (10, 0), (12, 0)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda found=found: found)
        bounds = rf"quantization=fp8 needs compute capability 8\.9, below 10\.0, but this GPU has {found[0]}\.0$"
        with pytest.raises(UserError, match=bounds):
            placement.check_machine(wanted)


def test_gpu_engine_captures_its_largest_batch_and_caches_single_tokens() -> None:
    options = engine_options(EngineConfig(max_running_requests=48), Placement.of(job(), 2), "bfloat16")
    assert (options["device"], options["dtype"]) == ("cuda", "bfloat16")
    assert options["base-gpu-id"] == 1
    assert options["cuda-graph-max-bs"] == 48
    assert options["page-size"] == 1
    assert "attention-backend" not in options
    assert "sleep-on-idle" not in options
    chosen = EngineConfig(attention_backend="fa3", deterministic=True)
    options = engine_options(chosen, Placement.of(job(), 2), "bfloat16")
    assert options["attention-backend"] == "fa3"
    assert "enable-deterministic-inference" in options
    assert engine_options(EngineConfig(), Placement.of(job(), 1), "float32")["attention-backend"] == "triton"
