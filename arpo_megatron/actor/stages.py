"""Exchange of hidden states between the stages of a pipeline.

Packs differ in length. Megatron's stages would send each other the shape of each tensor first, and the host would wait
for the device to read it. But every stage knows the packs, and 1F1B sends them in order.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

Shape = tuple[int, int, int]


class StageCommunicator(P2PCommunicator):  # type: ignore[misc]  # Megatron has no types
    """Megatron's communicator for one pass of the schedule without interleaving, without an exchange of shapes.

    Args:
        config: the model's TransformerConfig.
        tokens: tokens of each micro-batch on this rank, before sequence parallelism divides them.
    """

    def __init__(self, config: Any, tokens: Sequence[int]) -> None:
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        divisor = config.tensor_model_parallel_size if config.sequence_parallel else 1
        shapes: list[Shape] = [(count // divisor, 1, config.hidden_size) for count in tokens]
        self._inputs, self._gradients = iter(shapes), iter(shapes)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        """Return the shapes of the next tensors from the previous and from the next stage, if they are to come now."""
        return next(self._inputs) if recv_prev else None, next(self._gradients) if recv_next else None


def exchange(config: Any, tokens: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of a schedule that make its stages exchange hidden states; see `StageCommunicator`.

    None for the interleaved schedule: it frees an output before it has waited for its send. Without the waits for
    shapes, gradients of such a pipeline were wrong on a CPU.
    """
    if config.virtual_pipeline_model_parallel_size is not None:
        return {}
    groups = ["tp", "cp", "pp", "embd", "pos_embd", "dp", "dp_cp", "tp_dp_cp"]
    return {
        "p2p_communicator": StageCommunicator(config, tokens),
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(groups),
    }
