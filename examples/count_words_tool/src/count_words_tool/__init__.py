"""An example of a custom tool: one class, offered by an entry point (see this package's pyproject.toml).

It imports only the interface of a tool, `tools_sandbox.tool` and `.answers`, and pydantic.
"""

from pydantic import BaseModel, ConfigDict, Field

from tools_sandbox.answers import ToolResult
from tools_sandbox.tool import Tool, in_thread


class CountArguments(BaseModel):
    """Arguments of the tool. Their JSON schema, which the model sees, is generated from this class."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field(description="Text to count the words of.")


class CountWords(Tool):
    """A tool that counts words.

    shortest: option of the service's configuration; words with fewer characters do not count.
    """

    name = "count_words"
    description = "Count the words of a text."
    arguments = CountArguments
    # Equal arguments give equal answers; the fingerprint covers the options.
    cacheable = True

    def __init__(self, shortest: int = 1) -> None:
        self._shortest = shortest
        self.fingerprint = f"shortest={shortest}"

    async def run(self, arguments: CountArguments, timeout_s: float) -> ToolResult:
        """Return the number of words, as text."""
        # In a thread: counting a long text would delay the other calls of this worker.
        return ToolResult("ok", str(await in_thread(self._count, arguments.text)))

    def _count(self, text: str) -> int:
        return sum(len(word) >= self._shortest for word in text.split())
