"""Three ways in which a push reaches the engines. `weights.sync.WeightSync` chooses one and reports why.

| | a round travels through | for |
| --- | --- | --- |
| `Ipc` (`ipc`) | the trainer's group, then memory that the engine maps | engines on the trainer's GPUs (CPU: machine) |
| `Network` (`network`) | a process group of trainer and engine ranks: NCCL, or gloo | engines on GPUs of their own |
| `Disk` (`disk`) | files in a directory that both see | engines without a network to the trainer |

May import `engine`, `models`, `errors`, `utils`, and of `weights` the modules below `sync`.
"""

from arpo_megatron.weights.transports.base import Exchange, Transport
from arpo_megatron.weights.transports.disk import Disk
from arpo_megatron.weights.transports.ipc import Ipc
from arpo_megatron.weights.transports.network import Network

__all__ = ["Disk", "Exchange", "Ipc", "Network", "Transport"]
