"""Decisions that all trainer ranks share: rank 0 talks to the engines, and every rank learns the outcome."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from arpo_megatron.engine.admin import WeightPushError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Control:
    """A gloo group of all trainer ranks; None for a single rank."""

    group: Any

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank()

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size()

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Return the (picklable) result of rank 0's `work` on every rank.

        Raises:
            WeightPushError: `work` has failed; every rank raises it.
        """
        box: list[Any] = [None, ""]
        cause: Exception | None = None
        if self.rank == 0:
            try:
                box[0] = work()
            except WeightPushError as error:
                box[1] = str(error)
            except Exception as error:  # the other ranks wait for the outcome
                cause, box[1] = error, f"{type(error).__name__}: {error}"
        if self.group is not None:
            dist.broadcast_object_list(box, src=0, group=self.group)
        if box[1]:
            raise WeightPushError(box[1]) from cause
        result: T = box[0]
        return result

    def gather(self, value: T) -> list[T]:
        """Return every rank's (picklable) value on every rank."""
        box: list[Any] = [value] * self.ranks
        if self.group is not None:
            dist.all_gather_object(box, value, group=self.group)
        return box

    def raise_first(self, failure: str) -> None:
        """Raise WeightPushError on every rank if one of them has a `failure`; "" is none."""
        if failures := [each for each in self.gather(failure) if each]:
            raise WeightPushError(failures[0])

    def sums(self, values: Tensor) -> list[int]:
        """Return the sums over ranks modulo 2^64 of int64[n] on any device."""
        total = values.cpu()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return [value % 2**64 for value in total.tolist()]
