"""Whole tensors through safetensors files in a directory that trainer and engines share."""

import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from arpo_megatron.engine.admin import EngineAdmin, WeightPushError
from arpo_megatron.models.safetensors import write_file, write_rows
from arpo_megatron.weights.buckets import Bucket, HfBuckets, RowBlock
from arpo_megatron.weights.control import Control
from arpo_megatron.weights.transports.base import Exchange


class Disk:
    """Rank 0 writes each bucket, or all blocks of a tensor, to a file that the engines read; then it is deleted.

    Args:
        control: the trainer's ranks.
        requests: requests to the engines; used by rank 0.
        buckets: gathers the tensors on rank 0, bucket by bucket; all ranks take part.
        directory: path that trainer and engines share; it is created, and removed at the end.
    """

    def __init__(self, control: Control, requests: EngineAdmin, buckets: HfBuckets, directory: Path) -> None:
        self._control = control
        self._admin = requests
        self._buckets = buckets
        self._directory = directory
        self._urls: tuple[str, ...] = ()
        self.largest_buffer = 0

    def connect(self, exchange: Exchange) -> None:
        """Remember the engines; there is nothing to join."""
        self._urls = tuple(engine.url for engine in exchange.engines)

    def send(self) -> int:
        """Write and load all buckets. One is gathered while the one before it is written and read."""
        buckets = self._buckets()
        try:
            return self._send(buckets) if self._control.rank == 0 else 0
        finally:
            for _ in buckets:  # every rank takes part in gathering the shards, also if the push failed
                pass

    def close(self) -> None:
        """Delete the directory."""
        if self._control.rank == 0:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _send(self, buckets: Iterable[Bucket]) -> int:
        shutil.rmtree(self._directory, ignore_errors=True)  # left by an interrupted push
        try:
            self._directory.mkdir(parents=True)
        except OSError as error:
            raise WeightPushError(f"sync.directory: {error}") from error
        loads: list[Future[int]] = []
        with ThreadPoolExecutor(1, thread_name_prefix="weight-writer") as writer:
            for bucket in buckets:
                if loads:
                    loads[-1].result()
                loads.append(writer.submit(self._write_and_load, bucket))
        self.close()
        return sum(load.result() for load in loads)

    def _write_and_load(self, bucket: Bucket) -> int:
        """Return the number of requests that loaded something: 0 or 1."""
        file = self._directory / "model.safetensors"
        try:
            if isinstance(bucket, RowBlock):
                write_rows(file, bucket.name, tuple(bucket.whole.shape), bucket.tensor, bucket.first)
            else:
                write_file(file, bucket)
        except OSError as error:
            raise WeightPushError(f"{file}: {error.strerror}") from error
        if isinstance(bucket, RowBlock) and not bucket.is_last:
            return 0
        body = {"model_path": str(self._directory), "load_format": "safetensors", "flush_cache": False}
        posts = self._admin.post_all("update_weights_from_disk", [(url, body) for url in self._urls])
        for post in posts:
            post.result()
        file.unlink()
        return 1
