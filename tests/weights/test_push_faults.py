"""The published failures of weight pushes, injected one at a time into a push to a real engine of two ranks.

Each is stopped at the push in which it happens, with an error that names it, and the next push repairs the engine. The
table is in docs/internals/weight-sync.md.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arpo_megatron.config import JobConfig, ModelConfig
from arpo_megatron.engine.admin import EngineAdmin, WeightPushError
from arpo_megatron.engine.launch import EngineHandle, launch_engine
from arpo_megatron.engine.server.checksums import held_pieces
from arpo_megatron.engine.wire.boxes import BoxPart, TensorType
from arpo_megatron.engine.wire.checksums import PIECES_ACTION, checksummed, difference
from arpo_megatron.trainer.consistency import GAP_LIMITS, gap_limit
from arpo_megatron.weights import reshard
from arpo_megatron.weights import sync as push
from arpo_megatron.weights.control import Control
from arpo_megatron.weights.local import LocalShard
from arpo_megatron.weights.sync import PROBE_TOKENS, PushSettings, WeightSync
from tests.weights.pushes import SIZES, TIMEOUT_S, TOKENS, generate, post, trainer

pytestmark = pytest.mark.usefixtures("one_rank")
KEYS, VALUES = "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"

View = Callable[[LocalShard, BoxPart], Tensor]
own_view = LocalShard.view


def swapped(shard: LocalShard, piece: BoxPart) -> Tensor:
    """Keys and values of a layer are exchanged."""
    other = {KEYS: VALUES, VALUES: KEYS}.get(piece.name, piece.name)
    return own_view(shard, BoxPart(other, piece.at, piece.box, piece.bytes))


def wrong_shard(shard: LocalShard, piece: BoxPart) -> Tensor:
    """The second rank of the engine gets columns of the first one."""
    rows, *others = piece.box
    if piece.name == DOWN and others[0][0]:
        width = others[0][1] - others[0][0]
        return own_view(shard, BoxPart(piece.name, piece.at, (rows, (0, width)), piece.bytes))
    return own_view(shard, piece)


def wrong_scale(shard: LocalShard, piece: BoxPart) -> Tensor:
    """A matrix is twice as large."""
    return own_view(shard, piece) * (2 if piece.name == DOWN else 1)


def one_bit(shard: LocalShard, piece: BoxPart) -> Tensor:
    """The lowest bit of one element is wrong. The same in several pieces could add up to no difference."""
    values = own_view(shard, piece)
    if piece.name == KEYS and not any(first for first, _ in piece.box):
        values = values.clone()
        values.view({2: torch.int16, 4: torch.int32}[values.itemsize]).view(-1)[0] ^= 1
    return values


@pytest.mark.parametrize("wrong", [swapped, wrong_shard, wrong_scale, one_bit])
@pytest.mark.parametrize("kind", ["network", "ipc"])
def test_checksums_stop_wrong_values(
    engine: EngineHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: View, kind: str
) -> None:
    with trainer(tmp_path, 8).sync(engine.url, transport=kind, verify_every=0) as sync:
        monkeypatch.setattr(LocalShard, "view", wrong)
        with pytest.raises(WeightPushError, match=r"is not what the trainer sent: checksum \w{16} instead of"):
            sync.push(8)
        monkeypatch.undo()
        sync.push(9)


def test_checksums_find_one_wrong_bit_anywhere_in_a_large_tensor() -> None:
    """Both sides sum 10 MiB in several chunks. No engine runs: its part is a matrix and the reader of its weights."""
    kind = TensorType((2600, 1024), "float32")
    sent = torch.randn(kind.shape)
    model = nn.Linear(1024, 2600, bias=False)
    model.load_weights = lambda weights: model.weight.data.copy_(dict(weights)["head"])  # type: ignore[assignment]
    model.weight.data.copy_(sent)
    sync: Any = WeightSync.__new__(WeightSync)
    sync._control, sync._checksum_ranks = Control(None), {"head": {kind.whole: 0}}
    shard: Any = None
    sync._local = LocalShard(shard, {"head": kind}, {"head": {kind.whole: sent}}, torch.device("cpu"))
    expected: list[dict[str, int]] = []

    def start_checksums(types: dict[str, TensorType]) -> Callable[[], list[Any]]:
        expected.append({"head": int(sync._local.checksum("head", {kind.whole})) % 2**64})
        return lambda: [held_pieces(model, types)]

    sync._admin = SimpleNamespace(urls=["engine"], start_checksums=start_checksums)
    assert sync._verify() == ("head",)
    for row in range(0, 2600, 199):
        model.weight.data.copy_(sent)
        model.weight.data.view(torch.int32)[row, row % 1024] ^= 1
        with pytest.raises(WeightPushError, match="head is not what the trainer sent: checksum"):
            sync._verify()
    bits = sent.numpy().view(np.int32).ravel().astype(np.int64).astype(np.uint64)
    place = np.arange(bits.size, dtype=np.uint64)
    assert expected[0] == {"head": int((bits * (2 * place + 1)).sum())}, "other code gets the same sum modulo 2^64"


def test_engines_compute_checksums_while_the_trainer_does() -> None:
    """No engine runs: the order of rank 0's work is recorded."""
    order: list[str] = []
    sync: Any = WeightSync.__new__(WeightSync)
    sync._control, kind = Control(None), TensorType((1, 1), "float32")
    sync._checksum_ranks = {"head": {kind.whole: 0}}
    checksum = lambda *_: order.append("trainer") or torch.tensor(0)  # noqa: E731
    sync._local = SimpleNamespace(types={"head": kind}, checksum=checksum)
    wait = lambda: order.append("wait") or []  # noqa: E731
    sync._admin = SimpleNamespace(urls=[], start_checksums=lambda _: order.append("engines") or wait)
    sync._verify()
    assert order == ["engines", "trainer", "wait"]


@pytest.mark.parametrize("wrong", [None, 1, 2])
def test_checksums_of_many_engines_are_compared_once_if_they_are_equal(
    monkeypatch: pytest.MonkeyPatch, wrong: int | None
) -> None:
    """No engine runs: the answers of three are given. Checksums come from one engine, and from one with others."""
    kind = TensorType((4, 4), "float32")
    sent = torch.randn(kind.shape)
    (part,) = checksummed([(sent, sent)])
    urls = [f"http://engine{index}" for index in range(3)]
    held = dict.fromkeys(urls, part)
    if wrong is not None:
        held[urls[wrong]] = replace(part, checksum=part.checksum ^ 1)
    fetched: list[str] = []

    def start_check(actions: dict[str, str]) -> Callable[[], list[Any]]:
        pieces = {url: json.dumps({"head": [held[url].as_json()]}) for url in actions}
        if PIECES_ACTION not in actions.values():
            return lambda: [[{"answer": f"digest of {pieces[url]}"}] for url in actions]
        fetched.extend(actions)
        return lambda: [[{"answer": pieces[url]}] for url in actions]

    admin = EngineAdmin(urls, TIMEOUT_S)
    monkeypatch.setattr(admin, "_start_check", start_check)
    compared: list[int] = []
    monkeypatch.setattr(push, "difference", lambda *given: compared.append(1) or difference(*given))
    sync: Any = WeightSync.__new__(WeightSync)
    shard: Any = None
    sync._local = LocalShard(shard, {"head": kind}, {}, torch.device("cpu"))
    sync._admin = admin
    if wrong is None:
        sync._compare([part.checksum], admin.start_checksums(sync._local.types)())
        assert len(compared) == 1
        assert fetched == [urls[0]]
        return
    with pytest.raises(WeightPushError, match=f"http://engine{wrong}: head is not what the trainer sent"):
        sync._compare([part.checksum], admin.start_checksums(sync._local.types)())
    assert sorted(fetched) == [urls[0], urls[wrong]]


@pytest.fixture(scope="module")
def bfloat16_engine(engine_model: Path) -> Iterator[EngineHandle]:
    log = engine_model.parent / "bfloat16.log"
    with launch_engine(engine_model, SIZES, dtype="bfloat16", seed=1, log_path=log) as handle:
        yield handle


def test_every_push_of_a_bfloat16_job_stops_faults_that_its_probe_does_not_see(
    bfloat16_engine: EngineHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default settings, at pushes that are neither the first one nor follow a failure."""
    config = JobConfig("test", model=ModelConfig(dtype="bfloat16"))
    trained = trainer(tmp_path, 2, "bfloat16")
    unseen = []
    with trained.sync(bfloat16_engine.url, verify_every=PushSettings().verify_every) as sync:
        for wrong in (swapped, wrong_shard, wrong_scale, one_bit):
            sync.push(2)
            first_gap = trained.gap(sync, TOKENS[:PROBE_TOKENS])
            monkeypatch.setattr(LocalShard, "view", wrong)
            with pytest.raises(WeightPushError, match=r"is not what the trainer sent: checksum \w{16} instead of"):
                sync.push(3)
            monkeypatch.undo()
            if trained.gap(sync, TOKENS[:PROBE_TOKENS]) <= gap_limit(first_gap, config):
                unseen.append(wrong)
    assert {wrong_scale, one_bit} <= set(unseen), "the probe alone would let these pass"


@pytest.mark.parametrize("wrong", [swapped, wrong_shard, wrong_scale])
def test_short_probe_stops_wrong_values_of_a_float32_push_without_checksums(
    engine: EngineHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: View
) -> None:
    trained = trainer(tmp_path, 2)
    with trained.sync(engine.url, verify_every=0) as sync:
        sync.push(2)
        gaps = []
        for view in (own_view, wrong):
            monkeypatch.setattr(LocalShard, "view", view)
            assert sync.push(3).probe_tokens == PROBE_TOKENS
            gaps.append(trained.gap(sync, TOKENS[:PROBE_TOKENS]))
        assert gaps[0] < GAP_LIMITS["float32"] / 10
        assert gaps[1] > GAP_LIMITS["float32"] * 3
        monkeypatch.undo()
        sync.push(4)


def without(rounds: list[Any], name: str) -> list[Any]:
    return [
        tuple(
            replace(
                each,
                parts=tuple(replace(part, names=tuple(n for n in part.names if n != name)) for part in each.parts),
            )
            for each in turn
        )
        for turn in rounds
    ]


def doubled(rounds: list[Any], name: str) -> list[Any]:
    return rounds + [tuple(each for each in turn if any(name in part.names for part in each.parts)) for turn in rounds]


@pytest.mark.parametrize("change", [without, doubled])
def test_engine_refuses_a_plan_that_leaves_something_out(
    engine: EngineHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Any], str], list[Any]]
) -> None:
    plan = reshard.plan_rounds
    monkeypatch.setattr(reshard, "plan_rounds", lambda *arguments: change(plan(*arguments), DOWN))
    with trainer(tmp_path, 11).sync(engine.url) as sync:
        with pytest.raises(WeightPushError, match=r"rank 0 refuses the push: .* does not bring each element of model"):
            sync.push(11)
        assert post(engine.url).status_code == 503
        monkeypatch.undo()
        sync.push(12)
    assert generate(engine.url)["meta_info"]["weight_version"] == "12"


@pytest.mark.parametrize("kind", ["network", "ipc"])
def test_torn_bucket_is_never_committed(
    engine: EngineHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The trainer's end breaks after half of the rounds; the engine notices at once and stays closed."""
    trained = trainer(tmp_path, 13)
    with trained.sync(engine.url, transport=kind) as sync:
        sync.push(13)
        transport: Any = sync.transport
        start, rounds = transport._start, []

        def torn(messages: Any) -> Any:
            rounds.append(messages)
            if len(rounds) > 2:
                transport.close()
                raise ConnectionError("the trainer's end is gone")
            return start(messages)

        monkeypatch.setattr(transport, "_start", torn)
        with pytest.raises(WeightPushError, match=r"Failed to update|gone"):
            sync.push(14)
        assert post(engine.url).status_code == 503
        sync.push(15)
        assert trained.gap(sync) < 1e-4


def test_exchange_by_an_old_plan_is_refused_at_once(engine: EngineHandle, tmp_path: Path) -> None:
    """Two trainers push to one engine, which a cluster's requeue can bring about: the plan of one is forgotten."""
    trained = trainer(tmp_path, 16)
    with trained.sync(engine.url, transport="ipc") as first, trained.sync(engine.url) as second:
        first.push(16)
        second.push(17)
        with pytest.raises(WeightPushError, match="this exchange does not follow the engine's newest plan"):
            first.push(18)
        first.push(19)
    assert generate(engine.url)["meta_info"]["weight_version"] == "19"


def test_weights_and_commits_outside_their_push_are_refused(engine: EngineHandle, tmp_path: Path) -> None:
    """Another trainer's begin replaces a push, and a refused commit names what has arrived."""
    engines = EngineAdmin([engine.url], TIMEOUT_S)
    with trainer(tmp_path, 17).sync(engine.url) as sync:
        sync.push(17)
        sync.engines.begin_push(17)
        engines.begin_push(18)  # another trainer's
        for version, reason in ((17, "weights of version 18 are arriving, not 17"), (18, "0 of the 1 parts")):
            with pytest.raises(WeightPushError, match=f"HTTP 409: .*{reason}"):
                engines.commit_push(version, 1)
        sync.push(19)
        body = {"model_path": str(tmp_path / "17")}
        with pytest.raises(WeightPushError, match=r"HTTP 409: .*weights have arrived, but no push has begun"):
            engines.post_all("update_weights_from_disk", [(engine.url, body)])[0].result()
    assert generate(engine.url)["meta_info"]["weight_version"] == "19"


def test_slept_weights_are_not_served(engine: EngineHandle, tmp_path: Path) -> None:
    """Memory that comes back without weights keeps the engine closed until a push."""
    engines = EngineAdmin([engine.url], TIMEOUT_S)
    engines.release_memory()
    with (
        trainer(tmp_path, 21).sync(engine.url, colocated=False) as sync,
        pytest.raises(WeightPushError, match="cannot be stored: the engine's memory is lent"),
    ):
        sync.push(21)
    with trainer(tmp_path, 22).sync(engine.url, colocated=True) as sync:
        sync.push(22)
    assert generate(engine.url)["meta_info"]["weight_version"] == "22"
