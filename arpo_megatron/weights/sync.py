"""Push weights from the trainer into running SGLang servers: resume, begin, exchange, commit, verify.

    resume    engines that have lent their memory to the trainer take back the part for the weights
    begin     every engine refuses to generate (HTTP 503) and has no generation left
    exchange  each engine rank receives the parts of tensors that it holds, in buckets (`reshard`, `transports`)
    commit    caches are emptied, answers carry the new policy version, engines generate again
    verify    the caller compares log-probs of a short probe

Checksums of every whole tensor on the engine are compared too, and the probe is longer, at an engine's first push and
at every n-th one (`sync.verify_every`, by default every push). The plan is made once, and again when an engine has
restarted or a push has failed. With `rollout.across_push=keep_kv` the caches are kept.

A push that is interrupted before its commit, even by a kill -9 of a trainer rank, leaves engines that refuse to
generate until a whole push has arrived.
"""

import gc
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn

from arpo_megatron.config import JobConfig
from arpo_megatron.engine.admin import EngineAdmin, EngineEndpoint, WeightPushError
from arpo_megatron.engine.wire.boxes import Box, EngineShard, size
from arpo_megatron.engine.wire.checksums import ChecksummedPart, difference
from arpo_megatron.engine.wire.endpoints import KV_CACHE, WEIGHTS
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.placement import placement
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.weights import reshard
from arpo_megatron.weights.control import Control
from arpo_megatron.weights.export import hf_buckets
from arpo_megatron.weights.local import LocalShard
from arpo_megatron.weights.reshard import TrainerShard
from arpo_megatron.weights.transports import Disk, Exchange, Ipc, Network, Transport

TIMEOUT_S = 120.0
"""Deadline of a request to an engine, in seconds: for joining, an exchange, or running generations."""
PROBE_TOKENS = 3
"""Length of the probe after a push. Its last log-prob depends on every weight and on how two tokens mix; so few rows
cost no more than reading the weights."""
LONG_PROBE_TOKENS = 16
"""Length of the probe after a verified push; errors in queries and keys, which mix tokens, show better in it."""

TransportName = Literal["auto", "network", "ipc", "disk"]


@dataclass(frozen=True, slots=True)
class PushReport:
    """Duration, size and verification of one push."""

    seconds: float
    """Wall time of the whole call: from `prepare` to the commit, or to the comparison of checksums."""
    bytes: int
    """Bytes of all tensors of the push."""
    verified: tuple[str, ...]
    """Names of the tensors whose checksums were compared."""
    probe_tokens: int
    """Length of the probe whose log-probs the caller compares next."""


@dataclass(frozen=True, slots=True)
class PushSettings:
    """Transport, memory and checks of weight pushes."""

    transport: TransportName = "auto"
    """`sync.transport`."""
    bucket_bytes: int = 256 * 2**20
    """Most bytes that a process handles in one round; it holds two of them."""
    verify_every: int = 1
    """Pushes from one verification to the next. 0 verifies only pushes to engines that no whole push has reached since
    their start or since a failed push."""
    fp8: bool = False
    """The engines hold the weights of their layers' products in FP8, and the trainer quantizes them."""
    colocated: bool = False
    """Engines lend their memory to the trainer between pushes."""
    directory: Path = Path("sync")
    """Directory for `disk`."""

    @classmethod
    def of(cls, config: JobConfig, run: Path) -> Self:
        """Return the settings of a job with this run directory."""
        return cls(
            transport=config.sync.transport,
            bucket_bytes=config.sync.bucket_bytes,
            verify_every=config.sync.verify_every,
            fp8=config.engine.quantization == "fp8",
            colocated=placement(config).colocated,
            directory=_directory(config.sync.directory, run),
        )


class WeightSync:
    """One trainer rank's end of pushes. All ranks have one and call its methods together.

    Args:
        control: the trainer's ranks.
        requests: requests to the engines; only rank 0 sends any. Closed with this object.
        chunks: this rank's part of the model, wrapped or not.
        spec: the whole model.
        settings: how to push.
        note: logs a line for the user.
    """

    def __init__(
        self,
        control: Control,
        requests: EngineAdmin,
        chunks: Sequence[nn.Module],
        spec: ModelSpec,
        settings: PushSettings,
        note: Callable[[str], None] = print,
    ) -> None:
        self._control = control
        self._admin = requests
        self._chunks = chunks
        self._spec = spec
        self._settings = settings
        self._note = note
        self._table = reshard.pushed(spec, fp8=settings.fp8)
        self._local = LocalShard.of(chunks, self._table)
        self._trainers: list[TrainerShard] = []
        self._checksum_ranks: dict[str, dict[Box, int]] = {}
        self._exchange: Exchange | None = None
        self._transport: Transport | None = None
        self._reached: tuple[EngineEndpoint, ...] = ()
        """The engines of the last push, if it succeeded."""
        self._since_verified = 0
        """Pushes since the last verified one, including it."""

    @property
    def engines(self) -> EngineAdmin:
        """Requests to the engines outside a push, for rank 0."""
        return self._admin

    @property
    def exchange(self) -> Exchange | None:
        """The plan of the last push that resharded; None before the first one."""
        return self._exchange

    @property
    def transport(self) -> Transport | None:
        """The transport of the last push; None before the first one."""
        return self._transport

    def push(self, version: int, prepare: Callable[[], None] = lambda: None) -> PushReport:
        """Replace the engines' weights and set their policy version.

        Args:
            version: policy version that every later answer of an engine reports (`meta_info["weight_version"]`).
            prepare: called on rank 0 first; may raise WeightPushError.

        Raises:
            WeightPushError: an engine failed, or its weights differ; the next push starts from the beginning. All ranks
                raise it.
            UserError: `sync.transport=ipc` cannot reach an engine.
        """
        started = time.monotonic()
        reached, self._reached = self._reached, ()
        control = self._control
        try:
            control.on_rank_zero(prepare)
            if self._settings.colocated:
                self._resume_weights()
            engines = control.on_rank_zero(lambda: self._admin.begin_push(version))
            verify = engines != reached or self._since_verified == self._settings.verify_every
            if engines != reached or self._transport is None:
                self._connect(engines)
            loads = self._send()
            control.on_rank_zero(partial(self._finish, version, loads))
        except BaseException:
            self._disconnect()  # trainer and engines may disagree about what has been sent
            raise
        verified = self._verify() if verify else ()
        self._reached, self._since_verified = engines, 1 if verify else self._since_verified + 1
        return PushReport(
            seconds=time.monotonic() - started,
            bytes=sum(reshard.byte_size(kind) for kind in self._local.types.values()),
            verified=verified,
            probe_tokens=LONG_PROBE_TOKENS if verify else PROBE_TOKENS,
        )

    def verify_next(self) -> None:
        """Compare checksums at the next push, whatever `sync.verify_every` is."""
        self._since_verified = self._settings.verify_every

    def close(self) -> None:
        """Disconnect from the engines; engines that have ended are not an error."""
        self._disconnect()
        self._admin.close()

    def _resume_weights(self) -> None:
        """Have the engines allocate the memory of their weights, after every rank has freed what it only caches.

        The engines' allocator does not see the memory that the trainer's allocator keeps for later.
        """
        free_cached_memory()
        self._control.gather(None)
        self._control.on_rank_zero(lambda: self._admin.resume_memory(WEIGHTS))

    def _finish(self, version: int, loads: int) -> None:
        if self._settings.colocated:  # after the push, which needs memory for buckets
            self._admin.resume_memory(*KV_CACHE)
        self._admin.commit_push(version, loads)

    def _connect(self, engines: tuple[EngineEndpoint, ...]) -> None:
        """Choose the transport and give every engine its part of the plan."""
        self._disconnect()
        control, local, settings = self._control, self._local, self._settings
        self._trainers = control.gather(local.shard)
        owners = reshard.owners(self._table, self._trainers)
        self._checksum_ranks = reshard.checksum_ranks(owners)
        if settings.transport == "disk":
            if control.rank == 0:
                self._note(f"weights travel by disk: sync.transport=disk, files in {settings.directory}")
            buckets = partial(hf_buckets, self._chunks, self._spec, settings.bucket_bytes)
            self._transport = Disk(control, self._admin, buckets, settings.directory)
            self._transport.connect(Exchange("", engines, (), ()))
            return
        together = [list(entry.hf) for entry in self._table]
        by_engine = control.on_rank_zero(lambda: self._admin.engine_shards(local.types, together))
        held = [shard for engine in by_engine for shard in engine]
        transport, reason = choose_transport(
            settings.transport, self._trainers, held, on_gpu=local.device.type == "cuda"
        )
        if control.rank == 0:
            self._note(f"weights travel by {transport}: {reason}")
        bucket_holders = [control.ranks + rank for rank in range(len(held))]
        if transport == "ipc":
            bucket_holders = carriers(self._trainers, held)
        try:
            rounds = reshard.plan_rounds(
                owners, self._trainers, held, local.types, settings.bucket_bytes, bucket_holders
            )
        except ValueError as error:
            raise WeightPushError(f"the engines' weights do not fit the trainer's: {error}") from error
        if transport == "ipc":
            self._transport = Ipc(control, self._admin, local)
        else:
            self._transport = Network(control, self._admin, local, transport)
        name = control.on_rank_zero(lambda: secrets.token_hex(8))
        self._exchange = Exchange(name, engines, rounds, bucket_holders)
        self._transport.connect(self._exchange)

    def _send(self) -> int:
        """Send on every rank; return the number of loads. Raises WeightPushError on all ranks if one of them fails."""
        loads, failure = 0, ""
        assert self._transport is not None
        try:
            loads = self._transport.send()
        except WeightPushError as error:
            failure = str(error)
        self._control.raise_first(failure)
        return loads

    def _verify(self) -> tuple[str, ...]:
        """Compare checksums of all tensors between trainer and engines; return the names of the tensors."""
        types, rank = self._local.types, self._control.rank
        answers = self._admin.start_checksums(types) if rank == 0 else None  # the engines compute them meanwhile
        own = [
            self._local.checksum(name, {box for box, owner in self._checksum_ranks[name].items() if owner == rank})
            for name in types
        ]
        expected = self._control.sums(torch.stack(own))

        def compare() -> None:
            assert answers is not None
            self._compare(expected, answers())

        self._control.on_rank_zero(compare)
        return tuple(types)

    def _compare(self, expected: Sequence[int], engines: Sequence[Mapping[str, Sequence[ChecksummedPart]]]) -> None:
        types, equal = self._local.types, list[Mapping[str, Sequence[ChecksummedPart]]]()
        for url, held in zip(self._admin.urls, engines, strict=True):
            if any(held is each for each in equal):
                continue
            for (name, kind), checksum in zip(types.items(), expected, strict=True):
                if wrong := difference(held[name], checksum, size(kind.whole)):
                    raise WeightPushError(f"{url}: {name} is not what the trainer sent: {wrong}")
            equal.append(held)

    def _disconnect(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._transport = None


def choose_transport(
    transport: TransportName, trainers: Sequence[TrainerShard], engines: Sequence[EngineShard], *, on_gpu: bool
) -> tuple[str, str]:
    """Return how weights travel ("ipc", "nccl" or "gloo"), and why.

    Raises:
        UserError: `ipc` was asked for, and an engine rank is not next to a trainer rank.
    """
    devices = {shard.device for shard in trainers}
    what = "GPU" if on_gpu else "machine"
    near = sum(shard.device in devices for shard in engines)
    if transport == "ipc" and near < len(engines):
        raise UserError(f"sync.transport=ipc: {len(engines) - near} engine rank(s) are not on a trainer rank's {what}")
    if transport != "network" and near == len(engines):
        asked = "" if transport == "auto" else f" (sync.transport={transport})"
        return "ipc", f"every engine rank is on a trainer rank's {what}{asked}"
    if not on_gpu:
        return (
            "gloo",
            "sync.transport=network" if transport == "network" else "an engine shares no memory with a trainer",
        )
    if near:
        return "gloo", f"{near} engine rank(s) are on trainer GPUs, and NCCL refuses two ranks on one GPU"
    return "nccl", "the engines have GPUs of their own"


def carriers(trainers: Sequence[TrainerShard], engines: Sequence[EngineShard]) -> list[int]:
    """Return for each engine rank the trainer rank on its device that carries for the fewest engine ranks so far."""
    found: list[int] = []
    for engine in engines:
        near = [rank for rank, trainer in enumerate(trainers) if trainer.device == engine.device]
        found.append(min(near, key=lambda rank: (found.count(rank), rank)))
    return found


def free_cached_memory() -> None:
    """Return GPU memory that the allocator keeps for later to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def _directory(shared: Path | None, run: Path) -> Path:
    """Return the directory of the `disk` transport, which empties it: in the run directory, or one per run in the
    shared directory."""
    if shared is None:
        return run / "sync"
    return shared / f"{run.name}-{hashlib.blake2b(str(run.resolve()).encode(), digest_size=4).hexdigest()}"


def probe_gap(trainer_logprobs: ArrayLike, engine_logprobs: ArrayLike) -> float:
    """Return the largest absolute difference of two arrays of log-probs, in nats; infinity if a value is not finite.

    Raises:
        ValueError: the arrays differ in length.
    """
    trainer, engine = np.asarray(trainer_logprobs, np.float64), np.asarray(engine_logprobs, np.float64)
    if trainer.shape != engine.shape:
        raise ValueError(f"log-probs of {trainer.shape} and {engine.shape} cannot be compared")
    if not (np.isfinite(trainer).all() and np.isfinite(engine).all()):
        return float("inf")
    return float(np.abs(trainer - engine).max(initial=0.0))
