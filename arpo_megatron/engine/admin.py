"""HTTP requests to SGLang servers about their weights: the control half of a push.

`gate.py`, `checksums.py` and `receive.py` in `engine/server` add what SGLang itself does not have.
"""

import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import requests
from numpy.typing import NDArray

from arpo_megatron.engine.wire.boxes import LAYOUT_ACTION, EngineShard, TensorType, boxes_from_json
from arpo_megatron.engine.wire.checksums import CHECKSUM_ACTION, PIECES_ACTION, RECEIVED_ACTION, ChecksummedPart
from arpo_megatron.engine.wire.endpoints import BEGIN_PUSH_PATH, COMMIT_PUSH_PATH, PUSH_HEADER, bearer
from arpo_megatron.errors import UserError

_POLL_INTERVAL_S = 0.2
_PROBE_TIMEOUT_S = 5.0
_ENGINE_DEADLINE_SHARE = 0.8


class WeightPushError(UserError):
    """A push failed.

    The engines that it reached refuse to generate until a whole push has arrived. If the weights arrived and were then
    found to be wrong, the trainer sends no requests until the next push.
    """


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """A server that is ready for a push."""

    url: str
    """http://host:port."""
    ranks: int
    """Number of its tensor-parallel processes."""
    incarnation: str
    """Changes with each start of the server."""


class EngineAdmin:
    """Sends requests to all engines in parallel.

    Args:
        urls: http://host:port of each engine.
        timeout_s: deadline of a request.
        token: bearer token of the engines; None if they need none.
    """

    def __init__(self, urls: Sequence[str], timeout_s: float, token: str | None = None) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.timeout_s = timeout_s
        self._headers = bearer(token)  # and the id of the last push that has begun
        # An engine gets one request at a time, but requests of a failed push may still wait for their deadlines.
        self._pool = ThreadPoolExecutor(3 * len(self.urls), thread_name_prefix="weight-push")

    @property
    def engine_deadline_s(self) -> float:
        """Seconds that an engine may wait within a request: less than `timeout_s`, so that it gives up first and
        reports why."""
        return _ENGINE_DEADLINE_SHARE * self.timeout_s

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait until every server answers: a killed one may be restarting. Raises WeightPushError."""
        give_up = time.monotonic() + timeout_s
        for url in self.urls:
            while not self._answers(url):
                if time.monotonic() > give_up:
                    raise WeightPushError(f"{url} has not answered for {timeout_s:g} s")
                time.sleep(_POLL_INTERVAL_S)

    def close(self) -> None:
        """Drop queued requests, and do not wait for running ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def begin_push(self, version: int) -> tuple[EngineEndpoint, ...]:
        """Close every engine's gate to generations, and return when none is running.

        Args:
            version: version of the weights that will arrive.

        Returns:
            The engines, in the order of `urls`.

        Raises:
            WeightPushError: an engine does not answer, has lent its memory, or still generates at the deadline.
        """
        self._headers[PUSH_HEADER] = secrets.token_hex(8)
        body = {"version": version, "timeout_s": self.engine_deadline_s}
        posts = self.post_all(BEGIN_PUSH_PATH, [(url, body) for url in self.urls])
        answers = [post.result() for post in posts]
        return tuple(EngineEndpoint(url, **answer) for url, answer in zip(self.urls, answers, strict=True))

    def commit_push(self, version: int, loads: int) -> None:
        """Have the engines empty their caches, set the version and open their gates.

        Args:
            version: the version given to `begin_push`.
            loads: number of requests with weights that each engine has answered. An engine that counted another number
                keeps its gate closed.

        Raises:
            WeightPushError: an engine does not answer or refuses.
        """
        body = {"version": version, "loads": loads, "timeout_s": self.engine_deadline_s}
        for post in self.post_all(COMMIT_PUSH_PATH, [(url, body) for url in self.urls]):
            post.result()

    def release_memory(self) -> None:
        """Free the device memory of weights and KV pool. The engines must be idle. Raises WeightPushError."""
        for post in self.post_all("release_memory_occupation", [(url, {}) for url in self.urls]):
            post.result()

    def resume_memory(self, *tags: str) -> None:
        """Allocate the memory again; its content is undefined until a push. Raises WeightPushError.

        Args:
            tags: parts of the memory, such as `WEIGHTS`.
        """
        for post in self.post_all("resume_memory_occupation", [(url, {"tags": tags}) for url in self.urls]):
            post.result()

    def start_logprobs(self, token_ids: Sequence[int]) -> Callable[[], list[NDArray[np.float32]]]:
        """Ask every engine for the log-probs of n tokens, with its current weights and without its radix cache.

        Returns:
            A function that waits for the answers, or raises WeightPushError. For each engine it returns float32[n - 1]:
            the log-probs in nats, at temperature 1, of tokens 1 to n - 1 given the tokens before them.
        """
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        posts = self.post_all("generate", [(url, body) for url in self.urls])

        def wait() -> list[NDArray[np.float32]]:
            answers = [post.result()["meta_info"]["input_token_logprobs"] for post in posts]
            return [np.array([token[0] for token in tokens[1:]], np.float32) for tokens in answers]

        return wait

    def start_checksums(self, types: Mapping[str, TensorType]) -> Callable[[], list[dict[str, list[ChecksummedPart]]]]:
        """Ask every engine for the pieces of the tensors that its ranks hold, with their checksums.

        Args:
            types: the tensors by Hugging Face name.

        Returns:
            A function that waits for the answers, or raises WeightPushError if an engine does not answer or a rank
            refuses. Engines with the same layout and weights share one object, which only one of them has sent: a
            mixture has 10^5 pieces.
        """
        action = CHECKSUM_ACTION + json.dumps({name: kind.as_json() for name, kind in types.items()})
        wait_for_digests = self._start_check(dict.fromkeys(self.urls, action))

        def wait() -> list[dict[str, list[ChecksummedPart]]]:
            digests = [tuple(rank["answer"] for rank in engine) for engine in wait_for_digests()]
            first: dict[tuple[str, ...], str] = {}
            for url, digest in zip(self.urls, digests, strict=True):
                first.setdefault(digest, url)
            answers = self._ask_ranks(dict.fromkeys(first.values(), PIECES_ACTION))
            found = {
                digest: {
                    name: [ChecksummedPart.from_json(part) for rank in engine for part in rank[name]] for name in types
                }
                for digest, engine in zip(first, answers, strict=True)
            }
            return [found[digest] for digest in digests]

        return wait

    def engine_shards(
        self, types: Mapping[str, TensorType], together: Sequence[Sequence[str]]
    ) -> list[list[EngineShard]]:
        """Return, for each engine, what each of its ranks holds.

        Args:
            types: the tensors of the model.
            together: names of the tensors that form one parameter.

        Raises:
            WeightPushError: an engine does not answer, or a rank refuses.
        """
        request = {"types": {name: kind.as_json() for name, kind in types.items()}, "together": together}
        answers = self._ask_ranks(dict.fromkeys(self.urls, LAYOUT_ACTION + json.dumps(request)))
        boxes = cache(boxes_from_json)
        return [[EngineShard(rank["device"], rank["host"], boxes(rank["boxes"])) for rank in each] for each in answers]

    def send_to_ranks(self, action: str, engines: Sequence[Sequence[object]]) -> None:
        """Do an action in every rank of every engine; each gets its own value. Raises WeightPushError: one refuses."""
        self._ask_ranks({url: action + json.dumps(ranks) for url, ranks in zip(self.urls, engines, strict=True)})

    def received(self) -> list[dict[str, int]]:
        """Return figures of the last exchange in bytes, for each rank of each engine: `received`, `held` and
        `largest_buffer`."""
        return [rank for engine in self._ask_ranks(dict.fromkeys(self.urls, RECEIVED_ACTION)) for rank in engine]

    def post_all(self, endpoint: str, bodies: Sequence[tuple[str, Mapping[str, Any]]]) -> list["Future[Any]"]:
        """POST each body to its server; a future holds the JSON answer or a WeightPushError."""
        return [self._pool.submit(self._post, url, endpoint, body) for url, body in bodies]

    def _ask_ranks(self, actions: Mapping[str, str]) -> list[list[Any]]:
        """Return the answers of each engine's ranks to its action. Raises WeightPushError: one refuses."""
        return [[json.loads(rank["answer"]) for rank in engine] for engine in self._start_check(actions)()]

    def _start_check(self, actions: Mapping[str, str]) -> Callable[[], list[list[Mapping[str, str]]]]:
        """Give the weight checker of each engine, by URL, its action.

        Returns:
            A function that waits for the answers of the ranks of each engine, or raises WeightPushError: one refuses.
        """
        posts = self.post_all("weights_checker", [(url, {"action": action}) for url, action in actions.items()])

        def wait() -> list[list[Mapping[str, str]]]:
            found = []
            for url, post in zip(actions, posts, strict=True):
                found.append([rank["checksums"] for rank in post.result()["ranks"]])
                for rank, answer in enumerate(found[-1]):
                    if "error" in answer:
                        raise WeightPushError(f"{url}: rank {rank} refuses the push: {answer['error']}")
            return found

        return wait

    def _post(self, url: str, endpoint: str, body: Mapping[str, Any]) -> Any:
        where = f"{url}/{endpoint.removeprefix('/')}"
        try:
            answer = self._session().post(where, json=body, timeout=self.timeout_s)
            if answer.status_code != requests.codes.ok:
                raise WeightPushError(f"{where}: HTTP {answer.status_code}: {first_line(answer.text)}")
            return answer.json()
        except requests.RequestException as error:  # also for an answer that is not JSON
            raise WeightPushError(f"{where}: {first_line(error)}") from error

    def _answers(self, url: str) -> bool:
        try:
            answer = self._session().get(f"{url}/model_info", timeout=_PROBE_TIMEOUT_S)
        except requests.RequestException:
            return False
        return bool(answer.status_code == requests.codes.ok)

    def _session(self) -> requests.Session:
        """Return a session that ignores HTTP_PROXY: a cluster's proxy does not know the addresses of its nodes."""
        session = requests.Session()
        session.trust_env = False
        session.headers.update(self._headers)
        return session


def local_address(url: str) -> str:
    """Return the address under which the engine's host reaches this machine."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # sends nothing, only picks the interface
        return str(probe.getsockname()[0])


def first_line(error: object) -> str:
    """Return the first line of an error's message or an answer's text, at most 300 characters of it."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "no message"
