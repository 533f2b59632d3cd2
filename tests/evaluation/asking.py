"""How the tests of evaluations ask a server, and a model that answers rightly."""

import re
from pathlib import Path
from typing import Any

from arpo_megatron.evaluation.prompts import Tools
from arpo_megatron.evaluation.run import EvalRequest
from tests.evaluation.chat_server import ChatServer

PLAIN = ("evaluation.top_k=0", "evaluation.repetition_penalty=1.0", "engine.retry_for_s=0.1")


def right(messages: list[dict[str, str]]) -> str:
    """Answer an `aime24` question of the fixture: add its two equal numbers."""
    found = re.search(r"What is (\d+) plus", " ".join(message["content"] for message in messages))
    return f"<think>t</think><answer>\\boxed{{{2 * int(found[1])}}}</answer>" if found else "2"


def request(server: ChatServer, files: Path, out: Path, **fields: Any) -> EvalRequest:
    settings = {"suite": "aime24", "tools": Tools.NONE, "data": files, "out": out, "overrides": PLAIN} | fields
    return EvalRequest(target=server.url, **settings)
