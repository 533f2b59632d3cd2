"""A trained agent for others: an OpenAI-compatible server with the tool loop inside, and a conversation in a terminal.

May import `evaluation` and the layers below it, and of `tools_sandbox` the client.
"""

TOKEN_VARIABLE = "ARPO_SERVE_TOKEN"  # noqa: S105
"""Environment variable with the token of a served agent."""
WRONG_TOKEN = f"the token is missing or wrong: set {TOKEN_VARIABLE} to that of `arpo serve`"
"""Message of a request that the agent's token does not allow."""
