"""Push one bucket of the model in DIRECTORY to the engine at URL, print a line, and wait to be killed.

Arguments: URL DIRECTORY VERSION
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file

from arpo_megatron.engine.admin import EngineAdmin
from arpo_megatron.engine.wire.buckets import Bucket
from arpo_megatron.weights.sync import WeightSync
from arpo_megatron.weights.transports import Broadcast


def main() -> None:
    url, directory, version = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    tensors = sorted(load_file(directory / "model.safetensors").items())

    def buckets() -> Iterator[Bucket]:
        yield tensors[:4]
        yield tensors[4:8]  # requested while the first is in flight, sent when it has arrived
        print("one bucket has arrived", flush=True)
        time.sleep(600)

    requests = EngineAdmin([url], timeout_s=60.0)
    WeightSync(requests, Broadcast(requests), verify_every=0).push(buckets(), version)


if __name__ == "__main__":
    main()
