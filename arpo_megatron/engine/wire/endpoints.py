"""Paths and headers that this project adds to SGLang's HTTP server, and names of its memory, for server and clients."""

ENGINE_TOKEN_VARIABLE = "ARPO_ENGINE_TOKEN"  # noqa: S105  (the name, not a token)
"""Environment variable of engines, router and trainer that holds the bearer token of requests to engines."""

AWAIT_PUSH_VARIABLE = "ARPO_AWAIT_PUSH"
"""Environment variable of engines. Any value: the engine starts without weights and refuses to generate until a push.
"""

KEEP_KV_VARIABLE = "ARPO_KEEP_KV"
"""Environment variable of engines. Any value: a push leaves the KV cache as it is (`rollout.across_push=keep_kv`).
Requests then name the part of the cache that they use (`extra_key`)."""

LAUNCHER_PID_VARIABLE = "ARPO_ENGINE_LAUNCHER_PID"
"""Environment variable with a process id: when that process dies, the engine kills its own process group."""

HEALTH_PATH = "/health/arpo"
"""Health probe that generates nothing. SGLang lets paths below /health pass without a token."""

BEGIN_PUSH_PATH = "/arpo/begin_push"
COMMIT_PUSH_PATH = "/arpo/commit_push"
PUSH_HEADER = "X-Arpo-Push"
"""Header of the requests of a push: an id that its trainer draws. An engine takes weights and commits only from the
push that has begun last, also if two trainers push the same version."""

WEIGHTS = "weights"
"""SGLang's name of the part of an engine's memory that holds its weights."""
KV_CACHE = ("kv_cache", "cuda_graph")
"""SGLang's names of the parts that are needed only to generate."""


INCARNATION_HEADER = "X-Arpo-Incarnation"
"""Header of every answer of an engine. Its value changes with each start of the server, which empties its caches."""


def bearer(token: str | None) -> dict[str, str]:
    """Return the headers of a request to a server with this token; no headers for None."""
    return {"Authorization": f"Bearer {token}"} if token else {}
