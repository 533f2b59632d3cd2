"""Transports alone: the fields of their requests, and what they free."""

import base64
import json
import os
import pickle
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from arpo_megatron.engine.admin import EngineAdmin, EngineEndpoint, WeightPushError
from arpo_megatron.weights.sync import probe_gap
from arpo_megatron.weights.transports import Disk, SharedMemory, shared_memory
from tests.faults import small_disk

TIMEOUT_S = 60.0


SGLANG_KNOWS = """
import inspect, json
from arpo_megatron.engine.server.cpu import install_stubs
install_stubs()
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from sglang.srt.managers import io_struct
from sglang.srt.utils import patch_torch
from sglang.srt.utils.common import SafeUnpickler
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata
requests = ("UpdateWeightsFromTensor", "UpdateWeightsFromDistributed", "UpdateWeightFromDisk", "InitWeightsUpdateGroup",
    "DestroyWeightsUpdateGroup", "CheckWeights")
print(json.dumps({
    "fields": {name: list(getattr(io_struct, name + "ReqInput").__struct_fields__) for name in requests},
    "metadata": list(FlattenedTensorMetadata.__dataclass_fields__),
    "device": patch_torch._REDUCE_TENSOR_ARG_DEVICE_INDEX,
    "device_name": list(inspect.signature(rebuild_cuda_tensor).parameters)[patch_torch._REDUCE_TENSOR_ARG_DEVICE_INDEX],
    "safe": sorted(SafeUnpickler.ALLOWED_MODULE_PREFIXES),
}))
"""


def test_requests_have_the_fields_of_the_installed_sglang() -> None:
    """Also that of CUDA handles, which no CPU can try: SGLang takes a GPU's name in the place of its number."""
    done = subprocess.run([sys.executable, "-c", SGLANG_KNOWS], capture_output=True, text=True, check=True)
    known = json.loads(done.stdout.splitlines()[-1])
    sent = {
        "UpdateWeightsFromTensor": {"serialized_named_tensors", "load_format", "flush_cache"},
        "UpdateWeightsFromDistributed": {"names", "dtypes", "shapes", "group_name", "load_format", "flush_cache"},
        "UpdateWeightFromDisk": {"model_path", "load_format", "flush_cache"},
        "InitWeightsUpdateGroup": {
            *("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
        },
        "DestroyWeightsUpdateGroup": {"group_name"},
        "CheckWeights": {"action"},
    }
    for name, fields in sent.items():
        assert fields <= set(known["fields"][name]), name
    assert set(known["metadata"]) == {"name", "shape", "dtype", "start_idx", "end_idx", "numel"}
    assert (known["device"], known["device_name"]) == (shared_memory._DEVICE_ARGUMENT, "storage_device")
    assert {"torch.", "types."} <= set(known["safe"])


def test_shared_memory_refuses_an_engine_on_another_machine() -> None:
    with pytest.raises(Exception, match=r"sync\.transport=ipc: the engine at http://192\.0\.2\.1:80 is not on"):
        SharedMemory(EngineAdmin(["http://192.0.2.1:80"], TIMEOUT_S))


class MappingEngine(BaseHTTPRequestHandler):
    """The engine's half of shared memory only: map each bucket and release it."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for handle in body["serialized_named_tensors"]:
            assert pickle.loads(base64.b64decode(handle))["flattened_tensor"].view(torch.float32).eq(1).all()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_arguments: object) -> None:
        """Keep the test's output clean."""


def test_shared_memory_is_free_between_pushes() -> None:
    def mapped() -> bool:
        return f"/torch_{os.getpid()}_" in Path("/proc/self/maps").read_text()

    bucket = [("weight", torch.ones(5000))]
    with ThreadingHTTPServer(("127.0.0.1", 0), MappingEngine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        requests = EngineAdmin([url], TIMEOUT_S)
        transport = SharedMemory(requests)
        for _ in range(2):
            transport.connect([EngineEndpoint(url, 2, "")])
            for _ in range(2):
                transport.send(bucket)()
                assert mapped()
            assert transport.finish() == 2
            assert not mapped()
        requests.close()
        server.shutdown()


def test_full_disk_is_reported_and_freed(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    requests = EngineAdmin(["http://127.0.0.1:9"], TIMEOUT_S)
    transport = Disk(requests, disk / "sync")
    with small_disk(disk, 2**14) as full:
        transport.connect(())
        with pytest.raises(WeightPushError, match=rf"sync/model\.safetensors: {full}"):
            transport.send([("weight", torch.ones(5000))])()
        transport.close()
        assert list(disk.iterdir()) == [], "the disk is freed until the next attempt"
    requests.close()


def test_probe_gap_is_the_largest_difference_and_infinite_for_nan() -> None:
    assert probe_gap([-1.0, -2.0], np.float32([-1.0, -2.5])) == 0.5
    assert probe_gap([-1.0], [np.nan]) == float("inf")
    assert probe_gap([-np.inf], [-np.inf]) == float("inf")
    with pytest.raises(ValueError, match="cannot be compared"):
        probe_gap([-1.0], [-1.0, -2.0])
    assert probe_gap([], []) == 0.0
