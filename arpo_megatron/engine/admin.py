"""Speaking to SGLang servers about their weights: the HTTP half of a push.

What `engine/server/gate.py` and `engine/server/checksums.py` add to a server is used here beside SGLang's own
endpoints.
"""

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
import requests
from numpy.typing import NDArray

from arpo_megatron.engine.wire.checksums import CHECKSUM_ACTION, Piece, Sample
from arpo_megatron.errors import UserError

_POLL_INTERVAL_S = 0.2
_LOOK_TIMEOUT_S = 5.0
_PATIENCE = 0.8
"""Of a request's deadline an engine may wait for something itself, so that it is the one to give up and say why."""


class WeightPushError(UserError):
    """A push failed. Engines that it reached refuse to generate until a whole push has arrived; where it arrived and
    was then found to be wrong, whoever pushes holds back what is asked of them.
    """


class DiskPushError(WeightPushError):
    """The disk by which the weights travel is full, or away: nothing is wrong with an engine."""


@dataclass(frozen=True, slots=True)
class FailedPush:
    """Why one failed, and whether only the disk between trainer and engines is at fault."""

    why: str
    disk: bool

    @classmethod
    def of(cls, error: WeightPushError) -> Self:
        """As the leader tells the other ranks."""
        return cls(str(error), isinstance(error, DiskPushError))


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """A server that is ready for a push.

    Attributes:
        url: http://host:port.
        ranks: its tensor-parallel processes.
        incarnation: another one after each start of the server.
    """

    url: str
    ranks: int
    incarnation: str


class EngineAdmin:
    """Requests to any of several servers, at once where there are several.

    Args:
        urls: http://host:port of each.
        timeout_s: deadline of a request.
        token: that they ask for, if they do.
    """

    def __init__(self, urls: Sequence[str], timeout_s: float, token: str | None = None) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Two buckets may be on their way, and a third announced.
        self._pool = ThreadPoolExecutor(3 * len(self.urls), thread_name_prefix="weight-push")

    def wait_until_up(self, timeout_s: float) -> None:
        """Until every server answers; one that was killed may be starting again. Raises WeightPushError."""
        give_up = time.monotonic() + timeout_s
        for url in self.urls:
            while not self._answers(url):
                if time.monotonic() > give_up:
                    raise WeightPushError(f"{url} does not answer for {timeout_s:g} s")
                time.sleep(_POLL_INTERVAL_S)

    def close(self) -> None:
        """Wait for no one."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, version: int) -> tuple[EngineEndpoint, ...]:
        """Close the gates: from now on every engine refuses to generate; returns when none does any more.

        Args:
            version: of the weights that are to arrive.
        """
        body = {"version": version, "timeout_s": _PATIENCE * self.timeout_s}
        posts = self.start("arpo/begin_push", [(url, body) for url in self.urls])
        answers = [post.result() for post in posts]
        return tuple(
            EngineEndpoint(url, a["ranks"], a["incarnation"]) for url, a in zip(self.urls, answers, strict=True)
        )

    def commit(self, version: int, loads: int) -> None:
        """All weights are there: caches are emptied, the version is set, and the gates open.

        Args:
            version: as at the beginning.
            loads: requests with weights that each engine has answered. One that counts another number stays closed.
        """
        body = {"version": version, "loads": loads, "timeout_s": _PATIENCE * self.timeout_s}
        for post in self.start("arpo/commit_push", [(url, body) for url in self.urls]):
            post.result()

    def release_memory(self) -> None:
        """Give weights and KV pool back to the device. Raises WeightPushError. The engines must be idle."""
        for post in self.start("release_memory_occupation", [(url, {}) for url in self.urls]):
            post.result()

    def resume_memory(self) -> None:
        """Take the memory again; what it holds is undefined until a push. Raises WeightPushError."""
        for post in self.start("resume_memory_occupation", [(url, {}) for url in self.urls]):
            post.result()

    def start_scores(self, token_ids: Sequence[int]) -> Callable[[], list[NDArray[np.float32]]]:
        """Have every engine score a sequence; the result waits for their answers, and raises WeightPushError.

        For each engine, float32[n - 1]: log-probs in nats at temperature 1 of token 1 to n - 1 given those before.
        They are computed with the weights the engine has now, without its radix cache.
        """
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        posts = self.start("generate", [(url, body) for url in self.urls])

        def wait() -> list[NDArray[np.float32]]:
            scored = [post.result()["meta_info"]["input_token_logprobs"] for post in posts]
            return [np.array([token[0] for token in tokens[1:]], np.float32) for tokens in scored]

        return wait

    def checksums(self, samples: Mapping[str, Sample]) -> list[dict[str, list[Piece]]]:
        """For each engine: which pieces of the samples its ranks hold, and what each sums up to.

        Args:
            samples: by Hugging Face name of the tensor.
        """
        body = {"action": CHECKSUM_ACTION + json.dumps({name: asdict(sample) for name, sample in samples.items()})}
        answers = [post.result() for post in self.start("weights_checker", [(url, body) for url in self.urls])]
        held: list[dict[str, list[Piece]]] = []
        for answer in answers:
            ranks = [rank["checksums"] for rank in answer["ranks"]]
            held.append(
                {name: [Piece.from_json(p) for rank in ranks for p in json.loads(rank[name])] for name in samples}
            )
        return held

    def start(self, endpoint: str, bodies: Sequence[tuple[str, Mapping[str, Any]]]) -> list["Future[Any]"]:
        """POST each body to its server; a future's result is the JSON answer, its error a WeightPushError."""
        return [self._pool.submit(self._post, url, endpoint, body) for url, body in bodies]

    def _post(self, url: str, endpoint: str, body: Mapping[str, Any]) -> Any:
        where = f"{url}/{endpoint}"
        try:
            answer = self._session().post(where, json=body, timeout=self.timeout_s)
        except requests.RequestException as error:
            raise WeightPushError(f"{where}: {first_line(error)}") from error
        if answer.status_code != requests.codes.ok:
            raise WeightPushError(f"{where}: HTTP {answer.status_code}: {first_line(answer.text)}")
        return answer.json()

    def _answers(self, url: str) -> bool:
        try:
            answer = self._session().get(f"{url}/model_info", timeout=_LOOK_TIMEOUT_S)
        except requests.RequestException:
            return False
        return bool(answer.status_code == requests.codes.ok)

    def _session(self) -> requests.Session:
        """Engines are addressed directly: a cluster's HTTP_PROXY knows nothing of the addresses of its nodes."""
        session = requests.Session()
        session.trust_env = False
        session.headers.update(self._headers)
        return session


def failure(posts: Sequence["Future[Any]"], what: str) -> WeightPushError:
    """An engine's own words where one has answered with an error, else `what` happened at this end."""
    for post in posts:
        if post.done() and isinstance(error := post.exception(), WeightPushError):
            return error
    return WeightPushError(what)


def local_address(url: str) -> str:
    """The address of this machine under which the engine's host reaches it."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # sends nothing; it only chooses the interface
        return str(probe.getsockname()[0])


def is_local(url: str) -> bool:
    """Whether the engine runs on this machine: packets to its host leave from that very address."""
    host = urlsplit(url).hostname or ""
    return local_address(url) == socket.gethostbyname(host)


def first_line(error: object) -> str:
    """Of an error's message or an answer's text, in at most 300 characters."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "no message"
