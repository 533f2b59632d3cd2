"""Profiles of clusters: errors are one line, and time limits and login nodes have Slurm's and SSH's meaning."""

from pathlib import Path

import pytest
import yaml

from arpo_megatron.cluster.profile import (
    DIRECTORY,
    ClusterProfile,
    load_profile,
    profile_names,
    save_profile,
)
from arpo_megatron.cluster.slurm import seconds
from arpo_megatron.cluster.ssh import LoginNode, login_node
from arpo_megatron.errors import UserError
from tests.cluster.stand_in import PLAIN, profile


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpus_pernode": 4}, "unknown key gpus_pernode; did you mean gpus_per_node?"),
        ({"gpus_per_node": -1}, "gpus_per_node: must be at least 0$"),
        ({"time": "tomorrow"}, "time: 'tomorrow' is not a time limit of Slurm, such as 30, "),
        ({"time": "1:2:3:4"}, "time: "),
        ({"time": ""}, "time: "),
        ({"mem": "lots"}, "mem: 'lots' is not an amount of memory of Slurm, such as 64000 or 900G"),
        ({"mem": "1.5G"}, "mem: '1.5G' is not an amount"),
        ({"signal_s": 70000, "time": "2-0"}, "signal_s: must be at most 65535$"),
        ({"gpu_request": "all"}, "gpu_request: must be 'gpus-per-node', 'gres' or 'none'$"),
        ({"sbatch": {"gpus": 8}}, "sbatch.gpus: must be text: write the value in quotes$"),
        ({"environment": ["A=1"]}, "environment: must be a mapping of keys to values$"),
        ({"ports": [7000]}, "ports.1: is required$"),
        (
            {"sbatch": {"Constraint": "x"}},
            "sbatch: Constraint is not the long name of a parameter of sbatch, such as con",
        ),
        ({"sbatch": {"--constraint": "x"}}, "sbatch: --constraint is not the long name"),
        (
            {"sbatch": {"mem-per-cpu": "4G"}},
            "sbatch: mem-per-cpu is not allowed here: it excludes the key mem: set mem: nu",
        ),
        ({"time": 5}, "time: 5 leaves nothing before signal_s=300.* raise time or lower signal_s"),
        ({"time": "00:10:00", "signal_s": 600}, "time: 00:10:00 leaves nothing before signal_s=600"),
        ({"ports": [7000, 7010]}, "are fewer than 64"),
        ({"ports": [65500, 66000]}, "ports: .* TCP ports end at 65535"),
        ({"secrets": {"A B": "env"}}, "is not a valid name of an environment variable"),
        (
            {"environment": {"NOTE": "1"}, "secrets": {"NOTE": "env"}},
            "NOTE is in environment and in secrets",
        ),
        ({"secrets": {"KEY": "sk-123"}}, "secrets: KEY must be `env` or a path that begins"),
        (
            {"environment": {"WANDB_API_KEY": "1"}},
            "WANDB_API_KEY would be in the batch script: move it to secrets",
        ),
        ({"environment": {"hf_token": "1"}}, "hf_token would be in the batch script: move it to secrets"),
        ({"mounts": ["/data"]}, "mounts: '/data' does not have the form FROM:TO"),
        ({"mounts": ["/a:/b:ro,rprivate"]}, r"mounts: .* does not have the form FROM:TO or FROM:TO:FLAG\+FLAG"),
        ({"mounts": ["/a,/b:/c"]}, "mounts: '/a,/b:/c' does not have the form FROM:TO"),
        ({"trusted_networks": ["10.1.0.1/16"]}, "trusted_networks: 10.1.0.1/16 has host bits set"),
        ({"account": "a\n#SBATCH --uid=0"}, "account: .* cannot be in a batch script"),
        ({"sbatch": {"comment": "a\nb"}}, "sbatch.comment: .* cannot be in a batch script"),
        ({"sbatch": {"job-name": "mine"}}, "sbatch: job-name is not allowed here: arpo submit sets it"),
        ({"sbatch": {"job_name": "mine"}}, "sbatch: job_name is not allowed here"),
        ({"sbatch": {"output": "mine"}}, "sbatch: output is not allowed here"),
        ({"sbatch": {"dependency": "afterok:1"}}, "sbatch: dependency is not allowed here: use arpo submit --chain"),
        ({"sbatch": {"time": "1"}}, "sbatch: time is not allowed here: set the key time"),
        ({"sbatch": {"gpus-per-node": "1"}}, "sbatch: gpus-per-node is not allowed here: set the key gpu_request"),
        ({"sbatch": {"array": "0-1"}}, "sbatch: array is not allowed here: a run is one job"),
        ({"sbatch": {"arr": "0-1"}}, "sbatch: arr is not allowed here: a run is one job"),
        ({"sbatch": {"export": "NONE"}}, "sbatch: export is not allowed here: use the keys environment and secrets"),
        ({"sbatch": {"ntasks": "1"}}, "sbatch: ntasks is not allowed here: arpo submit sets it"),
        ({"sbatch": {"wrap": "true"}}, "sbatch: wrap is not allowed here: arpo submit writes"),
        ({"sbatch": {"clusters": "b"}}, "sbatch: clusters is not allowed here: arpo status and"),
        ({"sbatch": {"container_image": "a"}}, "sbatch: container_image is not allowed here: set the key container"),
        ({"sbatch": {"wait": ""}}, "sbatch: wait is not allowed here: arpo submit does not wait"),
        ({"sbatch": {"test-only": ""}}, "sbatch: test-only is not allowed here: no job would be submitted"),
        ({"sbatch": {"gres": "gpu:1"}, "gpu_request": "gres"}, "sbatch: gres is not allowed here"),
        ({"runs": "relative/runs"}, "runs: 'relative/runs' must begin with / or ~/"),
        ({"runs": ""}, "runs: '.' must begin with / or ~/"),
        ({"account": ""}, "account: must not be empty$"),
        ({"runs": "$NOT_SET_ANYWHERE/runs"}, r"the environment variable \$NOT_SET_ANYWHERE is not set"),
    ],
)
def test_profile_error_is_one_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=f"^here.yaml: .*{message}") as error:
        profile(**values)
    assert "sk-123" not in str(error.value)


def test_other_sbatch_parameters_are_accepted() -> None:
    more = {
        "gres": "gpu:8,nvme:1",
        "exclusive": "user",
        "mem-per-cpu": "4G",
        "reservation": "mine",
        "gpus": "8",
        "chdir": "/",
    }
    assert profile(sbatch=more, gpu_request="none", exclusive=False, mem=None).sbatch == more


def test_profiles_in_the_repository_survive_a_round_trip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in profile_names():
        for word in ("USER", "SCRATCH", "PWD"):
            monkeypatch.setenv(word, "/somewhere")
        read = load_profile(name)
        save_profile(read, tmp_path / "cluster.yaml")
        assert load_profile(str(tmp_path / "cluster.yaml")) == read
        keys = yaml.safe_load((DIRECTORY / f"{name}.yaml").read_text())
        assert all(str(key) in ClusterProfile.__dataclass_fields__ for key in keys)
    texts = profile(environment={"A": "1e-5", "B": "0o17", "C": "off", "D": "04:00:00", "E": "12e03"})
    save_profile(texts, tmp_path / "cluster.yaml")
    assert load_profile(str(tmp_path / "cluster.yaml")) == texts
    with pytest.raises(UserError, match="unknown cluster 'oneboxx'"):
        load_profile("oneboxx")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("0", 0),
        ("30", 1800),
        ("120", 7200),
        ("2:30", 150),
        ("04:00:00", 14400),
        ("100:00:00", 360000),
        ("1-00:00:00", 86400),
        ("2-12", 216000),
        ("10-0:30", 865800),
        ("00:75:00", 4500),
        ("1:00:300", 3900),
    ],
)
def test_time_limits_have_slurms_meaning(limit: str, expected: int, tmp_path: Path) -> None:
    """The forms of --time in sbatch(1), as unquoted YAML."""
    (file := tmp_path / "mine.yaml").write_text(f"account: a\nruns: /shared\nsignal_s: 60\ntime: {limit}\n")
    assert load_profile(str(file)).time == limit
    assert seconds(limit) == expected


@pytest.mark.parametrize("amount", ["0", 0, 64000, "900G", "900g", "900GB", "2T", "512M", "1048576K"])
def test_amounts_of_memory_have_slurms_forms(amount: str | int) -> None:
    """The forms of --mem in sbatch(1), and those that sbatch 22.05 accepts besides."""
    assert profile(mem=amount).mem == str(amount)


def test_profile_with_ssh_has_a_login_node(tmp_path: Path) -> None:
    file = tmp_path / "far.yaml"

    def written(**values: object) -> LoginNode | None:
        file.write_text(yaml.safe_dump({**PLAIN, **values}))
        return login_node(str(file))

    assert written() is None
    there = "$HOME_OF_THE_CLUSTER/.venv/bin/python"
    node = written(ssh="me@login.cluster:2222", python=there, identity="~/.ssh/key", runs="$SCRATCH_THERE")
    assert node is not None and (node.user, node.host, node.port) == ("me", "login.cluster", 2222)
    assert node.profile == {**PLAIN, "python": there, "runs": "$SCRATCH_THERE"}, "variables are the cluster's"
    alias = written(ssh="cluster", python=there)
    assert alias is not None and (alias.user, alias.port, alias.identity) == (None, None, None)
    with pytest.raises(UserError, match="ssh needs python, the path"):
        written(ssh="cluster")
    with pytest.raises(UserError, match=r"does not have the form \[USER@\]HOST\[:PORT\]"):
        written(ssh="cluster -o ProxyCommand=x", python=there)
    with pytest.raises(UserError, match="unknown cluster"):
        login_node("nowhere")


def test_measured_speeds_are_those_of_a_plan() -> None:
    plain, measured = (
        profile(gpu="h100-80", gpus_per_node=4, **keys).hardware()
        for keys in ({}, {"network_gb_s": 7, "filesystem_gb_s": 3, "host_copy_gb_s": 11})
    )
    assert plain is not None and measured is not None
    assert (plain.gpus, plain.network, plain.host_link, plain.filesystem) == (4, 50e9, 55e9, 2e9)
    # A measured network is what collectives reach, and a plan takes 0.7 of a peak.
    assert (0.7 * measured.network, measured.host_link, measured.filesystem) == pytest.approx((7e9, 11e9, 3e9))
    assert profile(gpus_per_node=4).hardware() is None
