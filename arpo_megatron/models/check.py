"""Check that a Hugging Face directory has the tensors of its architecture: names, shapes and dtypes, from headers
only."""

from arpo_megatron.errors import UserError
from arpo_megatron.models.mapping import hf_shapes
from arpo_megatron.models.safetensors import TensorFiles
from arpo_megatron.models.spec import ModelSpec


def check_tensors(files: TensorFiles, spec: ModelSpec) -> None:
    """Check all names and shapes without reading a tensor.

    Raises:
        UserError: a tensor is missing, has another shape or dtype or is unknown to the family, or files are damaged.
    """
    tensors = hf_shapes(spec)
    if unknown := sorted(files.names.keys() - tensors.keys() - _ignored(spec)):
        raise UserError(
            f"{files.path}: tensor {unknown[0]} (one of {len(unknown)}) does not belong to the architecture that "
            f"config.json names"
        )
    files.check(tensors)


def _ignored(spec: ModelSpec) -> set[str]:
    """Tensors that may exist and are ignored: the copy of a tied head, and frequencies in older checkpoints."""
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(spec.layers)}
    return frequencies | ({"lm_head.weight"} if spec.tied else set())
