"""The trainer's handle of the rollout process after failures and cut connections."""

import asyncio
import gc
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from tokenizers import Tokenizer, models

from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.engine.request import Sampling
from arpo_megatron.rollout.connection import Outbox, hang_up
from arpo_megatron.rollout.garbage import collect_on_demand
from arpo_megatron.rollout.handle import RolloutError, RolloutHandle
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.messages import (
    CollectTrees,
    FinishedTree,
    Pause,
    Restore,
    RolloutProgress,
    RolloutReport,
    RolloutSettings,
    ServiceSettings,
)
from arpo_megatron.rollout.record import UntrainedTree
from arpo_megatron.rollout.worker import TrainerConnection
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import RolloutTree
from tests.engine.scripted import ScriptedEngine

NOWHERE = "http://127.0.0.1:9"
LIMITS = RolloutLimits(3000, 900, 4, 60, 5.0)


def serve(listener: Listener, served: "list[Connection[Any, Any]]") -> None:
    """Serve connections as the rollout process does, in a thread; they are added to `served`."""

    def run() -> None:
        with suppress(OSError):  # the test is over
            while True:
                served.append(listener.accept())
                asyncio.run(TrainerConnection(served[-1]).serve())

    threading.Thread(target=run, daemon=True).start()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer."""
    Tokenizer(models.WordLevel({"w": 0}, unk_token="w")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_handle_does_not_reconnect_after_a_failure(folder: Path) -> None:
    served: list[Connection[Any, Any]] = []
    with Listener(str(folder / "socket"), "AF_UNIX") as listener:
        serve(listener, served)
        settings = RolloutSettings(AlgorithmConfig(), 2, Sampling(), LIMITS)
        unreadable = UntrainedTree("t", 0, 0, (b"not what a process has recorded",))
        with RolloutHandle.connect(folder / "socket", ServiceSettings((NOWHERE,), NOWHERE, folder, 1)) as handle:
            with pytest.raises(RolloutError, match="the rollout process failed"):
                handle.resume_trees("g", [(Task("t", (), "", "math", "w"), unreadable)], version=0, settings=settings)
            time.sleep(0.3)
            assert len(served) == 1
            with pytest.raises(RolloutError, match="has already failed"):
                handle.pause()


@dataclass
class Stuck(ScriptedEngine):
    """Answers its second generation only when it is released."""

    generations: int = 0
    released: bool = False

    async def generate(self, request: web.Request) -> web.Response:
        if (await request.json())["sampling_params"]["max_new_tokens"]:
            self.generations += 1
            if self.generations == 2:
                while not self.released:
                    await asyncio.sleep(0.01)
        return await super().generate(request)


def test_trees_that_grow_while_the_trainer_trains_do_not_count_as_its_progress(
    folder: Path, scripted_engine: Callable[[ScriptedEngine], ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, beats, task = Stuck(lambda _text: "xyz"), list[int](), Task("t", (), "", "math", "w")
    monkeypatch.setattr("arpo_megatron.rollout.handle.beat", lambda: beats.append(1))
    scripted_engine(engine)
    grown = RolloutSettings(None, 2, Sampling(), LIMITS)
    with Listener(str(folder / "socket"), "AF_UNIX") as listener:
        serve(listener, [])
        settings = ServiceSettings((engine.url,), NOWHERE, folder, 1)
        with RolloutHandle.connect(folder / "socket", settings) as handle:
            handle.start_trees("ahead", [task], step=0, version=0, settings=grown)
            before, deadline = len(beats), time.monotonic() + 60
            engine.released = True
            while not handle._finished and time.monotonic() < deadline:
                time.sleep(0.01)
            assert handle._finished
            assert len(beats) == before
            handle.grow_trees([task], step=0, version=0, settings=grown)
            assert len(beats) > before


def test_cut_connection_is_restored_during_a_call(
    folder: Path, scripted_engine: Callable[[ScriptedEngine], ScriptedEngine]
) -> None:
    engine = Stuck(lambda _text: "xyz")
    scripted_engine(engine)
    served: list[Connection[Any, Any]] = []

    def cut(progress: RolloutProgress) -> None:
        if engine.generations == 2 and progress.tokens_sampled and len(served) == 1:
            hang_up(served[0])

    def release() -> None:
        engine.released = True

    too_late = threading.Timer(10.0, release)
    too_late.start()
    with Listener(str(folder / "socket"), "AF_UNIX") as listener:
        serve(listener, served)
        settings = ServiceSettings((engine.url,), NOWHERE, folder, 1)
        with RolloutHandle.connect(folder / "socket", settings) as handle:
            task = Task("t", (), "", "math", "w")
            grown = RolloutSettings(None, 2, Sampling(), LIMITS)
            report = handle.grow_trees([task], step=0, version=0, settings=grown, progress=cut)
    noticed = not engine.released
    too_late.cancel()
    release()
    assert noticed
    assert report.failed == []
    assert len(report.trees[0].leaves()) == 2
    assert len(served) == 2
    assert engine.generations == 3  # what had been sampled before the cut was not asked for again


def test_finished_trees_are_given_while_others_grow(
    folder: Path, scripted_engine: Callable[[ScriptedEngine], ScriptedEngine]
) -> None:
    engine = Stuck(lambda _text: "xyz")
    scripted_engine(engine)
    given: list[tuple[str, object]] = []

    def finished(task: Task, tree: RolloutTree) -> None:
        given.append((task.id, tree))
        engine.released = True  # the other tree waits for this one

    with Listener(str(folder / "socket"), "AF_UNIX") as listener:
        serve(listener, [])
        settings = ServiceSettings((engine.url,), NOWHERE, folder, 1)
        with RolloutHandle.connect(folder / "socket", settings) as handle:
            grown = RolloutSettings(None, 1, Sampling(), LIMITS)
            tasks = [Task(name, (), "", "math", "w") for name in "ab"]
            handle.start_trees("g", tasks, step=0, version=0, settings=grown)
            trees = handle.collect(CollectTrees("g"), finished=finished).trees
    assert [tree.task_id for tree in trees] == ["a", "b"]
    (name, first), *_ = given
    assert first is trees["ab".index(name)], "the report has the same object"


def test_finished_tree_is_the_same_object_after_a_restart(
    folder: Path, scripted_engine: Callable[[ScriptedEngine], ScriptedEngine]
) -> None:
    """`TreeScorer` knows the trees that it has begun to score by their objects: another one is judged again."""
    engine = Stuck(lambda _text: "xyz")
    scripted_engine(engine)
    served: list[Connection[Any, Any]] = []
    given: list[RolloutTree] = []

    def finished(_task: Task, tree: RolloutTree) -> None:
        given.append(tree)
        if len(given) == 1:
            hang_up(served[0])
        else:
            engine.released = True

    with Listener(str(folder / "socket"), "AF_UNIX") as listener:
        serve(listener, served)
        settings = ServiceSettings((engine.url,), NOWHERE, folder, 1)
        with RolloutHandle.connect(folder / "socket", settings) as handle:
            grown = RolloutSettings(None, 1, Sampling(), LIMITS)
            tasks = [Task(name, (), "", "math", "w") for name in "ab"]
            handle.start_trees("g", tasks, step=0, version=0, settings=grown)
            trees = handle.collect(CollectTrees("g"), finished=finished).trees
    assert len(served) == 2 and len(given) > 2
    assert {id(tree) for tree in given} == {id(tree) for tree in trees}


class Measured:
    """A connection that notes the size of each message that it sends."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self.sizes: list[int] = []

    def send(self, message: object) -> None:
        self.sizes.append(len(pickle.dumps(message)))
        self._connection.send(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_report_is_sent_tree_by_tree(folder: Path, scripted_engine: Callable[[ScriptedEngine], ScriptedEngine]) -> None:
    """Pickling the 1.6 GB of a large step at once would stop the event loop in which the next trees grow."""
    engine = scripted_engine(ScriptedEngine(lambda text: "" if len(text) > 100 else "x" * 400))
    sent = list[Measured]()
    with Listener(str(folder / "socket"), "AF_UNIX") as listener:

        def process() -> None:
            sent.append(Measured(listener.accept()))
            asyncio.run(TrainerConnection(sent[0]).serve())  # type: ignore[arg-type]

        threading.Thread(target=process, daemon=True).start()
        settings = ServiceSettings((engine.url,), NOWHERE, folder, 1)
        with RolloutHandle.connect(folder / "socket", settings) as handle:
            tasks = [Task(f"t{number}", (), "", "math", "w") for number in range(30)]
            limits = RolloutLimits(90, 300, 4, 60, 5.0)
            grown = RolloutSettings(None, 2, Sampling(), limits)
            report = handle.grow_trees(tasks, step=0, version=0, settings=grown)
    assert [tree.task_id for tree in report.trees] == [task.id for task in tasks]
    assert max(sent[0].sizes) < 2 * len(pickle.dumps(report.trees[0]))


def test_process_that_restarts_during_a_pause_stays_paused(folder: Path) -> None:
    """Also before the pause was answered: the previous process may have answered and died."""
    with Listener(str(folder / "socket"), "AF_UNIX") as listener:
        settings, begun = ServiceSettings((NOWHERE,), NOWHERE, folder, 1), list[Restore]()

        def processes() -> None:
            for number in range(2):
                with listener.accept() as connection:
                    greeting, restore = connection.recv()
                    begun.append(restore)
                    connection.send((greeting, None))
                    request, asked = connection.recv()
                    assert asked == Pause()
                    if number:
                        connection.send((request, None))
                        with suppress(EOFError):
                            connection.recv()

        thread = threading.Thread(target=processes, daemon=True)
        thread.start()
        with RolloutHandle.connect(folder / "socket", settings) as handle:
            handle.pause()
        thread.join(10)
    assert [restore.paused for restore in begun] == [False, True]


def test_shares_of_answered_calls_survive_a_restart(folder: Path) -> None:
    """Half of the calls fail in the first report, none in the second, which is that of another process."""
    stats: Any = None
    with Listener(str(folder / "socket"), "AF_UNIX") as listener:

        def processes() -> None:
            for tree_id, calls in enumerate(({("search", True): 2, ("search", False): 2}, {("search", True): 4})):
                with listener.accept() as connection:
                    greeting, _restore = connection.recv()
                    connection.send((greeting, None))
                    started, _trees = connection.recv()
                    connection.send((started, None))
                    asked, _request = connection.recv()
                    connection.send(FinishedTree(tree_id, RolloutTree("t", [0])))
                    connection.send((asked, RolloutReport([], [], stats, (tree_id,), calls=calls)))
                    with suppress(EOFError):  # until the handle asks again, or closes
                        connection.recv()

        threading.Thread(target=processes, daemon=True).start()
        grown, task = RolloutSettings(None, 1, Sampling(), LIMITS), Task("t", (), "", "math", "w")
        with RolloutHandle.connect(folder / "socket", ServiceSettings((NOWHERE,), NOWHERE, folder, 1)) as handle:
            shares = []
            for _ in range(2):
                handle.start_trees("g", [task], step=0, version=0, settings=grown)
                shares += [tree.answered_shares for tree in handle.collect(CollectTrees("g")).trees]
    assert shares == [{"search": 0.5}, {"search": pytest.approx((0.9 * 2 + 4) / (0.9 * 4 + 4))}]


def test_garbage_is_collected_only_while_no_tree_samples(
    folder: Path, scripted_engine: Callable[[ScriptedEngine], ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, collections = scripted_engine(ScriptedEngine(lambda _text: "xyz", delay_s=lambda _text: 0.2)), list[int]()
    monkeypatch.setattr("arpo_megatron.rollout.worker.gc", SimpleNamespace(collect=lambda: collections.append(1)))
    grown = RolloutSettings(None, 2, Sampling(), LIMITS)
    with Listener(str(folder / "socket"), "AF_UNIX") as listener:
        serve(listener, [])
        settings = ServiceSettings((engine.url,), NOWHERE, folder, 1)
        with RolloutHandle.connect(folder / "socket", settings) as handle:
            handle.start_trees("g", [Task("t", (), "", "math", "w")], step=0, version=0, settings=grown)
            assert not collections
            handle.pause()
            handle.resume(0)
            assert len(collections) == 1
            handle.collect(CollectTrees("g"))
            handle.pause()
            handle.resume(1)
            handle.pause()
            assert len(collections) == 2, "nothing has grown since the last one"


def test_answer_to_a_pause_does_not_wait_for_a_collection(
    folder: Path, scripted_engine: Callable[[ScriptedEngine], ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection keeps the interpreter's lock, so nothing is sent during it."""
    engine = scripted_engine(ScriptedEngine(lambda _text: "xyz", delay_s=lambda _text: 0.2))
    sent, sent_before = list[object](), list[int]()
    send = Connection.send

    def send_slowly(connection: "Connection[Any, Any]", message: object) -> None:
        if threading.current_thread().name == "outbox":
            time.sleep(0.1)
            sent.append(message)
        send(connection, message)

    def collect() -> None:
        sent_before.append(sum(isinstance(message, tuple) for message in sent))

    monkeypatch.setattr(Connection, "send", send_slowly)
    monkeypatch.setattr("arpo_megatron.rollout.worker.gc", SimpleNamespace(collect=collect))
    grown = RolloutSettings(None, 2, Sampling(), LIMITS)
    with Listener(str(folder / "socket"), "AF_UNIX") as listener:
        serve(listener, [])
        with RolloutHandle.connect(folder / "socket", ServiceSettings((engine.url,), NOWHERE, folder, 1)) as handle:
            handle.start_trees("g", [Task("t", (), "", "math", "w")], step=0, version=0, settings=grown)
            handle.pause()
            handle.resume(0)
    assert sent_before[0] == 3, "the answers to the first request, to the start of the tree and to the pause"


@pytest.mark.timeout(30)
def test_wait_for_sent_messages_ends_when_the_other_end_is_gone() -> None:
    ours, theirs = Pipe()
    outbox = Outbox(ours)
    outbox.put("first")
    asyncio.run(outbox.sent())
    assert theirs.poll()
    assert theirs.recv() == "first"
    theirs.close()
    outbox.put("lost")
    asyncio.run(outbox.sent())
    outbox.close()
    ours.close()


def test_long_lived_objects_are_visited_on_demand_only() -> None:
    """In Python 3.11 a whole collection follows when enough objects have survived."""
    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        collect_on_demand()
        whole = gc.get_stats()[2]["collections"]
        kept = [[None] for _ in range(gc.get_freeze_count() + 10_000)]
        assert gc.get_stats()[2]["collections"] == whole
        kept[0][0] = kept[0]  # type: ignore[call-overload]
        del kept
        assert gc.collect() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
