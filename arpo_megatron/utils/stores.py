"""Stores through which the ranks of a process group find each other.

A store decides where ranks connect, and ranks unpickle what their peers send. torch's own rendezvous listens on every
address of the machine without authentication; these stores do not.
"""

import os
import socket
from datetime import timedelta
from itertools import count

from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from arpo_megatron.utils.processes import STORE_FILE

_groups = count()
_stores: dict[tuple[int, int], Store] = {}


def listen(address: str, port: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Return a store that listens at one address of this machine; port 0 picks a free port. Raises OSError."""
    listener = socket.create_server((address, port))
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def tcp_store(rank: int, world_size: int, address: str, port: int, timeout: timedelta) -> TCPStore:
    """Return the store of ranks on several machines, which listens at rank 0's `address`."""
    if rank == 0:
        return listen(address, port, world_size, timeout)
    return TCPStore(address, port, world_size, is_master=False, timeout=timeout)


def rank_store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the store for a process group of all ranks, from the variables of their launcher.

    A lone rank has a store in its own memory. The ranks of one machine share the file `STORE_FILE`. Ranks on several
    machines meet at MASTER_ADDR and MASTER_PORT. All ranks must create their groups in the same order.
    """
    if world_size == 1:
        return HashStore()
    # A rank keeps its store until it ends: the last user of a file would delete it, and a closed port can be taken.
    return PrefixStore(str(next(_groups)), _launcher_store(rank, world_size, timeout))


def _launcher_store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the store of the launcher's ranks, which has the first group's timeout: two cannot listen at one port."""
    if (rank, world_size) not in _stores:
        if path := os.environ.get(STORE_FILE):
            _stores[rank, world_size] = FileStore(path, world_size)
            _stores[rank, world_size].set_timeout(timeout)
        else:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            _stores[rank, world_size] = tcp_store(rank, world_size, address, port, timeout)
    return _stores[rank, world_size]
