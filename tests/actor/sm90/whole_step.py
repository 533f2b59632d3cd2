"""Script of test_pretended_gpu.py: one whole update on a pretended H200, with fake tensors.

Fake tensors have shapes, dtypes and devices, and no values. An operation on tensors of two devices raises. A copy to
the host and a synchronisation, for which the host would wait, are noted with our line that asks. The mode counts the
bytes of all storages on the device, and launches: operations on tensors of the device that are no views, copies from or
to the host, or allocations, and calls of compiled kernels. Argument: the compiled guard. Prints one JSON object.
"""

import ctypes
import json
import os
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.pop("TORCHDYNAMO_DISABLE", None)
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
ctypes.CDLL(sys.argv[1])  # before torch

import numpy as np
import torch
import torch.distributed as dist
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.jit import JITFunction

from tests.actor.sm90 import pretend

ROOT = Path(__file__).parents[3]
TOKENS = 4096


class Counting(FakeTensorMode):
    """Fake tensors, the bytes of their storages on the device, and the copies to the host."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.known: set[int] = set()
        self.live = self.peak = 0
        self.at_peak = ""
        self.depth = 0
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.device_copies: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of torch on fake tensors."""
        if func is torch.ops.aten._to_copy.default and (found := self._copy(args[0], **(kwargs or {}))) is not None:
            return found
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._value(args[0], lambda: super(Counting, self).__torch_dispatch__(func, types, args, kwargs))
        self.depth += 1  # an operation may be made of others
        try:
            found = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.depth -= 1
        tree_map_only(FakeTensor, self._note, found)
        on_device = any(isinstance(t, FakeTensor) and t.device.type == "cuda" for t in tree_leaves((args, found)))
        if on_device and not self.depth and TracingContext.try_get() is None and not _is_free(func):
            self.launch()
        return found

    def launch(self, *arguments: Any, **options: Any) -> None:
        """Note a launch."""
        in_head = any(frame.filename.endswith("/actor/logprobs.py") for frame in traceback.extract_stack())
        self.launches["head" if in_head else "rest"] += 1

    def wait(self, device: Any = None) -> None:
        """Note that the host waits for the device."""
        self.waits[_own_line()] += 1

    def _value(self, source: torch.Tensor, read: Callable[[], Any]) -> Any:
        """Return the value of a tensor of the host if it is known, else 1; note a copy from the device."""
        if source.device.type == "cuda":
            self.wait()
        else:
            with suppress(DataDependentOutputException):
                return read()
        return 1.0 if source.is_floating_point() else 1

    def _copy(self, source: torch.Tensor, *, device: Any = None, **options: Any) -> torch.Tensor | None:
        """Note a copy between host and device and return its result; None for any other copy."""
        target = source.device if device is None else torch.device(device)
        if target.type == source.device.type:
            return None
        (self.waits if target.type == "cpu" else self.device_copies)[_own_line()] += 1
        with self:
            return torch.empty(source.shape, dtype=options.get("dtype") or source.dtype, device=target)

    def _note(self, tensor: FakeTensor) -> None:
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        if (key := storage._cdata) in self.known:
            return
        size = storage.nbytes()
        self.known.add(key)
        self.live += size
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, _own_line()
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def _is_free(func: Any) -> bool:
    """Return whether an operation launches no kernel: a view, an allocation, a question about the device."""
    view = getattr(func, "is_view", False) or "_unsafe_view" in str(func)
    return view or "empty" in str(func) or str(func).startswith("prim.")


def _own_line() -> str:
    for frame in reversed(traceback.extract_stack()):
        if "/arpo_megatron/" in frame.filename:
            return f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno} {frame.name}"
    return "not ours"


def main() -> None:
    pretend.install()
    mode = Counting()
    torch.cuda.synchronize = mode.wait
    from torch._inductor.runtime import triton_heuristics

    from arpo_megatron.actor import cpu_platform, flex_attention, microbatch, parallel
    from arpo_megatron.hardware.patching import apply

    generator = "megatron.core.tensor_parallel.random:_set_cuda_rng_state"
    apply([patch for patch in cpu_platform.PATCHES if patch.target == generator])
    plan, move = pretend.attention_functions(mode)
    make_tensor = torch.tensor

    def tensor(values: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        """Make a tensor without values on the device: the mode does not see that torch copies them."""
        made = make_tensor(tree_map_only(FakeTensor, float, values), **options)
        here = device is None or torch.device(device).type == "cpu"
        return made if here else torch.empty(made.shape, dtype=made.dtype, device=device)

    torch.tensor = tensor
    FakeTensor.numpy = lambda self: np.ones(tuple(self.shape))
    torch.nn.Module.to = move_module
    JITFunction.run = mode.launch  # our own kernels write into tensors that exist
    triton_heuristics.CachingAutotuner.run = mode.launch
    microbatch.flex_plan, microbatch.move, flex_attention.move = plan, move, move
    print(json.dumps(step(mode, parallel)))


def move_module(module: torch.nn.Module, device: Any) -> torch.nn.Module:
    """Do what `Module.to` does; its way to exchange parameters needs tensors with values."""
    for part in module.modules():
        for names in (part._parameters, part._buffers):
            for name, old in names.items():
                if old is not None and old.device.type == "cpu":
                    new = torch.empty(old.shape, dtype=old.dtype, device=device)
                    names[name] = torch.nn.Parameter(new) if isinstance(old, torch.nn.Parameter) else new
                    for mark, value in old.__dict__.items():  # those of Megatron; the mode has others
                        names[name].__dict__.setdefault(mark, value)
    return module


def step(mode: Counting, parallel: Any) -> dict[str, Any]:
    from megatron.core import tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from arpo_megatron.actor.actor import Actor
    from arpo_megatron.algorithms.credit import supervised_credit
    from arpo_megatron.config import JobConfig, ModelConfig, OptimizerConfig, ParallelConfig
    from arpo_megatron.models.known import KNOWN_MODELS
    from arpo_megatron.packing.packs import pack_trees
    from arpo_megatron.plan.synthetic_trees import Mix

    layout = ParallelConfig()
    spec = replace(KNOWN_MODELS["Qwen/Qwen3-0.6B"], layers=4)
    tree = Mix(samples=4, initial=2, calls=2, prompt=400, segment=(200, 200), result=(200, 200)).tree(0, 500)
    packs = pack_trees([tree], supervised_credit([tree]), token_budget=TOKENS)
    os.environ.update(RANK="0", WORLD_SIZE="1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    new_group = dist.new_group
    dist.new_group = lambda *ranks, **options: new_group(*ranks, **{**options, "backend": "fake"})
    dist.all_reduce = lambda *arguments, **options: None  # of one rank
    dist.all_gather_object = lambda found, own, group=None: found.__setitem__(0, own)  # pickles are values
    parallel.create_groups(layout)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = JobConfig(name="test", model=ModelConfig(hub_id="not read", dtype="float32"), parallel=layout)
    with mode:
        actor = Actor(config, spec, None, optimizer=OptimizerConfig(), total_updates=2)
        held = mode.live
        launches: dict[str, int] = {}
        accumulate = actor.accumulate

        def counted(*arguments: Any, **options: Any) -> Any:
            mode.launches.clear()
            found = accumulate(*arguments, **options)
            launches.update(mode.launches)
            return found

        actor.accumulate = counted
        actor.update(packs, None)
    return {
        "tokens": sum(len(pack) for pack in packs),
        "packs": len(packs),
        "parameters": len(list(actor.model.parameters())),
        "held": held,
        "peak": mode.peak,
        "at_peak": mode.at_peak,
        "after": mode.live,
        "waits": dict(mode.waits),
        "launches": launches,
        "device_copies": dict(mode.device_copies),
        **planned(config, spec, packs),
    }


def planned(config: Any, spec: Any, packs: Any) -> dict[str, float]:
    from arpo_megatron.plan import memory
    from arpo_megatron.plan.activations import Tokens

    (pack,) = packs
    static = sum(memory.static_parts(config, spec, 0).values())
    parts = memory.pack_parts(config, spec, Tokens(len(pack), len(pack)), len(pack.predictors))
    return {"planned_held": static, "planned_peak": static + sum(parts.values()), "kept": parts["activations"]}


if __name__ == "__main__":
    main()
