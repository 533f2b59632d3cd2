"""Processes that receive bare transfers by gloo, to compare weight pushes with."""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from arpo_megatron.utils.stores import listen

_ADDRESS = "127.0.0.1"
_TIMEOUT = timedelta(hours=1)
"""Longest time from one transfer to the next. A process that ends is noticed at once."""


def make_store(members: int) -> TCPStore:
    """Return the store in which the members of a group meet; it must outlive the group."""
    return listen(_ADDRESS, 0, members, _TIMEOUT)


def join(port: int, rank: int, members: int) -> Any:
    """Return a group of gloo whose store listens at a port of this machine."""
    store = PrefixStore("bare", TCPStore(_ADDRESS, port, members, is_master=False, timeout=_TIMEOUT))
    return ProcessGroupGloo(store, rank, members, _TIMEOUT)


def start_receiver(receive: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Run `receive` in a process of its own. It should receive as long as `meet` returns True."""
    process = multiprocessing.get_context("spawn").Process(target=receive, args=arguments, daemon=True)
    process.start()
    return process


def meet(group: Any, *, more: bool) -> bool:
    """Wait for all members; return whether all of them want to continue."""
    votes = torch.tensor([float(not more)])
    group.allreduce([votes]).wait()
    return not votes.item()
