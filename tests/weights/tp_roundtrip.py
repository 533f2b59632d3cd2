"""torchrun script: load every model under ROOT, compute log-probs, export again; argv: ROOT, tensor-parallel ranks."""

import sys
from pathlib import Path

import torch
from tiny_models import megatron_logprobs, sample_tokens

from arpo_megatron.actor import parallel
from arpo_megatron.actor.model import build_model
from arpo_megatron.config import ParallelConfig
from arpo_megatron.weights.export import export_hf
from arpo_megatron.weights.load import load_hf
from arpo_megatron.weights.shape import ModelShape


def main() -> None:
    root, layout = Path(sys.argv[1]), ParallelConfig(tensor=int(sys.argv[2]))
    parallel.initialize(layout, seed=1)
    told = parallel.broadcast_object({"from": "the leader"} if parallel.is_leader() else None)
    assert told == {"from": "the leader"}
    for source in sorted(root.iterdir()):
        shape = ModelShape.from_hf(source)
        model = build_model(shape, layout, "float32")
        load_hf(model, shape, source)
        with torch.no_grad():
            logprobs = megatron_logprobs(model, sample_tokens())
        out = root.parent / "exported" / source.name
        export_hf(model, shape, source, out)
        if parallel.is_leader():
            torch.save(logprobs, out / "logprobs.pt")
    parallel.destroy()


if __name__ == "__main__":
    main()
