"""Live weights from the trainer into a running SGLang server, and the check that they arrived.

Trainer rank 0 and all ranks of the engine form a process group of their own (gloo on a CPU, nccl on CUDA). A push
sends the tensors in buckets: an HTTP request tells the engine what comes, then one broadcast carries the bucket. The
last bucket sets the engine's policy version and flushes its radix cache, so that no key or value of the old weights is
used again.

The engine must be idle: SGLang ends itself when it is to flush its cache while a request lives. The caller drains the
rollouts before it pushes.
"""

import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
import requests
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

from arpo_megatron.errors import UserError

MAX_BUCKET_BYTES = 512 * 2**20

_POLL_INTERVAL_S = 0.0005


class WeightPushError(UserError):
    """A push failed: the engine may hold a mixture of weights and must be restarted with a new `WeightPusher`."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push took: wall time in seconds, bytes sent to each engine, requests made to each."""

    seconds: float
    bytes: int
    buckets: int


class WeightPusher:
    """Rank 0's end of the weight group; it joins on construction, and every engine of `engine_urls` with it.

    Args:
        engine_urls: http://host:port of each SGLang server; replicas get the same broadcast.
        bucket_bytes: a bucket holds at most this many bytes (a larger tensor is a bucket of its own).
        timeout_s: deadline in seconds of joining and of each bucket.
        backend: None: nccl where torch sees a GPU, else gloo. A trainer and an engine that share one GPU need gloo.

    Raises:
        WeightPushError: an engine did not answer, refused or missed the deadline; the line names it and its response.
    """

    def __init__(
        self,
        *engine_urls: str,
        bucket_bytes: int = MAX_BUCKET_BYTES,
        timeout_s: float = 120.0,
        backend: Literal["gloo", "nccl"] | None = None,
    ) -> None:
        self.engine_urls = tuple(url.rstrip("/") for url in engine_urls)
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(len(self.engine_urls), thread_name_prefix="weight-push")
        # The engine keeps groups by name: one that a crashed trainer left behind must not be met again.
        self._name = f"arpo-weights-{time.time_ns()}"
        self._group: Any = None
        try:
            self._join(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
        except BaseException:
            self._pool.shutdown(wait=False, cancel_futures=True)
            raise

    def push(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> PushReport:
        """Replace the engines' weights and set their policy version.

        Args:
            tensors: full tensors under Hugging Face names, on the device of the group. A tied head needs no entry of
                its own: SGLang's head is its embedding.
            version: reported from then on by every answer of the engine (`meta_info["weight_version"]`).

        Raises:
            WeightPushError: an engine failed; this pusher is of no further use.
            ValueError: there are no tensors.
        """
        if self._group is None:
            raise WeightPushError("this weight pusher is closed or a push of it failed: make a new one")
        started, total, count = time.monotonic(), 0, 0
        for bucket, last in _with_last(buckets(tensors, self._bucket_bytes)):
            try:
                total += self._send(bucket, version if last else None)
            except BaseException:
                self._group = None  # the two ends may be out of step now
                raise
            count += 1
        if not count:
            raise ValueError("a push needs at least one tensor")
        return PushReport(time.monotonic() - started, total, count)

    def score(self, token_ids: Sequence[int]) -> list[NDArray[np.float32]]:
        """For each engine, float32[n - 1]: log-probs in nats at temperature 1 of token 1 to n - 1 given those before.

        Raises:
            WeightPushError: an engine did not answer.
        """
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answers = [self._post(url, "generate", body) for url in self.engine_urls]
        return [np.array([x[0] for x in a["meta_info"]["input_token_logprobs"][1:]], np.float32) for a in answers]

    def close(self) -> None:
        """Leave the group. Engines that are gone already are not an error."""
        if self._group is not None:
            body = {"group_name": self._name}
            posts = [
                self._pool.submit(self._post, url, "destroy_weights_update_group", body) for url in self.engine_urls
            ]
            dist.destroy_process_group(self._group)
            self._group = None
            for post in posts:
                with suppress(WeightPushError):
                    post.result()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _join(self, backend: str) -> None:
        ranks = [self._engine_ranks(url) for url in self.engine_urls]
        world_size = 1 + sum(ranks)
        address = _local_address(self.engine_urls[0])
        timeout = timedelta(seconds=self._timeout_s)
        store = TCPStore(address, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        posts = []
        for index, url in enumerate(self.engine_urls):
            body = {
                "master_address": address,
                "master_port": store.port,
                "rank_offset": 1 + sum(ranks[:index]),
                "world_size": world_size,
                "group_name": self._name,
                "backend": backend,
            }
            posts.append(self._pool.submit(self._post, url, "init_weights_update_group", body))
        try:
            # torch has no public way to a second group with processes outside the default one; SGLang, slime and
            # verl all take this one, and both ends must, for the keys in the store to match.
            group, _ = _new_process_group_helper(
                world_size,
                0,
                [],
                Backend(backend),
                PrefixStore(self._name, store),
                group_name=GroupName(self._name),
                timeout=timeout,
            )
        except RuntimeError as error:
            raise self._failure(posts, f"joining the weight group: {_first_line(error)}") from error
        for post in posts:
            post.result()
        _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        self._group = group

    def _engine_ranks(self, url: str) -> int:
        try:
            answer = _session().get(f"{url}/server_info", timeout=min(10.0, self._timeout_s))
            answer.raise_for_status()
            return int(answer.json()["tp_size"])
        except requests.RequestException as error:
            raise WeightPushError(f"{url}/server_info: no engine answers: {_first_line(error)}") from error

    def _send(self, bucket: Sequence[tuple[str, Tensor]], version: int | None) -> int:
        """Announce and broadcast one bucket, wait until every engine has loaded it, and return its bytes."""
        body: dict[str, Any] = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": version is not None,
        }
        if version is not None:
            body["weight_version"] = str(version)
        flat = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in bucket])
        posts = [
            self._pool.submit(self._post, url, "update_weights_from_distributed", body) for url in self.engine_urls
        ]
        deadline = time.monotonic() + self._timeout_s
        try:
            work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
            while not work.is_completed():
                for post in posts:
                    if post.done():
                        post.result()  # an engine that refused will never take part in the broadcast
                if time.monotonic() > deadline:
                    raise self._failure(posts, f"no engine took the bucket within {self._timeout_s:g} s")
                time.sleep(_POLL_INTERVAL_S)
            work.wait()
        except RuntimeError as error:
            raise self._failure(posts, f"broadcasting a bucket: {_first_line(error)}") from error
        for post in posts:
            post.result()
        return flat.numel()

    def _post(self, url: str, endpoint: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer. Raises WeightPushError with one line for every kind of failure."""
        where = f"{url}/{endpoint}"
        try:
            answer = _session().post(where, json=body, timeout=self._timeout_s)
        except requests.RequestException as error:
            raise WeightPushError(f"{where}: {_first_line(error)}") from error
        if answer.status_code != requests.codes.ok:
            raise WeightPushError(f"{where}: HTTP {answer.status_code}: {_first_line(answer.text)}")
        return answer.json()

    def _failure(self, posts: Sequence["Future[Any]"], what: str) -> WeightPushError:
        """An engine's own words where one has answered, else `what` happened at this end."""
        for post in posts:
            if post.done() and isinstance(error := post.exception(), WeightPushError):
                return error
        return WeightPushError(f"{', '.join(self.engine_urls)}: {what}")


def buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors of at most `limit` bytes together; a larger one is alone."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > limit:
            yield held
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield held


def probe_gap(trainer_logprobs: ArrayLike, engine_logprobs: ArrayLike) -> float:
    """Largest absolute difference in nats of two arrays of log-probs; infinity where either is not finite.

    Raises:
        ValueError: they are of different lengths.
    """
    trainer, engine = np.asarray(trainer_logprobs, np.float64), np.asarray(engine_logprobs, np.float64)
    if trainer.shape != engine.shape:
        raise ValueError(f"log-probs of {trainer.shape} and {engine.shape} cannot be compared")
    if not (np.isfinite(trainer).all() and np.isfinite(engine).all()):
        return float("inf")
    return float(np.abs(trainer - engine).max(initial=0.0))


def _with_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item, and whether it is the last."""
    held: list[Any] = []
    for item in items:
        if held:
            yield held.pop(), False
        held.append(item)
    if held:
        yield held.pop(), True


def _local_address(url: str) -> str:
    """The address of this machine under which the engine's host reaches it."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # sends nothing; it only chooses the interface
        return str(probe.getsockname()[0])


def _session() -> requests.Session:
    """Engines are addressed directly: a cluster's HTTP_PROXY knows nothing of the addresses of its nodes."""
    session = requests.Session()
    session.trust_env = False
    return session


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "no message"
