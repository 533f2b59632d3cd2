"""Demands of a job on its cluster, for `arpo submit --dry-run`: ports, steps, files, and bytes per link."""

from collections import Counter
from collections.abc import Iterator

from arpo_megatron.cluster.submission import Submission
from arpo_megatron.plan.traffic import step_traffic
from arpo_megatron.utils.heartbeat import interval_s

_OTHERS = 3
"""Ports of the first node besides engines, tool services and the router: rollout process, the ranks' rendezvous, the
job's metrics."""
_ROUTER = 2
"""Ports of SGLang's router. With the pinned SGLang, which streams entropies, `engine.router=auto` has none."""
_METADATA = 3
"""Files of a checkpoint next to those of the ranks."""


def forecast_lines(submission: Submission) -> Iterator[str]:
    """Yield one line for each demand of the job."""
    config, layout = submission.config, submission.layout
    engines, ranks = layout.engines, config.parallel.world_size
    if engines:
        router = config.engine.router == "sglang"
        services = _services_by_node(submission)
        most = max((services[node] for node in range(1, layout.nodes)), default=0)
        yield f"ports: {_OTHERS + router * _ROUTER + services[0]} on node 0, at most {most} on another"
        together = engines + layout.tool_services + 2 + router
        before = "doctor and prepare" if submission.profile.container is None else "image, doctor and prepare"
        yield f"srun: {together} steps at a time ({ranks} tasks of the trainer in one), after {before}"
    every = interval_s(config.parallel.collective_timeout_s)
    yield f"files: {ranks + _METADATA} per checkpoint; {ranks} heartbeats every {every:.0f} s"
    if submission.forecast is not None and not config.sft_only:
        yield "bytes per step through the busiest link, and the floor: their time at the link's peak"
        for item in step_traffic(submission.forecast.config, submission.forecast.hardware):
            yield f"  {item.name:22}{item.size / 1e9:9.2f} GB  {item.link:19}{item.floor_s:8.2f} s"


def _services_by_node(submission: Submission) -> Counter[int]:
    """Return the number of engines and tool services of each node."""
    layout = submission.layout
    engines = (layout.place(engine)[0] for engine in range(layout.engines))
    return Counter(engines) + Counter(service % layout.nodes for service in range(layout.tool_services))
