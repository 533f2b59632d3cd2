"""The user's file of the tool service is merged with the job's needs, refused with its reason, and kept on a resume."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from arpo_megatron.config import SandboxConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve, tool_file
from arpo_megatron.jobs.inputs import JobData, check_files, write_tool_files
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.jobs.tool_file import read_tool_file, with_tool_file, write_tool_config
from arpo_megatron.plan import GPUS, plan
from arpo_megatron.utils.atomic import atomic_write
from tools_sandbox.config import McpServerConfig, PluginConfig, load_config

CORPUS = [{"path": "corpus.jsonl", "format": "jsonl"}]


def write(path: Path, **values: Any) -> SandboxConfig:
    path.write_text(yaml.safe_dump(values))
    return SandboxConfig(file=path)


def test_file_is_merged_with_the_needs_of_the_job(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    (own := tmp_path / "own").mkdir()
    run.path.mkdir()
    sandbox = write(
        own / "tools.yaml",
        limits={"cpu_s": 7},
        search={"sources": [{"path": "pages.jsonl", "format": "jsonl"}], "snippet_chars": 5},
        plugins=[{"name": "count_words", "options": {"shortest": 2}}],
        mcp={"files": {"command": "./serve", "args": ["-v", "../data", "x/y"]}},
        cache={"sqlite_path": "answers.sqlite"},
    )
    assert write_tool_config(sandbox, run, CORPUS) == []
    config = load_config(run.sandbox_config)
    assert (config.limits.cpu_s, config.python.timeout_s, config.limits.memory_mib) == (7, 10.0, 512)
    assert config.limits.time_s == 120.0, "the limit of python calls cuts no other tool"
    assert [source.path for source in config.search.sources] == [own / "pages.jsonl", run.path / "corpus.jsonl"]
    assert (config.search.snippet_chars, config.search.max_results) == (5, 3)
    assert config.search.index_path == run.path / "search" / "index"
    assert config.plugins == (PluginConfig("count_words", {"shortest": 2}),)
    assert config.mcp == {"files": McpServerConfig(str(own / "serve"), ("-v", str(tmp_path / "data"), "x/y"))}
    assert config.cache.sqlite_path == own / "answers.sqlite"
    assert config.python.session_dir is None
    assert run.sandbox_user_file.read_text() == (own / "tools.yaml").read_text()


@pytest.mark.parametrize("key", ["rollout.tool_timeout_s", "evaluation.tool_timeout_s"])
def test_service_cuts_no_call_that_the_job_allows(tmp_path: Path, key: str) -> None:
    run = RunDirectory(tmp_path)
    write_tool_files(resolve.resolve("quickstart", overrides=[f"{key}=300"]), run, JobData((), ()))
    assert load_config(run.sandbox_config).limits.time_s == 300


def test_config_of_a_changed_file_is_written_although_the_first_attempt_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """The process ends here."""

    run, writes = RunDirectory(tmp_path), list[Path]()

    @contextmanager
    def killed(path: Path) -> Iterator[Path]:
        if writes:
            raise Killed
        writes.append(path)
        with atomic_write(path) as partial:
            yield partial

    sandbox = write(tmp_path / "tools.yaml", workers=1)
    write_tool_config(sandbox, run, CORPUS)
    write(tmp_path / "tools.yaml", workers=2)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(tool_file, "atomic_write", killed)
        write_tool_config(sandbox, run, CORPUS)
    write_tool_config(sandbox, run, CORPUS)
    assert load_config(run.sandbox_config).workers == 2


def test_usual_options_are_no_secrets(tmp_path: Path) -> None:
    options = {"eos_token": "</s>", "stop_token": "x", "sort_key": "date", "primary_key": "id"}
    values = {
        "plugins": [{"name": "x", "options": options}],
        "mcp": {"a": {"command": "x", "args": ["--sort-key", "a"]}},
    }
    read_tool_file(tmp_path / "tools.yaml", write(tmp_path / "tools.yaml", **values))


def test_addresses_and_arguments_without_a_secret_are_accepted(tmp_path: Path) -> None:
    args = [
        "http://h/?tokens=9&q=token#token=no",
        "--tokens=9",
        "--key-file=k",
        "--url=http://host:80/a:b@c",
        "key",
        "--token",
        "--verbose",
        "a=b=c",
    ]
    sandbox = write(tmp_path / "tools.yaml", mcp={"a": {"command": "x", "args": args}})
    read_tool_file(tmp_path / "tools.yaml", sandbox)


def test_paid_search_continues_with_its_cache_and_count(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    engine = {"provider": "searxng", "url": "http://x/search", "max_requests": 100}
    write_tool_config(write(tmp_path / "tools.yaml", search={"engine": "web", "web": engine}), run, CORPUS)
    config = load_config(run.sandbox_config)
    assert config.search.sources == ()  # the web is searched instead of the corpus
    assert config.search.web is not None
    assert config.search.web.count_path == run.path / "paid_requests"
    assert config.cache.sqlite_path == run.path / "tool_answers.sqlite"


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (
            {"search": {"engine": "web", "web": {"provider": "searxng", "url": "http://x", "max_requests": 9}}},
            "search.web.max_requests",
        ),
        ({"cache": {"sqlite_path": "answers.sqlite"}}, "cache.sqlite_path"),
    ],
)
def test_services_on_several_nodes_share_no_count_and_no_file(tmp_path: Path, values: dict[str, Any], key: str) -> None:
    sandbox = replace(write(tmp_path / "tools.yaml", **values), replicas=2)
    with pytest.raises(UserError, match=f"sets {key}.*set sandbox.replicas=1"):
        write_tool_config(sandbox, RunDirectory(tmp_path), CORPUS)
    browse = replace(write(tmp_path / "tools.yaml", browse={"enabled": True}), replicas=2)
    write_tool_config(browse, RunDirectory(tmp_path), CORPUS)
    assert load_config(RunDirectory(tmp_path).sandbox_config).cache.sqlite_path is None


def test_config_is_written_again_only_for_a_changed_file(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    sandbox = write(tmp_path / "tools.yaml", workers=1)
    write_tool_config(sandbox, run, CORPUS)
    run.sandbox_config.write_text("workers: 7  # edited")
    assert write_tool_config(sandbox, run, CORPUS) == []
    assert load_config(run.sandbox_config).workers == 7
    write(tmp_path / "tools.yaml", workers=2)
    (note,) = write_tool_config(sandbox, run, CORPUS)
    assert "tools.yaml has changed" in note
    assert load_config(run.sandbox_config).workers == 2


def test_copy_of_a_run_is_used_when_the_file_is_gone(tmp_path: Path) -> None:
    run, evaluated = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "eval")
    for path in (own := tmp_path / "own", run.path, evaluated.path):
        path.mkdir()
    sandbox = write(own / "tools.yaml", plugins=[{"name": "./tool.py:Convert"}])
    write_tool_config(sandbox, run, CORPUS)
    before = run.sandbox_config.read_text()
    (own / "tools.yaml").unlink()
    (note,) = write_tool_config(sandbox, run, CORPUS)
    assert note == f"sandbox.file={own / 'tools.yaml'} is gone: its copy {run.sandbox_user_file} is used"
    assert run.sandbox_config.read_text() == before
    write_tool_config(sandbox, evaluated, CORPUS, run)
    assert load_config(evaluated.sandbox_config).plugins == (PluginConfig(str(own / "tool.py:Convert")),)
    config = resolve.resolve("quickstart", overrides=[f"sandbox.file={own / 'tools.yaml'}"])
    check_files(config, run)
    plan(with_tool_file(config, run), GPUS["h100-80"])
    with pytest.raises(UserError, match="No such file"):
        check_files(config)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"python": {"timeout_s": 60}}, ["python.timeout_s to 60", "sandbox.python_timeout_s is 10.0"]),
        ({"python": {"preload": ["numpy"]}}, ["python.preload", "sandbox.preload is []"]),
        ({"python": {"session_dir": "states"}}, ["python.session_dir", "sandbox.sessions=true"]),
        ({"pluggins": []}, ["unknown key 'pluggins'", "'plugins'"]),
        ({"search": {"web": {"provider": "serper", "key": "s3cret"}}}, ["search.web.key", "WEB_API_KEY"]),
        ({"search": {"web": {"provider": "serper", "key_variable": "s3cret"}}}, ["search.web.key_variable"]),
        ({"browse": {"summary": {"api_key": "s3cret"}}}, ["browse.summary.key_variable: SUMMARY_API_KEY"]),
        ({"plugins": [{"name": "x", "options": {"token": "s3cret"}}]}, ["plugins.0.options.token", "variable TOKEN"]),
        (
            {"mcp": {"a": {"command": "x", "env": {"GITHUB_TOKEN": "s3cret"}}}},
            ["env.GITHUB_TOKEN", "mcp.a.env_from"],
        ),
        ({"mcp": {"a": {"command": "x", "args": ["-v", "--token=s3cret"]}}}, ["mcp.a.args.1", "mcp.a.env_from"]),
        ({"mcp": {"a": {"command": "x", "args": ["--api-key", "s3cret"]}}}, ["mcp.a.args.1", "mcp.a.env_from"]),
        ({"mcp": {"a": {"command": "x", "args": ["--db=pg://me:s3cret@host/x"]}}}, ["mcp.a.args.0", "mcp.a.env_from"]),
        (
            {"search": {"web": {"provider": "searxng", "url": "https://h/search?q=a&apikey=s3cret"}}},
            ["search.web.url", "write search.web.key_variable: WEB_API_KEY"],
        ),
        (
            {"browse": {"summary": {"url": "http://h/v1?api_key=s3cret"}}},
            ["browse.summary.key_variable: SUMMARY_API_KEY"],
        ),
        ({"search": {"dense": {"url": "http://h/?token=s3cret"}}}, ["search.dense.url", "read a key from the env"]),
        ({"mcp": {"a": {"command": "x", "args": ["--at=http://h/?a=b&token=s3cret"]}}}, ["mcp.a.env_from"]),
        ({"browse": {"base_url": "https://me:s3cret@mirror/wiki/"}}, ["browse.base_url", "without the password"]),
    ],
)
def test_unusable_file_is_refused_in_one_line(tmp_path: Path, values: dict[str, Any], parts: list[str]) -> None:
    sandbox = write(tmp_path / "tools.yaml", **values)
    with pytest.raises(UserError) as caught:
        read_tool_file(tmp_path / "tools.yaml", sandbox)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for part in ["sandbox.file=", "tools.yaml", *parts]:
        assert part in message
    assert "s3cret" not in message


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"a: [", b"- a"], ids=["missing", "bytes", "syntax", "list"])
def test_unreadable_file_is_refused_in_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tools.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"^sandbox\.file=.*tools\.yaml: ") as caught:
        read_tool_file(path, SandboxConfig(file=path))
    assert len(str(caught.value).splitlines()) == 1
