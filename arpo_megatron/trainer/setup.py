"""A rank of the training, set up from its run directory and taken down again."""

from collections.abc import Iterator
from contextlib import contextmanager

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.checkpoint import CheckpointStore
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.inputs import load_data, load_tokenizer, model_path
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.monitor.metrics import MetricsLog
from arpo_megatron.monitor.profiler import StepProfiler
from arpo_megatron.rollout.endpoints import Services
from arpo_megatron.tasks.selectors.base import make_task_selector
from arpo_megatron.trainer.controller import Controller
from arpo_megatron.trainer.run import TrainingRun
from arpo_megatron.utils.rank_main import log_failure


@contextmanager
def training_run(directory: RunDirectory) -> Iterator[TrainingRun]:
    """Set a rank up from a run directory (resuming where it left off) and take it down again."""
    config = resolve.load(directory.config)
    parallel.initialize(config.parallel, config.seed)
    is_rank_zero = parallel.is_rank_zero()
    start = directory.sft_model if config.sft.steps else model_path(config, directory)
    tokenizer = load_tokenizer(start)
    data = load_data(config, tokenizer)
    spec = ModelSpec.from_hf(start)
    updates = config.train.steps * config.algorithm.minibatches
    actor = Actor(
        config,
        spec,
        start,
        optimizer=config.optimizer,
        total_updates=updates,
        keep_reference=config.algorithm.kl_coefficient > 0,
    )
    events = EventLog(directory.events, enabled=is_rank_zero)
    found = Services.from_environment()
    selector = make_task_selector(config.algorithm, data.train, config.seed)
    controller = (
        Controller.start(config, directory, start, tokenizer, found, selector, events) if is_rank_zero else None
    )
    window = config.monitor.profile_steps if is_rank_zero or config.monitor.profile_ranks == "all" else None
    run = TrainingRun(
        config=config,
        directory=directory,
        actor=actor,
        tasks=data.train,
        selector=selector,
        held_out=data.held_out,
        checkpoints=CheckpointStore(directory.checkpoints, config.train.keep_checkpoints, config.train.keep_every),
        events=events,
        metrics=MetricsLog(directory.path, config) if is_rank_zero else None,
        controller=controller,
        profiler=StepProfiler(window, directory.profile, parallel.rank()),
    )
    try:
        run.resume()
        yield run
    except BaseException as error:
        log_failure(error)  # before the clean-up, which may take a while and which other ranks may notice
        raise
    finally:
        if controller is not None:
            controller.close()
        if run.metrics is not None and (rows := run.metrics.close()):
            events.emit("note", text=f"the last {rows} rows of metrics.jsonl are not stored: the disk has no room")
        run.profiler.close()
    parallel.destroy()  # a failed rank leaves its groups only with its end, so that it is the first to tell
