"""Three ways to send a bucket of tensors to an engine. `weights.sync.WeightSync` decides what is sent when.

| | a bucket travels through | for |
| --- | --- | --- |
| `Broadcast` | a separate process group: gloo, or NCCL on CUDA | engines that the trainer's network reaches |
| `SharedMemory` | CUDA IPC handles, or a shared memory file on a CPU | an engine on the trainer's GPU or machine |
| `Disk` | safetensors in a directory that both see | all other engines |

May import `engine`, `models` and `errors`, but no other module of `weights`.
"""

from arpo_megatron.weights.transports.base import Transport
from arpo_megatron.weights.transports.broadcast import Broadcast
from arpo_megatron.weights.transports.disk import Disk
from arpo_megatron.weights.transports.shared_memory import SharedMemory

__all__ = ["Broadcast", "Disk", "SharedMemory", "Transport"]
