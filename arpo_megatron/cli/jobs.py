"""`--cluster` of `arpo eval`, `export`, `serve` and `sft`, and `--then` of `arpo submit`: jobs of their own."""

from pathlib import Path

from arpo_megatron.cli.options import next_after_dry_run, next_command
from arpo_megatron.errors import UserError

FOLLOWING = ("eval", "export")
"""Commands that `--then` accepts."""


def submit_command(
    cluster: str, command: str, run: str, *arguments: str, dry_run: bool = False, **options: object
) -> None:
    """Submit `arpo COMMAND RUN ARGUMENTS... OPTIONS...` as a job on one node of the cluster.

    Args:
        cluster: name or file of the profile.
        command: `eval`, `export` or `serve`.
        run: directory of a run, or the name of a submitted one.
        arguments: further arguments.
        dry_run: print the batch script, and submit nothing.
        options: options of the command; None and False are left out, True is a flag.
    """
    from arpo_megatron.cluster import submit
    from arpo_megatron.cluster.commands import command_submission
    from arpo_megatron.cluster.commands import submit_command as submit_job
    from arpo_megatron.cluster.profile import load_profile
    from arpo_megatron.cluster.runs import address_words, find_run
    from arpo_megatron.cluster.ssh import run_on_login_node
    from arpo_megatron.jobs.run_directory import RunDirectory

    named = {name.replace("_", "-"): value for name, value in options.items()}
    run_on_login_node(cluster, command, run, *arguments, **named, **({"dry-run": True} if dry_run else {}))
    directory = RunDirectory(Path(run).absolute())
    if not directory.config.is_file():
        directory = find_run(run, cluster)
    words = [command, str(directory.path), *arguments]
    for name, value in named.items():
        if value is not None and value is not False:
            text = str(value.absolute() if isinstance(value, Path) else value)
            words += [f"--{name}"] if value is True else [f"--{name}", text]
    if dry_run:
        print(submit.dry_run(command_submission(directory, load_profile(cluster), words)))
        next_after_dry_run()
        return
    job = submit_job(directory, load_profile(cluster), words)
    print(f"{directory.path.name}: job {job}, arpo {' '.join(words)}")
    next_command("arpo", "logs", *address_words(directory), "--service", command, "--follow")


def following(text: str | None) -> list[str]:
    """Return the commands of `--then`. Raises UserError for an unknown one."""
    commands = [] if text is None else text.split(",")
    if unknown := [each for each in commands if each not in FOLLOWING]:
        raise UserError(f"--then {unknown[0]}: use {' or '.join(FOLLOWING)}, separated by a comma")
    return commands


def step_model(target: str, step: int, model: str | None) -> str:
    """Return the export of a run's checkpoint, which is made if it does not exist. Raises UserError for no run."""
    from arpo_megatron.cli.options import open_run
    from arpo_megatron.launch.job import export_checkpoint

    if model is not None:
        raise UserError("--step and --model both name the model: give one of them")
    run = open_run(Path(target))
    there = run.exports / f"step_{step}"
    return str(there if there.is_dir() else export_checkpoint(run, None, step))
