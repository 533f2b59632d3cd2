"""Pushes from trainers of four ranks to an engine of TP2, for `arpo bench sync`.

Per layout of the trainer and transport that reshards: the bytes that an engine rank receives over the bytes that it
holds, the largest buffer of any process over a bucket, and the seconds of pushes. For `network` the bare exchange is
measured too: the messages of the same plan between the same number of processes, each byte from and to a place of its
own in memory that is there already. Probe and checksums are part of neither.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from arpo_megatron.bench import bare
from arpo_megatron.bench.ranks import run_ranks
from arpo_megatron.config import ParallelConfig, SyncConfig

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
        sync.push(1)  # verified: all tensors are equal
        floor = BareExchange(control.rank, sync.rounds, ENGINE_RANKS) if kind == "network" else None
        pushes: list[float] = []
        exchanges: list[float] = []
        for version in range(2, 3 + settings["repeats"]):
            dist.barrier()
            pushes.append(sync.push(version).seconds)
            if floor is not None:
                dist.barrier()
                exchanges.append(floor.seconds())
        if floor is not None:
            floor.close()
        largest = control.gather(0 if sync.transport is None else sync.transport.largest_buffer)
        if control.rank == 0:
            received = sync.engines.received()
            largest += [rank["largest_buffer"] for rank in received]
            figures[kind] = _figures(received, max(largest) / bucket, pushes[1:], exchanges[1:])
        dist.barrier()
        sync.close()
    if control.rank == 0:
        (root / "resharding_figures.json").write_text(json.dumps(figures))
    parallel.destroy()


def _figures(
    received: Sequence[dict[str, int]], largest: float, pushes: Sequence[float], exchanges: Sequence[float]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "bytes_over_own_shard": round(max(rank["received"] / rank["held"] for rank in received), 4),
        "largest_buffer_over_bucket": round(largest, 4),
        "push_s": [round(each, 3) for each in pushes],
    }
    if exchanges:
        found["exchange_s"] = [round(each, 3) for each in exchanges]
        found["exchange_over_push"] = round(median(exchanges) / median(pushes), 3)
    return found


class BareExchange:
    """The messages of a plan between trainer ranks and processes that stand for engine ranks.

    Args:
        rank: this trainer rank.
        rounds: of the plan.
        receivers: number of engine ranks; rank 0 starts a process for each.
    """

    def __init__(self, rank: int, rounds: Sequence[Any], receivers: int) -> None:
        trainers = dist.get_world_size()
        box: list[Any] = [None]
        self._processes: list[Any] = []
        if rank == 0:
            self._store = bare.make_store(trainers + receivers)
            box = [self._store.port]
        dist.broadcast_object_list(box)
        sizes = [[(each.sender, each.receiver, each.bytes) for each in turn] for turn in rounds]
        if rank == 0:
            self._processes = [
                bare.start_receiver(_receive, box[0], trainers, receiver, receivers, sizes)
                for receiver in range(receivers)
            ]
        self._group = bare.join(box[0], rank, trainers + receivers)
        self._trainers = trainers
        self._sizes = [[(receiver, count) for sender, receiver, count in turn if sender == rank] for turn in sizes]
        self._source = torch.ones(sum(count for turn in self._sizes for _, count in turn), dtype=torch.uint8)

    def seconds(self) -> float:
        """Return the seconds of one exchange, until every receiver has everything."""
        bare.meet(self._group, more=True)
        started = time.perf_counter()
        first = 0
        for turn in self._sizes:
            works = []
            for receiver, count in turn:
                works.append(self._group.send([self._source[first : first + count]], self._trainers + receiver, 0))
                first += count
            for work in works:
                work.wait()
        bare.meet(self._group, more=True)
        return time.perf_counter() - started

    def close(self) -> None:
        bare.meet(self._group, more=False)
        for process in self._processes:
            process.join()


def _receive(port: int, trainers: int, receiver: int, receivers: int, sizes: Sequence[Sequence[Any]]) -> None:
    torch.set_num_threads(1)
    group = bare.join(port, trainers + receiver, trainers + receivers)
    mine = [[(sender, count) for sender, to, count in turn if to == receiver] for turn in sizes]
    target = torch.zeros(sum(count for turn in mine for _, count in turn), dtype=torch.uint8)
    while bare.meet(group, more=True):
        start = 0
        for turn in mine:
            works = []
            for sender, count in turn:
                works.append(group.recv([target[start : start + count]], sender, 0))
                start += count
            for work in works:
                work.wait()
        bare.meet(group, more=True)


if __name__ == "__main__":
    main()
