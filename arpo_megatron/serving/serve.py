"""`arpo serve`: the services of an agent, and its interface in front of them."""

import asyncio
import secrets
import shlex
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import uvicorn

from arpo_megatron.config import JobConfig
from arpo_megatron.engine.function_calls import CallParser
from arpo_megatron.engine.request import Sampling
from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.prompts import Tools
from arpo_megatron.evaluation.target import EvalTarget, eval_config, is_url, model_target
from arpo_megatron.hardware.placement import gpu_count
from arpo_megatron.jobs.inputs import JobData, load_tokenizer, write_tool_files
from arpo_megatron.jobs.prompts import job_system_prompt
from arpo_megatron.jobs.run_directory import SYSTEM_PROMPT, RunDirectory
from arpo_megatron.launch.job import hold_run
from arpo_megatron.launch.services import Job, running_services
from arpo_megatron.rollout.endpoints import ServiceEndpoints
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.serving import TOKEN_VARIABLE
from arpo_megatron.serving.agent import ServedAgent
from arpo_megatron.serving.app import Served, application
from arpo_megatron.tasks.protocols.base import CallProtocol
from arpo_megatron.tasks.protocols.build import make_protocol
from arpo_megatron.tasks.protocols.tools import tool_names
from arpo_megatron.utils.atomic import read_json
from arpo_megatron.utils.signals import interrupts_call
from arpo_megatron.utils.web_server import CommandServer
from tools_sandbox.utils.logs import limit_uvicorn

_POLL_S = 0.5
_END_S = 20
"""Seconds that answers in progress have when the server ends."""


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """Arguments and options of `arpo serve`."""

    target: str
    overrides: Sequence[str]
    plain: bool
    token: str | None
    concurrency: int
    model: str | None = None
    """Export of a run to serve; None: its newest."""


def plan(
    target: str, overrides: Sequence[str], model: str | None = None, *, or_url: bool = False
) -> tuple[EvalTarget, JobConfig]:
    """Return the model to serve and its config.

    Args:
        target: run directory or Hugging Face directory.
        overrides: `section.key=value` of the user.
        model: export of a run; None: its newest.
        or_url: whether the command also takes the URL of a served agent, which its errors then name.

    Raises:
        UserError: there is no model.
    """
    if is_url(target):
        raise UserError(f"{target} cannot be served: name a run directory or a Hugging Face directory")
    found = model_target(target, model, ", nor a URL" if or_url else "")
    return found, eval_config(found, [], Tools.TRAINED, list(overrides))


def describe(target: EvalTarget, config: JobConfig, *, plain: bool) -> list[str]:
    """Return what would be served, one fact a line."""
    engine, tools = config.engine, ", ".join(tool_names(config.rollout.tools))
    return [
        f"model {target.model}, {config.model.dtype}, at most {config.model.max_length} tokens",
        f"{engine.replicas} engine(s) of {engine.tensor} rank(s)",
        "no tools: requests go to the engine" if plain else f"tools {tools}, protocol {config.rollout.protocol}",
    ]


def plain_commands(target: EvalTarget, config: JobConfig) -> list[str]:
    """Return the commands that serve the model without the agent's tools, with SGLang and with vLLM."""
    model, most = shlex.quote(str(target.model)), config.model.max_length
    return [
        f"python -m sglang.launch_server --model-path {model} --context-length {most} --dtype {config.model.dtype}",
        f"vllm serve {model} --max-model-len {most} --dtype {config.model.dtype}",
    ]


@contextmanager
def agent_services(target: EvalTarget, config: JobConfig) -> Iterator[tuple[Job, ServiceEndpoints]]:
    """Start the engines and the tool service of an agent. A run's own directory holds logs and health.

    Raises:
        UserError: a job holds the run.
        ProcessDiedError: a service did not start.
    """
    assert target.model is not None
    with tempfile.TemporaryDirectory(prefix="arpo-serve-") as folder:
        run = target.run or RunDirectory(Path(folder))
        with hold_run(config, run) as job:
            if not run.sandbox_config.exists():
                for note in write_tool_files(config, run, JobData((), ())):
                    job.progress.note(note)
            job.progress.phase("start engine and tools")
            with running_services(job, target.model, rollouts=False) as ready:
                job.progress.end_display()
                yield job, ready


def serve(request: ServeRequest, bind: Callable[[], tuple[socket.socket, str]]) -> None:
    """Serve an agent until a signal. Answers in progress have `_END_S` seconds, then engine and tool service end.

    Args:
        request: what to serve.
        bind: returns a listening socket and its address. Also called, and the socket closed, before the services start:
            an address that cannot be used is known at once.

    Raises:
        UserError, ProcessDiedError: see `agent_services`; also if a service fails for good.
    """
    target, config = plan(request.target, request.overrides, request.model)
    bind()[0].close()
    with agent_services(target, config) as (job, ready):
        server = _Server(request, target, config, ready)
        with interrupts_call(server.end):
            listening, address = bind()
            print(f"{address}/v1", flush=True)
            token = [] if request.token is None else [f"{TOKEN_VARIABLE}=TOKEN"]
            job.progress.next_command(*token, "arpo", "chat", f"{address}/v1")
            asyncio.run(server.run(listening, job.check))
    print("ended by a signal, with the engine and the tool service", file=sys.stderr)


@contextmanager
def serving(
    target: str, overrides: Sequence[str], listening: socket.socket, *, concurrency: int = 1
) -> Iterator[tuple[str, str]]:
    """Serve an agent from a thread inside the block; yield address and token.

    Raises as `serve` does; a service that fails for good is reported at once, and raised after the block.
    """
    found, config = plan(target, overrides, or_url=True)
    request = ServeRequest(target, overrides, plain=False, token=secrets.token_urlsafe(24), concurrency=concurrency)
    failed: list[Exception] = []
    with listening, agent_services(found, config) as (job, ready):
        server = _Server(request, found, config, ready)

        def run() -> None:
            try:
                asyncio.run(server.run(listening, job.check))
            except Exception as error:  # of any service; raised below
                failed.append(error)
                listening.close()  # or the next question would wait for an answer
                job.progress.note(f"the agent is no longer served: {str(error).splitlines()[0]}")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        host, port = listening.getsockname()[:2]
        try:
            yield f"http://{host}:{port}/v1", request.token or ""
        finally:
            server.stop()
            thread.join(_END_S)
        if failed:
            raise failed[0]


class _Server:
    """The web server of an agent. It ends in order: answers in progress have `_END_S` seconds."""

    def __init__(self, request: ServeRequest, target: EvalTarget, config: JobConfig, ready: ServiceEndpoints) -> None:
        self._request, self._target, self._config, self._ready = request, target, config, ready
        self._server: CommandServer | None = None
        self._stopped = False

    def stop(self) -> None:
        """End the server from any thread, also before it has started."""
        self._stopped = True
        if self._server is not None:
            self._server.should_exit = True

    def end(self) -> None:
        """End the server for a signal; the second one cuts answers in progress short."""
        self._stopped = True
        if self._server is not None:
            self._server.end()

    async def run(self, listening: socket.socket, check: Callable[[], None]) -> None:
        """Serve until `stop`, a signal, or until `check` raises; that error is raised here."""
        request, target, config = self._request, self._target, self._config
        async with open_agent(target, config, self._ready) as agent:
            served = Served(
                agent,
                target.name,
                default_sampling(config),
                request.token,
                request.concurrency,
                plain=request.plain,
                system=system_prompt(target, config),
                weights=weights(target),
                seeds=config.engine.deterministic and gpu_count(config.platform) > 0,
            )
            settings = uvicorn.Config(
                application(served),
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=_END_S,
            )
            limit_uvicorn()
            self._server = CommandServer(settings)
            self._server.should_exit = self._stopped
            watching = asyncio.create_task(self._watch(check))
            await self._server.serve(sockets=[listening])
            if watching.done():
                watching.result()  # raises the error that ended the server
            watching.cancel()

    async def _watch(self, check: Callable[[], None]) -> None:
        try:
            while True:
                check()
                await asyncio.sleep(_POLL_S)
        finally:
            self.stop()


@asynccontextmanager
async def open_agent(target: EvalTarget, config: JobConfig, ready: ServiceEndpoints) -> AsyncIterator[ServedAgent]:
    """Yield the agent of running services."""
    assert target.model is not None
    retry_for_s = config.engine.retry_for_s
    timeout = aiohttp.ClientTimeout(total=config.engine.request_timeout_s)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
        ToolClient(ready.sandbox_url, ready.sandbox_token, retry_for_s=retry_for_s) as tools,
        CallParser(*ready.engine_urls, token=ready.engine_token, retry_for_s=retry_for_s) as parse,
    ):
        limits = RolloutLimits.evaluation(config)
        rollout = config.rollout
        protocol = make_protocol(
            rollout.protocol,
            await tools.select(rollout.tools),
            parser=rollout.tool_call_parser,
            model=target.model,
            parse=parse,
        )
        yield ServedAgent(
            session=session,
            engine_url=ready.router_url or ready.engine_urls[0],
            engine_token=ready.engine_token,
            tools=tools,
            limits=replace(limits, protocol=protocol),
            codec=TokenizerCodec(target.model),
            prompt=prompt_of(target.model, protocol),
            training_limits=replace(RolloutLimits.training(config), protocol=protocol),
            vocabulary=vocabulary_of(target.model),
        )


def vocabulary_of(model: Path) -> int | None:
    """Return the number of token ids that an engine of the model accepts: its embeddings; None if they are unknown."""
    config = read_json(model / "config.json", "name a Hugging Face model")
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    return size if isinstance(size, int) else None


def prompt_of(model: Path, protocol: CallProtocol) -> Callable[[Sequence[dict[str, str]]], str]:
    """Return the function that makes a prompt of a conversation: the model's chat template, ChatML without one."""
    tokenizer = load_tokenizer(model)
    return lambda messages: protocol.prompt([{"role": m["role"], "content": m["content"]} for m in messages], tokenizer)


def default_sampling(config: JobConfig) -> Sampling:
    """Return the sampling of requests that name none: that of evaluations."""
    own = config.evaluation
    return Sampling(own.temperature, own.top_p, None, own.top_k, own.penalty)


def weights(target: EvalTarget) -> str:
    """Return the directory of the weights, and for a run's export its step."""
    run = target.run
    if run is None or target.model != run.export or not run.result.is_file():
        return str(target.model)
    return f"{target.model}, step {read_json(run.result, 'run the job again').get('step')}"


def system_prompt(target: EvalTarget, config: JobConfig) -> str | None:
    """Return the system prompt for conversations without one: the export's, else that of the run's data."""
    assert target.model is not None
    stored = target.model / SYSTEM_PROMPT
    if stored.is_file():
        return stored.read_text(encoding="utf-8").strip() or None
    return None if target.run is None else job_system_prompt(config, target.run)
