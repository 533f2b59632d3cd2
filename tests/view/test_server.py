"""The server of `arpo view`: what it answers, whom it refuses, and that hostile text stays text."""

import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import TRAINING, RunDirectory
from arpo_megatron.launch.health import ServiceHealth, write_health
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.monitor.metrics import MetricsLog
from arpo_megatron.monitor.tree_store import read_trees, step_file, write_trees
from arpo_megatron.utils.signals import Interrupted
from arpo_megatron.utils.web_server import CommandServer
from arpo_megatron.view.pages import Pages, to_json
from arpo_megatron.view.runs import find_runs, is_training
from arpo_megatron.view.server import address_of, application, is_loopback, listen, serve
from arpo_megatron.view.tree_page import token_texts
from tests.view.stored_run import HOSTILE, STEPS, decode, grown, make_run, scored, tokenizer, trained, write_step

LOCAL = "http://127.0.0.1:8750"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def pages(run: RunDirectory) -> Pages:
    return Pages(find_runs([run.path]))


@pytest.fixture
def client(pages: Pages) -> Iterator[TestClient]:
    with TestClient(application(pages, None, "127.0.0.1"), base_url=LOCAL) as client:
        yield client


def test_page_loads_only_its_own_files(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert client.get("/main.js").headers["content-type"].startswith("text/javascript")
    for name in ("style.css", "main.js", "trees.js"):
        text = client.get(f"/{name}").text
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text
        assert "innerHTML" not in text and "eval(" not in text
    for name in ("/__init__.py", "/..%2fserver.py", "/nothing"):
        assert client.get(name).status_code == 404
    assert client.post("/data/run").status_code == 405


def test_run_page_has_what_the_run_recorded(client: TestClient) -> None:
    page = client.get("/data/run").json()
    assert (page["recipe"], page["step"], page["steps"], page["state"]) == ("test", STEPS, STEPS, "finished")
    assert page["code"] == "commit 0123456789ab-dirty"
    assert page["metrics"]["reward"] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert all(time >= page["began"] for time in page["metrics"]["time"])
    assert [each["step"] for each in page["evaluations"]] == [1, STEPS]
    assert page["held_out_changes"]["gained"] == ["held-1", "held-2"]
    assert page["held_out_changes"]["lost"] == []
    assert [(each["service"], each["step"]) for each in page["restarts"]] == [("engine", 2)]
    assert page["last_event"]["text"] == "export", "later restarts are those of arpo serve"
    assert page["tree_steps"] == [1, 2, 3, 4] and page["held_out_tree_steps"] == [1, STEPS]
    assert page["config"]["train.steps"] == STEPS
    assert {each["metric"] for each in page["advice"]} >= {"dropped/failed"}


def test_resumes_are_restarts_of_the_job(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, last=False)
    EventLog(run.events).emit("note", text="continued", resumed=True)
    EventLog(run.events).emit("note", text="resumed from habit")
    (restart,) = Pages({"run": run}).answer("run")["restarts"]
    assert (restart["service"], restart["step"], restart["text"]) == ("job", 1, "continued")


def test_tree_page_has_the_stored_tree(client: TestClient, run: RunDirectory) -> None:
    rows = client.get("/data/run/trees/2").json()
    stored = read_trees(step_file(run, 2))
    assert [(row["task"], row["leaves"], row["dropped"]) for row in rows] == [
        (item.tree.task_id, len(item.tree.leaves()), item.dropped) for item in stored
    ]
    assert rows[0]["tools"] == {"error": 1} and rows[0]["tool_errors"] == 1 and rows[0]["finish"]["length"] == 1
    tree = client.get("/data/run/trees/2/0").json()
    expected = stored[0].tree
    assert [each["parent"] for each in tree["segments"]] == [each.parent for each in expected.segments]
    assert [each["segment"] for each in tree["leaves"]] == expected.leaves()
    for shown, segment in zip(tree["segments"], expected.segments, strict=True):
        assert shown["text"] == decode(segment.token_ids)
        if segment.logprobs is not None:
            assert "".join(shown["pieces"]) == shown["text"]
            assert shown["logprobs"] == pytest.approx(segment.logprobs.tolist(), rel=1e-4)
            gap = [a - b for a, b in zip(shown["trainer_logprobs"], shown["logprobs"], strict=True)]
            assert gap == pytest.approx([-0.125] * len(gap), abs=1e-3)
    (branch,) = [each["branch"] for each in tree["segments"] if each["branch"]]
    assert branch == {"dH": 0.25, "probability": 0.75, "draw": 0.5, "why": "draw"}
    assert [leaf["advantages"] for leaf in tree["leaves"]] == [[0.5], [0.0], [-0.5]]
    assert [leaf["answer"] for leaf in tree["leaves"]] == ["4", "4", None]
    assert [leaf["terms"]["judged"] for leaf in tree["leaves"]] == [1.0, 0.0, 0.0]
    unfinished = client.get("/data/run/trees/2/2").json()
    assert [leaf["reward"] for leaf in unfinished["leaves"]] == [None] * 3
    assert client.get("/data/run/trees/held-out-4/0").json()["leaves"][0]["reward"] == 1.0
    assert [row["step"] for row in client.get("/data/run/task/sum-2").json()] == ["1", "2", "3", "4"]
    held_out = client.get("/data/run/task/held-1").json()
    assert [(row["step"], row["reward"]) for row in held_out] == [("held-out-1", 0.0), (f"held-out-{STEPS}", 1.0)]


def test_task_whose_id_has_slashes_has_an_address(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_trees(step_file(run, 7), 7, [scored(grown("set//a/1"))], decode, [trained(scored(grown("set//a/1")))])
    with TestClient(application(Pages(find_runs([run.path])), None, "127.0.0.1"), base_url=LOCAL) as client:
        assert [row["step"] for row in client.get("/data/run/task/set%2F%2Fa%2F1").json()] == ["7"]


@pytest.mark.parametrize(
    "damaged", ["{", "[]", "{}", '{"step": 9, "success": null}', '{"step": 9, "success": 1, "solved": 3}']
)
def test_damaged_result_of_an_evaluation_is_left_out(tmp_path: Path, damaged: str) -> None:
    run = make_run(tmp_path / "run")
    (run.held_out / "step_9.json").write_text(damaged)
    page = Pages(find_runs([run.path])).answer("run")
    assert [each["step"] for each in page["evaluations"]] == [1, STEPS]


@pytest.mark.parametrize(
    "address", ["other", "run/trees/9", "run/trees/1/99", "run/trees/..%2F..%2Fx/0", "run/trees/x-1", "run/nothing"]
)
def test_unknown_addresses_are_one_line(client: TestClient, address: str) -> None:
    answer = client.get(f"/data/{address}")
    assert answer.status_code == 404
    assert "\n" not in answer.json()["error"]


def test_hostile_text_is_data(client: TestClient) -> None:
    for address in ("run", "run/trees/1/0"):
        answer = client.get(f"/data/{address}")
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "<" not in answer.text and HOSTILE in str(answer.json()).replace("\\u202e", "\u202e").replace(
            "\\x1b", "\x1b"
        )


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8750", "127.0.0.1.evil.example", "", "localhost.evil:80"]
)
def test_other_host_names_are_refused(client: TestClient, host: str) -> None:
    """A site that points its own name at this machine gets nothing."""
    for path in ("/", "/data/run"):
        refused = client.get(path, headers={"Host": host})
        assert refused.status_code == 421
        assert "run" not in refused.text.replace("arpo view printed", "")


@pytest.mark.parametrize("host", ["127.0.0.1:8750", "localhost:8750", "[::1]:8750", "10.1.2.3:8750"])
def test_own_addresses_are_served(client: TestClient, host: str) -> None:
    assert client.get("/data/run", headers={"Host": host}).status_code == 200


def test_token_is_needed_where_there_is_one(pages: Pages) -> None:
    app = application(pages, "secret", "0.0.0.0")
    with TestClient(app, base_url=LOCAL, follow_redirects=False) as client:
        for path in ("/", "/main.js", "/data/run", "/?token=wrong", "/data/run?token=secret"):
            assert client.get(path).status_code == 401, path
        assert client.get("/data/run", headers={"Cookie": "arpo_view_8750=wrong"}).status_code == 401
        assert client.get("/data/run", headers={"Authorization": "Bearer secret"}).status_code == 200
        entered = client.get("/?token=secret")
        assert entered.status_code == 303 and entered.headers["location"] == "/"
        assert (
            "httponly" in entered.headers["set-cookie"].lower()
            and "samesite=strict" in entered.headers["set-cookie"].lower()
        )
        assert client.get("/data/run").status_code == 200  # with the cookie
        assert client.get("/").status_code == 200


def test_only_loopback_goes_without_a_token() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "10.0.0.1", "node1")] == [
        *(True, True, True),
        *(False, False, False),
    ]


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (
            "203.0.113.7",
            "--host 203.0.113.7: this machine has no such address; use 127.0.0.1, or 0.0.0.0 for all of its own",
        ),
        ("no such name", "--host no such name: no machine is known by this name; use 127.0.0.1"),
    ],
)
@pytest.mark.parametrize("port", [None, 0])
def test_host_that_cannot_be_used_is_blamed(host: str, message: str, port: int | None) -> None:
    with pytest.raises(UserError) as error:
        listen(host, port)
    assert str(error.value).startswith(message)


def test_port_in_use_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=f"^port {port} is in use on 127.0.0.1: choose another --port, 0 for any free"
        ):
            listen("127.0.0.1", port)
        monkeypatch.setattr("arpo_megatron.view.server.DEFAULT_PORT", port)
        with listen("127.0.0.1", None) as other:
            assert other.getsockname()[1] != port


@pytest.mark.parametrize(
    ("host", "name"), [("0.0.0.0", "node1"), ("::", "node1"), ("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")]
)
def test_printed_address_can_be_opened_on_another_machine(
    host: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    with listen("127.0.0.1", 0) as free:
        assert address_of(host, free) == f"http://{name}:{free.getsockname()[1]}"


def test_signals_end_the_server_without_a_traceback(
    pages: Pages, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first waits for an answer in progress, the second does not; SIGHUP comes when a terminal is closed."""
    asked, signalled = threading.Event(), threading.Event()

    def answer(*_: object) -> None:
        asked.set()
        signalled.wait(60)  # the server does not end before the second signal, which would reach pytest

    monkeypatch.setattr(Pages, "answer", answer)
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "disabled", False)  # again after the test
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]

    def ask() -> None:
        with suppress(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/data/run", timeout=30)

    def ask_and_end() -> None:
        asking = threading.Thread(target=ask)
        while not asked.is_set():
            asking = threading.Thread(target=ask)
            asking.start()
            asked.wait(0.3)
        for _ in range(2):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGHUP)
            time.sleep(0.1)
        signalled.set()
        asking.join()

    ending = threading.Thread(target=ask_and_end)
    ending.start()
    with pytest.raises(Interrupted):
        serve(pages, host="127.0.0.1", port=port, with_token=False)
    ending.join()
    assert capfd.readouterr().err == ""


def test_page_follows_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2, last=False)
    with TestClient(application(Pages(find_runs([run.path])), None, "127.0.0.1"), base_url=LOCAL) as client:
        first = client.get("/data/run")
        again = client.get("/data/run", headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "rew')  # as a reader may find it while it is written
        assert client.get("/data/run").json()["step"] == 2
        job = resolve.load(run.config)
        write_step(run, MetricsLog(run.path, job), EventLog(run.events), 3)
        later = client.get("/data/run", headers={"If-None-Match": first.headers["etag"]})
        assert (later.status_code, later.json()["step"], later.json()["state"]) == (200, 3, "running")
        assert later.json()["eta_s"] == pytest.approx(3.0)
        EventLog(run.events).emit("failed", text="the trainer died")
        failed = client.get("/data/run").json()
        assert (failed["state"], failed["last_event"]["text"]) == ("failed", "the trainer died")
        with run.locked():  # as `arpo serve` does
            assert client.get("/data/run").json()["state"] == "failed" and not is_training(run)
        with run.locked(TRAINING):
            assert client.get("/data/run").json()["state"] == "running"
            with pytest.raises(UserError, match="in use"), run.locked():
                pass
            assert is_training(run)
        assert not is_training(run)


def test_services_of_a_running_job_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, last=False)
    pages = Pages({"run": run})
    assert pages.answer("run", "services") == []
    health = ServiceHealth("engine", 7, True, time.time() - 60, 2, HOSTILE, "http://127.0.0.1:1", "logs/engine.log")
    write_health(run.health, [health])
    (service,) = pages.answer("run", "services")
    assert (service["name"], service["up"], service["restarts"], service["last_error"]) == ("engine", True, 2, HOSTILE)
    assert 60 <= service["seconds"] < 600
    for foreign in ("{}", "[]", "no JSON", json.dumps({"host": "another", "processes": [{"name": "engine"}]})):
        run.health.write_text(foreign)
        assert pages.answer("run", "services") == []


def test_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: test\ntrain:\n  steps: 5\n")
    page = Pages({"run": RunDirectory(tmp_path)}).answer("run")
    assert (page["state"], page["step"], page["steps"], page["metrics"], page["advice"]) == ("stopped", 0, 5, {}, [])


def test_runs_are_found_below_a_directory_and_named_uniquely(tmp_path: Path) -> None:
    for place in ("a/run", "b/run", "b/other"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("name: test\n")
    assert list(find_runs([tmp_path / "a" / "run", tmp_path / "b", tmp_path / "b" / "run"])) == [
        "run",
        "other",
        "run (2)",
    ]
    with pytest.raises(UserError, match="is not a run directory"):
        find_runs([tmp_path / "c"])


def test_run_without_a_tokenizer_shows_texts_without_tokens(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trees").symlink_to(run.trees)
    (tmp_path / "run" / "config.yaml").write_text("name: test\nunknown_key: 1\n")
    pages = Pages({"run": RunDirectory(tmp_path / "run")})
    segments = pages.answer("run", "trees", "1", "0")["segments"]
    assert segments[1]["pieces"] is None and segments[1]["text"].startswith("<python>")
    assert pages.answer("run")["recipe"] == "test"


def test_tokens_of_one_character_are_shown_at_its_last_token() -> None:
    ids = tokenizer().encode("a\U0001f600b\u00e9").ids
    texts = token_texts(ids, decode)
    assert texts == ["a", "", "", "", "\U0001f600", "b", "", "\u00e9"]
    assert "".join(token_texts(ids[:3], decode)) == decode(ids[:3])


def test_json_has_no_markup_and_no_nan() -> None:
    assert to_json({"a": "<!--</script>"}) == b'{"a":"\\u003c!--\\u003c/script>"}'
    with pytest.raises(ValueError, match="JSON"):
        to_json(float("nan"))


def test_strangers_cannot_fill_the_log_of_a_page(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    log, written = logging.getLogger("uvicorn.error"), list[str]()

    def warn(*_: Any, **__: Any) -> None:
        log.addHandler(Handler(written))  # the server's config has removed earlier ones
        for _ in range(9):
            log.warning("bad request")

    monkeypatch.setattr(log, "filters", [])
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(CommandServer, "run", warn)
    serve(pages, host="127.0.0.1", port=0, with_token=False)
    assert len(written) == 4  # the 1st, 2nd, 4th and 8th


class Handler(logging.Handler):
    """Keeps the messages in a list."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
