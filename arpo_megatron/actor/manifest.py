"""The manifest of a checkpoint: size and checksum of every file, so that damage is found before training resumes.

The checksum is xxh3 with 128 bits. It detects every accidental change and takes less time than reading the file.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from arpo_megatron.utils.atomic import flush

MANIFEST_FILE = "manifest.json"
_FORMAT = 1
_CHUNK_BYTES = 1 << 22
_FILES_AT_A_TIME = 4


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Name, size and checksum of one file of a checkpoint."""

    name: str
    """Path relative to the checkpoint's directory, with slashes."""
    size: int
    """Size in bytes."""
    xxh3_128: str
    """Checksum of the content, 32 hexadecimal digits."""


class DamagedError(Exception):
    """A manifest is missing or damaged; the message names it."""


def record_file(path: Path, root: Path) -> FileRecord:
    """Read a file back and return its size and checksum."""
    return FileRecord(path.relative_to(root).as_posix(), path.stat().st_size, _checksum(path))


def write_manifest(root: Path, records: Iterable[FileRecord]) -> None:
    """Write the manifest of the checkpoint at `root`; flush it and the directories below to disk."""
    files = sorted((asdict(each) for each in records), key=lambda each: str(each["name"]))
    body = {"format": _FORMAT, "files": files}
    with (root / MANIFEST_FILE).open("w", encoding="utf-8") as file:
        json.dump({**body, "xxh3_128": _seal(body)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for folder in {root, *((root / str(each["name"])).parent for each in files)}:
        flush(folder)


def read_manifest(root: Path) -> list[FileRecord]:
    """Return the files that belong to the checkpoint at `root`.

    Raises:
        DamagedError: there is no manifest, or it has changed.
    """
    try:
        content = json.loads((root / MANIFEST_FILE).read_text(encoding="utf-8"))
        seal = content.pop("xxh3_128")
        records = [FileRecord(**each) for each in content["files"]]
    except FileNotFoundError:
        raise DamagedError(f"file {MANIFEST_FILE} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"file {MANIFEST_FILE} cannot be read ({type(error).__name__}: {error})") from None
    if seal != _seal(content):
        raise DamagedError(f"file {MANIFEST_FILE} has another checksum")
    return records


def find_damaged_files(root: Path, records: Sequence[FileRecord]) -> list[str]:
    """Compare files with their records, several at a time; return one phrase per damaged file."""
    with ThreadPoolExecutor(_FILES_AT_A_TIME) as pool:  # reading and hashing release the interpreter
        return [phrase for phrase in pool.map(lambda record: _damage(root, record), records) if phrase]


def _damage(root: Path, record: FileRecord) -> str:
    path = root / record.name
    try:
        if (size := path.stat().st_size) != record.size:
            return f"file {record.name} has {size} bytes instead of {record.size}"
        if _checksum(path) != record.xxh3_128:
            return f"file {record.name} has another checksum"
    except FileNotFoundError:
        return f"file {record.name} is missing"
    except OSError as error:
        return f"file {record.name} cannot be read ({error.strerror})"
    return ""


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _seal(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
