"""Agents on a real SGLang engine, started once: trees in tokens, and OpenAI's format as text."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from arpo_megatron.bench.tool_calling_model import write_model
from arpo_megatron.config import JobConfig
from arpo_megatron.evaluation.agents.base import Agent, PendingQuestion
from arpo_megatron.evaluation.agents.engine import EngineAgent
from arpo_megatron.evaluation.agents.server import ServerAgent, served_model
from arpo_megatron.evaluation.benchmarks import BENCHMARKS
from arpo_megatron.evaluation.prompting import prompt_benchmarks
from arpo_megatron.evaluation.prompts import Tools
from arpo_megatron.evaluation.questions import find, read
from arpo_megatron.evaluation.response import AgentResponse, Decode
from arpo_megatron.evaluation.target import EvalTarget, TargetKind, eval_config
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.inputs import write_tool_files
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.services import Job, running_services
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.rollout.endpoints import ServiceEndpoints, connect_rollouts
from arpo_megatron.rollout.handle import RolloutHandle

WORDS = [
    *("platform=cpu", "engine.max_total_tokens=65536", "engine.memory_fraction=0.1", "engine.max_running_requests=16"),
    *("rollout.max_response_tokens=200", "sandbox.preload=[]", "rollout.max_tool_calls=2"),
]
CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@dataclass(frozen=True)
class Stage:
    config: JobConfig
    ready: ServiceEndpoints
    rollouts: RolloutHandle
    pending: list[PendingQuestion]
    decode: Decode
    supervisor: Supervisor

    def engine_agent(self, *overrides: str, attempts: int = 1) -> Agent:
        config = resolve.with_overrides(self.config, overrides)
        return EngineAgent(self.rollouts, config, attempts, self.decode, self.supervisor.check)


@pytest.fixture(scope="module")
def stage(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Start the services of an evaluation with a random model that calls tools by chance."""
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("stage")
    model = directory / "model"
    write_model(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(model)
    target, benchmark = EvalTarget(TargetKind.MODEL, "tool-calling", model=model), BENCHMARKS["aime24"]
    config = eval_config(target, [benchmark], Tools.TRAINED, WORDS)
    assert (config.model.dtype, config.evaluation.top_k) == ("float32", 20)
    path = find(benchmark, files)
    assert path is not None
    prompted = prompt_benchmarks([read(benchmark, path)], target, config, Tools.TRAINED, "", None, None)
    assert prompted.decode is not None
    run = RunDirectory(directory)
    write_tool_files(config, run, prompted.data)
    with Supervisor(run.logs) as supervisor, running_services(Job(config, run, supervisor), model) as ready:
        rollouts = connect_rollouts(config, model, ready)
        pending = [PendingQuestion(question, task, (0,)) for question, task in prompted.tasks]
        yield Stage(config, ready, rollouts, pending, prompted.decode, supervisor)
        rollouts.close()


def responses(agent: Agent, pending: list[PendingQuestion]) -> dict[tuple[str, int], AgentResponse]:
    """Return the delivered responses, without their wall time."""
    found = {}

    def deliver(each, delivered):
        for number, response in delivered.items():
            assert isinstance(response, AgentResponse), response
            found[each.question.id, number] = replace(response, seconds=0.0)

    agent.answer(pending, deliver)
    return found


def test_greedy_answers_are_deterministic(stage: Stage) -> None:
    first = responses(stage.engine_agent("evaluation.temperature=0"), stage.pending)
    assert len(first) == len(stage.pending)
    assert responses(stage.engine_agent("evaluation.temperature=0"), stage.pending[::-1]) == first


def test_sampled_attempts_differ_and_call_real_tools(stage: Stage) -> None:
    found = responses(stage.engine_agent(attempts=3), stage.pending)
    assert len(found) == 3 * len(stage.pending)
    assert len({response.model_text for response in found.values()}) == len(found)
    called = [response for response in found.values() if response.tool_calls]
    assert called
    for response in called:
        assert "</python> <result>\n" in response.text and "<result>" not in response.model_text
        assert response.tool_errors == 0 and response.tool_tokens > 0
    assert all(0 < response.model_tokens + response.tool_tokens <= 200 for response in found.values())


def test_server_agent_calls_tools_through_openai_s_format(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", stage.ready.engine_token or "")
    url = stage.ready.engine_urls[0]
    name = served_model(url, stage.config)
    agent = ServerAgent(url, name, stage.config, Tools.TRAINED, stage.ready.sandbox_url, stage.ready.sandbox_token)
    found = responses(agent, stage.pending)
    called = [response for response in found.values() if response.tool_calls]
    assert called
    firsts = [response.text.partition(" <result>\n")[0] for response in called]
    assert any(len(response.model_text) > len(first) for response, first in zip(called, firsts, strict=True))
    for response in called:
        before, _, after = response.text.partition(" <result>\n")
        assert before.endswith("</python>") and after.partition("\n</result>")[0].strip().isdecimal()
        assert response.tool_tokens > 0
