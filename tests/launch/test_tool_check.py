"""A job that this machine cannot isolate, or whose tools are not on offer, ends before any engine starts."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from arpo_megatron.cli.doctor import check_job_tools
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.inputs import JobData, write_tool_files
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.jobs.tool_file import write_tool_config
from arpo_megatron.launch import services
from arpo_megatron.launch.job import check_tools_of_run
from arpo_megatron.launch.preflight.check import run_checks
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.launch.tool_check import check_tools, check_tools_of
from tests.tools_sandbox.helpers.served import serving
from tests.tools_sandbox.helpers.services import WITHOUT_NAMESPACES, running
from tests.tools_sandbox.test_added_tools import SERVER
from tools_sandbox.client import SandboxClient
from tools_sandbox.config import TOKEN_VARIABLE


def check(folder: Path, tools: list[str] | None, **values: Any) -> list[str]:
    (folder / "tools.yaml").write_text(yaml.safe_dump(values))
    run = RunDirectory(folder)
    config = resolve.resolve("quickstart", overrides=[] if tools is None else [f"rollout.tools=[{', '.join(tools)}]"])
    config = replace(config, sandbox=replace(config.sandbox, file=folder / "tools.yaml"))
    write_tool_config(config.sandbox, run, [])
    return check_tools(config, run)


def test_tools_of_the_service_are_accepted_and_others_refused(tmp_path: Path) -> None:
    mcp = {"arithmetic": {**SERVER, "tools": ["add", "reverse"]}}
    assert check(tmp_path, ["python", "reverse"], mcp=mcp) == []
    with pytest.raises(UserError, match=r"does not offer 'ad'; it offers add, python, reverse$"):
        check(tmp_path, ["ad"], mcp=mcp)
    (note,) = check(tmp_path, None, mcp=mcp)
    assert note.endswith("the policy cannot call add, reverse")


def test_service_that_does_not_start_names_the_file(tmp_path: Path) -> None:
    mcp = {"gone": {"command": sys.executable, "args": ["-c", "exit(3)"]}}
    with pytest.raises(UserError, match=r"sandbox\.file=.*tools\.yaml: .*mcp\.gone: .* does not start") as caught:
        check(tmp_path, None, mcp=mcp)
    assert len(str(caught.value).splitlines()) == 1


def test_unset_variable_of_an_mcp_server_is_named(tmp_path: Path) -> None:
    mcp = {"pages": {**SERVER, "env_from": ["NO_SUCH_KEY"]}}
    with pytest.raises(
        UserError,
        match=r"mcp\.pages\.env_from: the environment .* NO_SUCH_KEY is not set \(log: .*/logs/sandbox_check\.log\)$",
    ):
        check(tmp_path, None, mcp=mcp)


def test_message_of_a_named_run_directory_says_how_to_start_again(tmp_path: Path) -> None:
    config = resolve.resolve("quickstart", overrides=["rollout.tools=[serch]", f"run_dir={tmp_path}"])
    write_tool_config(config.sandbox, run := RunDirectory(tmp_path), [])
    with pytest.raises(UserError, match=r"does not offer 'serch'.* After the fix add --resume, or set another run_dir"):
        check_tools_of_run(config, run)


def test_interpreter_without_verifiers_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "env.toml").write_text('[taskset]\nid = "x"\n')
    params = f"{{config: {tmp_path / 'env.toml'}, python: {sys.executable}}}"
    overrides = ["rollout.environment=verifiers", f"rollout.environment_params={params}", "reward.kind=environment"]
    config = resolve.resolve("quickstart", overrides=overrides)
    with pytest.raises(
        UserError, match=r"cannot import verifiers 0\.4 or later \(No module named .*pip install"
    ) as caught:
        check_tools(config, RunDirectory(tmp_path))
    assert "\n" not in str(caught.value)


FOUND = {
    "dense": {"result": [[{"document": {"title": "Solaris", "contents": "by Lem"}, "score": 1.0}]]},
    "serper": {"organic": [{"title": "Solaris", "link": "https://x/", "snippet": "by Lem"}]},
    "brave": {"web": {"results": [{"title": "Solaris", "url": "https://x/", "description": "by Lem"}]}},
}
"""Answers in the forms of a dense retriever and of two paid providers."""


@pytest.mark.parametrize("engine", FOUND)
def test_job_searches_with_each_engine_and_resumed_within_its_cap(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers.get("X-API-KEY") or request.headers.get("X-Subscription-Token"))
        return web.json_response(FOUND[engine])

    app = web.Application()
    app.router.add_route("*", "/search", answer)
    with serving(app) as port:
        url = f"http://127.0.0.1:{port}/search"
        paid = {"provider": engine, "url": url, "key_variable": "SEARCH_KEY", "max_requests": 2}
        search = {"engine": "dense", "dense": {"url": url}} if engine == "dense" else {"engine": "web", "web": paid}
        (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"search": search}))
        overrides = [f"sandbox.file={tmp_path / 'tools.yaml'}", "rollout.tools=[search]"]
        config = resolve.resolve("quickstart", overrides=overrides)
        if engine == "serper":
            with pytest.raises(UserError, match=r"search\.web\.key_variable: .* SEARCH_KEY is not set$"):
                check_tools_of(config)  # what --dry-run does
        monkeypatch.setenv("SEARCH_KEY", "the key")
        assert check_tools_of(config) == []
        (run := RunDirectory(tmp_path / "run")).path.mkdir()
        texts = []
        for queries in ("a", "abc") if engine == "serper" else ("a",):  # started, stopped, and resumed
            write_tool_files(config, run, JobData((), (), {"fact": "not searched"}))
            with running(run.sandbox_config) as service, SandboxClient(service.url) as client:
                texts += [client.call("search", {"query": query}).text for query in queries]
    assert texts[0] == {"dense": "Page 1: Solaris: by Lem"}.get(engine, "Page 1: by Lem")
    assert set(asked) == {None if engine == "dense" else "the key"}
    if engine == "serper":
        assert texts[1:3] == texts[:1] * 2 and "search.web.max_requests=2 is reached" in texts[3]
        assert len(asked) == 2, "the answer to a repeated query is kept"


def test_job_uses_services_that_run_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "of both")
    mcp = {"arithmetic": {**SERVER, "tools": ["add"]}}
    with running({"mcp": mcp}) as one, running({}) as other:

        def config(*urls: str, tools: str = "add") -> JobConfig:
            return resolve.resolve(
                "quickstart", overrides=[f"sandbox.urls=[{','.join(urls)}]", f"rollout.tools=[{tools}]"]
            )

        run = RunDirectory(tmp_path)
        assert check_tools(config(one.url), run) == []
        assert "add" in run.tool_definitions.read_text()
        with (
            Supervisor(run.logs) as supervisor,
            services.tool_service(services.Job(config(one.url), run, supervisor)) as (url, token),
            SandboxClient(url, token) as client,
        ):
            assert client.call("python", {"code": "6 * 7"}).text == "42"
        with pytest.raises(UserError, match=rf"sandbox\.urls: {other.url} offers other tools than {one.url}"):
            check_tools(config(one.url, other.url), run)
        with pytest.raises(UserError, match="does not offer 'browse'"):
            check_tools(config(other.url, tools="browse"), run)
        sessions = replace(config(one.url).sandbox, sessions=True)
        assert check_tools(replace(config(one.url), sandbox=sessions), run) == [], "the job calls no python"
        with pytest.raises(UserError, match=rf"sandbox\.sessions, for {one.url}: .* python\.session_dir is not set"):
            check_tools(replace(config(one.url, tools="python"), sandbox=sessions), run)
        with pytest.raises(UserError, match=r"^sandbox\.urls: .*http://127\.0\.0\.1:9 .*: start it$"):
            check_tools(config(one.url, "http://127.0.0.1:9"), run)
        monkeypatch.setenv(TOKEN_VARIABLE, "another")
        with pytest.raises(UserError, match=rf"^sandbox\.urls: .*401: compare {TOKEN_VARIABLE} and the port$"):
            check_tools(config(one.url), run)
        monkeypatch.delenv(TOKEN_VARIABLE)
        with pytest.raises(UserError, match=f"the token of the services is missing: export {TOKEN_VARIABLE}"):
            check_tools(config(one.url), run)
    with pytest.raises(UserError, match=r"sandbox\.file is for services that the job starts"):
        resolve.resolve("quickstart", overrides=["sandbox.urls=[http://n1:1]", "sandbox.file=tools.yaml"])
    with pytest.raises(UserError, match=r"sandbox\.urls: 'n1:8710' does not have the form http://HOST:PORT"):
        resolve.resolve("quickstart", overrides=["sandbox.urls=['n1:8710']"])


def test_doctor_names_tools_that_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('at import')\n")
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"plugins": [{"name": "./broken.py:Tool"}]}))
    config = resolve.resolve("quickstart", overrides=[f"sandbox.file={tmp_path / 'tools.yaml'}"])
    (result,) = run_checks([("tools", lambda: check_job_tools(config))], 100.0, 100.0)
    assert result.level == "failure" and 'broken.py:Tool" cannot be created: RuntimeError: at import' in result.text
    assert "(log:" not in result.text


CHECK = """
import sys
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.launch.tool_check import require_isolation
try:
    print(*require_isolation(resolve.resolve("quickstart", overrides=sys.argv[1:])))
except UserError as error:
    print("refused:", error)
"""


def isolation_notes(before: str, *overrides: str) -> str:
    command = [sys.executable, "-c", before + CHECK, *overrides]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_quickstart_runs_without_namespaces_and_says_so() -> None:
    assert isolation_notes("") == "\n"
    (line,) = isolation_notes(WITHOUT_NAMESPACES).splitlines()
    assert line.startswith(
        "python calls are isolated at level process only: a call can see names, sizes and times of files"
    )
    (line,) = isolation_notes(WITHOUT_NAMESPACES, "sandbox.isolation=contained").splitlines()
    assert line.startswith("refused: sandbox.isolation=contained, but this machine reaches process (network namespace")
    assert "set sandbox.isolation=process" in line
