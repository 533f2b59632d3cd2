"""A tool of your own: one class, offered by an entry point (see pyproject.toml beside)."""

from pydantic import BaseModel, ConfigDict, Field

from tools_sandbox.answers import ToolResult
from tools_sandbox.tool import Tool, in_thread


class CountArguments(BaseModel):
    """What the model may say; the JSON schema is made from it."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field(description="The text whose words are counted.")


class CountWords(Tool):
    """Counts words.

    shortest: words of fewer characters do not count; an option of the service's configuration.
    """

    name = "count_words"
    description = "Count the words of a text."
    arguments = CountArguments
    # Equal arguments give equal answers, as long as the options are the same.
    cacheable = True

    def __init__(self, shortest: int = 1) -> None:
        self._shortest = shortest
        self.fingerprint = f"shortest={shortest}"

    async def run(self, arguments: CountArguments, timeout_s: float) -> ToolResult:
        """The number of words, as text."""
        # A thread, since counting a long text would hold up the other calls of this worker.
        return ToolResult("ok", str(await in_thread(self._count, arguments.text)))

    def _count(self, text: str) -> int:
        return sum(len(word) >= self._shortest for word in text.split())
