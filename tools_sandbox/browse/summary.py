"""Client of a model that summarises pages."""

from __future__ import annotations

import os

import aiohttp

from tools_sandbox.config import ConfigError, SummaryConfig
from tools_sandbox.utils.http_retry import RequestFailed, request_json


class Summary:
    """Client of the model. `section`: the section of the configuration, for messages."""

    def __init__(self, config: SummaryConfig, section: str) -> None:
        """Raises ConfigError for a key that is not set."""
        self._config = config
        self._headers: dict[str, str] = {}
        if config.key_variable is not None:
            key = os.environ.get(config.key_variable)
            if not key:
                raise ConfigError(f"{section}.key_variable: the environment variable {config.key_variable} is not set")
            self._headers = {"Authorization": f"Bearer {key}"}

    async def answer(self, question: str) -> str:
        """Return the model's answer. Raises RequestFailed."""
        config = self._config
        body = {
            "model": config.model,
            "max_tokens": config.max_tokens,
            "messages": [{"role": "user", "content": question}],
        }
        url = f"{config.url.rstrip('/')}/chat/completions"
        async with aiohttp.ClientSession(headers=self._headers) as session:
            answer = await request_json(session, "POST", url, timeout_s=config.timeout_s, retries=1, json=body)
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise RequestFailed(f"{url} answered in another format") from error
        if not isinstance(text, str) or not text.strip():  # a reasoning model may spend `max_tokens` on its thoughts
            raise RequestFailed(f"{url} answered without text")
        return text
