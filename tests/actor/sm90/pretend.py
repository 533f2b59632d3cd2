"""A pretended H200 in a CPU build of torch: fake tensors on `cuda:0`, kernels that are compiled and never run.

guard.cpp registers a device guard and hooks, so that autograd accepts CUDA tensors. Inductor and Triton ask for the
device's properties and compile down to an sm_90 binary with the ptxas of the package. It needs a process of its own,
which loads the guard before it imports torch (torch asks for hooks once) and then calls `install`.
"""

import re
import subprocess
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

HOPPER = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=143771 << 20,
    multi_processor_count=132,
    gcnArchName="",
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block_optin=232448,
    shared_memory_per_block=49152,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 << 20,
    regs_per_multiprocessor=65536,
    uuid="pretended",
)
KERNELS: list[dict[str, Any]] = []
"""Figures of every compiled kernel, in order."""


def build_guard(folder: Path) -> Path:
    """Compile guard.cpp against the installed torch."""
    from torch.utils.cpp_extension import include_paths, library_paths

    library, source = folder / "guard.so", Path(__file__).with_name("guard.cpp")
    headers = [f"-I{path}" for path in include_paths()]
    libraries = [f"{option}{path}" for path in library_paths() for option in ("-L", "-Wl,-rpath,")]
    options = ("-std=c++20", "-O1", "-shared", "-fPIC", *headers, source, *libraries, "-ltorch_cpu", "-lc10")
    subprocess.run(["g++", *options, "-o", library], check=True)
    return library


def install() -> None:
    """Pretend the device: tensors of a FakeTensorMode can then be on it."""
    _pretend_device()
    _compile_without_running()


def attention_functions(mode: FakeTensorMode) -> tuple[Callable[..., Any], Callable[..., torch.Tensor]]:
    """Return `flex_plan`, which computes real values on the host, and `move`, which makes a fake tensor there."""
    from arpo_megatron.actor.flex_attention import FlexPlan, flex_plan

    def plan(*arguments: Any) -> FlexPlan:
        with unset_fake_temporarily():
            return flex_plan(*arguments)

    def move(values: torch.Tensor, target: torch.device | str) -> torch.Tensor:
        with mode:
            return torch.empty(values.shape, dtype=values.dtype, device=target)

    return plan, move


class _Device:
    def __init__(self, index: Any = 0) -> None:
        self.idx, self.prev_idx = index, 0

    def __enter__(self) -> "_Device":
        return self

    def __exit__(self, *error: object) -> bool:
        return False


class _Event:
    def __init__(self, *, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass


def _pretend_device() -> None:
    cuda: Any = torch.cuda
    found = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: HOPPER,
        "get_device_name": lambda device=None: HOPPER.name,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: None,  # whole_step.py counts it
        "Event": _Event,
        "set_device": lambda device: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda *place, device=None: torch.get_rng_state(),
        "set_rng_state": lambda *state, device=None: None,
        "device": _Device,
        "_DeviceGuard": _Device,
    }
    for name, value in found.items():
        setattr(cuda, name, value)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    torch.version.cuda = "13.0"
    bindings = {
        "_cuda_getDevice": lambda: 0,
        "_cuda_exchangeDevice": lambda index: 0,
        "_cuda_maybeExchangeDevice": lambda index: 0,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_setDevice": lambda index: None,
        "_cuda_getCurrentRawStream": lambda index: 0,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getDriverVersion": lambda: 13000,
        "_cuda_getArchFlags": lambda: "sm_90",
    }
    for name, value in bindings.items():
        setattr(torch._C, name, value)


class _Driver:
    """Triton's driver of the pretended device."""

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32}

    launcher_cls = None

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def is_active(self) -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def set_current_device(self, device: int) -> None:
        pass


def _compile_without_running() -> None:
    import torch._inductor.config as inductor
    import torch._inductor.fx_passes.fuse_attention as fuse_attention
    import torch._inductor.fx_passes.misc_patterns as misc_patterns
    import torch._inductor.fx_passes.pad_mm as pad_mm
    import torch._inductor.runtime.triton_helpers as helpers
    import torch._inductor.runtime.triton_heuristics as heuristics
    import triton
    from triton.runtime import driver

    patterns: tuple[tuple[Any, str], ...] = (
        (fuse_attention, "_sfdp_init"),
        (pad_mm, "_pad_mm_init"),
        (misc_patterns, "_misc_patterns_init"),
    )
    for module, name in patterns:  # they trace real products on the device
        setattr(module, name, lambda *arguments, **options: None)
    inductor.compile_threads, inductor.fx_graph_cache = 1, False
    driver.set_active(_Driver())
    compile_kernel = triton.compile

    def compile_and_note(source: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        result = compile_kernel(source, target=target or _Driver().get_current_target(), options=options, **more)
        KERNELS.append(_figures(result))
        return result

    triton.compile = heuristics.triton.compile = compile_and_note
    helpers.set_driver_to_gpu = heuristics.triton_helpers.set_driver_to_gpu = lambda: None
    heuristics.CachingAutotuner.run = lambda self, *arguments, **options: None
    heuristics.CachingAutotuner._make_launchers = lambda self: setattr(self, "launchers", [])
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda:0"
    )


def _figures(result: Any) -> dict[str, Any]:
    """Return registers, stack, spills, shared memory and matrix instructions of a compiled kernel.

    Spills of loops are those in innermost loops with matrix instructions, which run once per block of the mask.
    """
    import triton

    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        used, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    counts = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", used)}
    return {
        "name": result.metadata.name,
        "registers": counts["REG"],
        "stack_bytes": counts["STACK"],
        "local_bytes": counts["LOCAL"],
        "shared_bytes": int(result.metadata.shared),
        "warps": int(result.metadata.num_warps),
        "stages": int(result.metadata.num_stages),
        "wgmma": len(re.findall(r"\bHGMMA\b", code)),
        "mma": len(re.findall(r"\bHMMA\b", code)),
        "spill_stores": len(re.findall(r"\bSTL\b", code)),
        "spill_loads": len(re.findall(r"\bLDL\b", code)),
        "loops": _loop_spills(code),
    }


def _loop_spills(code: str) -> list[dict[str, int]]:
    """Return instructions, spill stores and spill loads of each innermost loop with matrix instructions."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)]
    jumps = [(int(to.group(1), 16), at) for at, text in lines if (to := re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text))]
    loops = [(start, stop) for start, stop in jumps if start < stop]
    found = []
    for start, stop in loops:
        if any(start <= other and end <= stop and (other, end) != (start, stop) for other, end in loops):
            continue
        body = " ".join(text for at, text in lines if start <= at <= stop)
        if "HGMMA" in body:
            counts = {name: len(re.findall(rf"\b{name}\b", body)) for name in ("STL", "LDL")}
            size = sum(start <= at <= stop for at, _ in lines)
            found.append({"instructions": size, "spill_stores": counts["STL"], "spill_loads": counts["LDL"]})
    return found
