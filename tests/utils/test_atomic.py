"""A JSON file of a run survives a power cut, and a damaged one is refused in one line."""

import json
import os
from pathlib import Path

import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.utils.atomic import read_json, write_json


def test_content_is_on_the_disk_before_its_name_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, fsync, replace = [], os.fsync, Path.replace

    def record_fsync(descriptor: int) -> None:
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def record_replace(path: Path, target: Path) -> Path:
        done.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_replace)
    write_json(tmp_path / "result.json", {"step": 3})
    assert done == [".result.json.tmp", "rename", tmp_path.name]
    assert json.loads((tmp_path / "result.json").read_text()) == {"step": 3}


@pytest.mark.parametrize(("content", "reason"), [("", "Expecting value"), ("[]", "no JSON object")])
def test_damaged_file_is_refused_with_the_fix(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(UserError, match=f"result.json .*{reason}.*: delete it$"):
        read_json(tmp_path / "result.json", "delete it")
