"""Push weights from the trainer into running SGLang servers: begin, buckets, commit, verify.

    begin    every engine refuses to generate (HTTP 503) and has no generation left
    buckets  one travels while the next is gathered from the trainer's ranks; never more than two exist
    commit   caches are emptied, answers carry the new policy version, engines generate again
    verify   the caller compares log-probs of a short probe

At an engine's first push and at every n-th one, checksums of sampled rows on the engine are compared too, and the probe
is longer.

A push that is interrupted before its commit, even by a kill -9 of the trainer, leaves engines that refuse to generate
until a whole push has arrived.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from arpo_megatron.config import JobConfig
from arpo_megatron.engine.admin import EngineAdmin, EngineEndpoint, WeightPushError
from arpo_megatron.engine.wire.buckets import Block, Bucket, named_tensors
from arpo_megatron.engine.wire.checksums import Sample
from arpo_megatron.hardware.placement import placement
from arpo_megatron.weights.transports import Broadcast, Disk, SharedMemory, Transport

TIMEOUT_S = 120.0
"""Deadline of a request to an engine, in seconds: for joining, a bucket, or running generations."""
PROBE_TOKENS = 3
"""Length of the probe after a push. Its last log-prob depends on every weight and on how two tokens mix; so few rows
cost no more than reading the weights."""
LONG_PROBE_TOKENS = 16
"""Length of the probe after a verified push; errors in queries and keys, which mix tokens, show better in it."""
_SAMPLED_SHARE = 16
"""One in this many of a bucket's tensors is sampled for checksums, at least one; so are all tensors sent in blocks."""
_SAMPLE_BYTES = 2**20
"""Bytes sampled of a tensor's rows."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """Duration, size and verification of one push."""

    seconds: float
    """Wall time from begin to commit, or to the comparison of checksums."""
    bytes: int
    """Bytes sent to each engine."""
    buckets: int
    verified: tuple[str, ...]
    """Names of the tensors whose checksums were compared."""
    probe_tokens: int
    """Length of the probe whose log-probs the caller compares next."""


class WeightSync:
    """The trainer's end of a push, on rank 0.

    Args:
        requests: requests to the engines; closed with this object.
        transport: carries the buckets; closed with this object.
        verify_every: pushes from one verification to the next. 0 verifies only pushes to engines that no whole push has
            reached since their start or since a failed push.
        comparable: the engines hold the trainer's bits. False if they quantize them; checksums are then not compared.
    """

    def __init__(
        self, requests: EngineAdmin, transport: Transport, *, verify_every: int, comparable: bool = True
    ) -> None:
        self._requests = requests
        self._transport = transport
        self._verify_every = verify_every
        self._comparable = comparable
        self._reached: tuple[EngineEndpoint, ...] = ()
        """The engines of the last push, if it succeeded."""
        self._since_verified = 0
        """Pushes since the last verified one, including it."""

    @property
    def engines(self) -> EngineAdmin:
        """Requests to the engines outside a push."""
        return self._requests

    @property
    def buffers(self) -> int:
        """Number of buffers that `export.hf_buckets` must use for this transport."""
        return self._transport.buffers

    @property
    def fused(self) -> bool:
        """Whether `export.hf_buckets` must keep the tensors of a parameter together, because engines quantize them."""
        return not self._comparable

    @classmethod
    def of(cls, config: JobConfig, urls: Sequence[str], run: Path, token: str | None = None) -> Self:
        """Create the sync that a job's config describes.

        Args:
            config: the job.
            urls: http://host:port of each engine.
            run: the run directory.
            token: access token of the engines, if they require one.

        Raises:
            UserError: the transport cannot reach an engine.
        """
        requests = EngineAdmin(urls, TIMEOUT_S, token)
        shared = placement(config).shared
        kind = config.sync.transport
        transport: Transport
        if kind == "disk":
            transport = Disk(requests, _directory(config.sync.directory, run))
        elif kind == "ipc" or (kind == "auto" and shared):
            transport = SharedMemory(requests)
        else:  # NCCL refuses two ranks on one GPU
            transport = Broadcast(requests, "gloo" if shared else None)
        comparable = config.engine.quantization == "none"
        return cls(requests, transport, verify_every=config.sync.verify_every, comparable=comparable)

    def push(self, buckets: Iterable[Bucket], version: int) -> PushReport:
        """Replace the engines' weights and set their policy version.

        Args:
            buckets: full tensors under Hugging Face names, each bucket made when it is requested (`export.hf_buckets`).
                A tied head needs no entry: SGLang's head is its embedding.
            version: policy version that every later answer of an engine reports (`meta_info["weight_version"]`).

        Raises:
            WeightPushError: an engine failed, or its weights differ; the next push starts from the beginning.
            ValueError: there are no tensors.
        """
        started = time.monotonic()
        reached, self._reached = self._reached, ()
        try:
            engines = self._requests.begin_push(version)
            verify = engines != reached or self._since_verified == self._verify_every
            self._transport.connect(engines)
            sampler = np.random.default_rng(version) if verify and self._comparable else None
            total, count, sums = self._send(buckets, sampler)
            self._requests.commit_push(version, self._transport.finish())
        except BaseException:
            self._transport.close()  # trainer and engines may disagree about the buckets sent
            raise
        if sums:
            self._verify(sums)
        self._reached, self._since_verified = engines, 1 if verify else self._since_verified + 1
        probe_tokens = LONG_PROBE_TOKENS if verify else PROBE_TOKENS
        return PushReport(time.monotonic() - started, total, count, tuple(sums), probe_tokens)

    def close(self) -> None:
        """Disconnect from the engines; engines that have ended are not an error."""
        self._transport.close()
        self._requests.close()

    def _send(
        self, buckets: Iterable[Bucket], sampler: np.random.Generator | None
    ) -> tuple[int, int, dict[str, tuple[Sample, int]]]:
        """Send all buckets; return bytes, number of buckets, and the expected checksums of sampled tensors."""
        total, count = 0, 0
        sums: dict[str, tuple[Sample, int]] = {}
        wait: Callable[[], None] | None = None
        for bucket in buckets:  # gathered while the previous one travels
            if sampler is not None:
                _sample(bucket, sampler, sums)
            arrived = self._transport.send(bucket)  # announced early, so that engines do not idle
            if wait is not None:
                wait()
            wait = arrived
            total, count = total + sum(tensor.nbytes for _, tensor in named_tensors(bucket)), count + 1
        if wait is None:
            raise ValueError("a push needs at least one tensor")
        wait()
        return total, count, sums

    def _verify(self, sums: dict[str, tuple[Sample, int]]) -> None:
        by_engine = self._requests.checksums({name: sample for name, (sample, _) in sums.items()})
        for url, checksums in zip(self._requests.urls, by_engine, strict=True):
            for name, (sample, expected) in sums.items():
                if difference := sample.difference(checksums[name], expected):
                    raise WeightPushError(f"{url}: {name} is not what the trainer sent: {difference}")


def _sample(bucket: Bucket, sampler: np.random.Generator, sums: dict[str, tuple[Sample, int]]) -> None:
    """Add the expected checksums of a bucket; the sampled rows of a tensor sent in blocks may lie in two blocks."""
    if isinstance(bucket, Block):
        if not bucket.first:
            sums[bucket.name] = Sample.of(bucket.whole, sampler.random(), _SAMPLE_BYTES), 0
        sample, known = sums[bucket.name]
        piece = sample.piece_in(bucket.tensor.detach(), bucket.whole[bucket.rows])
        sums[bucket.name] = sample, (known + (0 if piece is None else piece.checksum)) % 2**64
        return
    for index in sampler.choice(len(bucket), max(1, len(bucket) // _SAMPLED_SHARE), replace=False):
        name, tensor = bucket[index]
        sample = Sample.of(tensor, sampler.random(), _SAMPLE_BYTES)
        sums[name] = sample, sample.checksum(tensor.detach())


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
