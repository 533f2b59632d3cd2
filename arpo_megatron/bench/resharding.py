"""Pushes from trainers of four ranks to an engine of TP2, for `arpo bench sync`.

For each layout of the trainer, and each transport that reshards, it measures the bytes that an engine rank receives
over the bytes that it holds, the largest buffer of any process over a bucket, and the seconds of pushes. Bare exchanges
of the same plan by the same transport (`bench.bare_exchange`) are timed in turn with the pushes. Neither time includes
probe or checksums.
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from arpo_megatron.bench.bare_exchange import BareExchange
from arpo_megatron.bench.ranks import run_ranks
from arpo_megatron.config import ParallelConfig, SyncConfig

if TYPE_CHECKING:  # they import Megatron, which takes the receivers of bare exchanges seconds
    from arpo_megatron.weights.control import Control
    from arpo_megatron.weights.sync import WeightSync

LAYOUTS = {
    "TP2 x PP2": ParallelConfig(tensor=2, pipeline=2, sequence=True),
    "TP4": ParallelConfig(tensor=4, sequence=True),
    "TP2 x DP2": ParallelConfig(tensor=2, data=2, sequence=True),
    "PP2 x DP2": ParallelConfig(pipeline=2, data=2),
}
ENGINE_RANKS = 2
KINDS = ("network", "ipc")


def bench_resharding(root: Path, bucket_mib: int, repeats: int) -> dict[str, Any]:
    """Measure pushes of the model in `root`/model, and return figures by layout and transport.

    Raises:
        UserError: a rank or the engine failed.
    """
    from dataclasses import replace

    from arpo_megatron.bench.sync import SIZES
    from arpo_megatron.engine.launch import launch_engine

    sizes = replace(SIZES, tensor=ENGINE_RANKS)
    figures: dict[str, Any] = {}
    with launch_engine(root / "model", sizes, dtype="float32", seed=1, log_path=root / "engine.log") as engine:
        for name, layout in LAYOUTS.items():
            settings = {"url": engine.url, "bucket_mib": bucket_mib, "repeats": repeats, "layout": name}
            (root / "resharding.json").write_text(json.dumps(settings))
            run_ranks("resharding", root, layout.world_size)
            figures[name] = json.loads((root / "resharding_figures.json").read_text())
    return figures


def main() -> None:
    """Run one trainer rank of the benchmark; rank 0 writes the figures as JSON."""
    from arpo_megatron.actor import parallel
    from arpo_megatron.actor.model import build_chunks
    from arpo_megatron.bench.sync import DTYPE, TIMEOUT_S
    from arpo_megatron.engine.admin import EngineAdmin
    from arpo_megatron.models.spec import ModelSpec
    from arpo_megatron.weights.control import Control
    from arpo_megatron.weights.load import load_hf
    from arpo_megatron.weights.sync import PushSettings, WeightSync

    root = Path(sys.argv[1])
    settings = json.loads((root / "resharding.json").read_text())
    spec = ModelSpec.from_hf(root / "model")
    layout = LAYOUTS[settings["layout"]]
    parallel.initialize(layout, seed=1)
    torch.set_num_threads(1)
    chunks = build_chunks(spec, layout, DTYPE, initialize=False)
    load_hf(chunks, spec, root / "model")
    bucket = SyncConfig(bucket_mib=settings["bucket_mib"]).bucket_bytes
    control = Control(parallel.group("control"))
    figures: dict[str, Any] = {}
    for kind in KINDS:
        requests = EngineAdmin([settings["url"]], TIMEOUT_S)
        asked = PushSettings(transport=kind, bucket_bytes=bucket, verify_every=0)  # type: ignore[arg-type]  # a literal
        sync = WeightSync(control, requests, chunks, spec, asked, note=lambda _: None)
        figures[kind] = _measure(control, sync, bucket, settings["repeats"])
        dist.barrier()
        sync.close()
    if control.rank == 0:
        (root / "resharding_figures.json").write_text(json.dumps(figures))
    parallel.destroy()


def _measure(control: "Control", sync: "WeightSync", bucket: int, repeats: int) -> dict[str, Any]:
    """Return the figures of pushes and bare exchanges in turn, on rank 0; those of the first round are left out."""
    sync.push(1)  # verified: all tensors are equal
    assert sync.exchange is not None and sync.transport is not None, "both transports reshard"
    floor = BareExchange(control, sync.exchange)
    pushes: list[float] = []
    exchanges: list[float] = []
    for version in range(2, 3 + repeats):
        dist.barrier()
        pushes.append(sync.push(version).seconds)
        dist.barrier()
        exchanges.append(floor.seconds())
    floor.close()
    largest = control.gather(sync.transport.largest_buffer)
    if control.rank:
        return {}
    received = sync.engines.received()
    largest += [rank["largest_buffer"] for rank in received]
    return {
        "bytes_over_own_shard": round(max(rank["received"] / rank["held"] for rank in received), 4),
        "largest_buffer_over_bucket": round(max(largest) / bucket, 4),
        "push_s": [round(each, 3) for each in pushes[1:]],
        "exchange_s": [round(each, 3) for each in exchanges[1:]],
        "exchange_over_push": round(median(exchanges[1:]) / median(pushes[1:]), 3),
    }


if __name__ == "__main__":
    main()
