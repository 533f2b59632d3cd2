"""A stand-in for pyxis, which no distribution packages: an `srun` that runs a step in a mount namespace.

Like pyxis it unpacks an image once per name and node (slowly; `unpacked` lists it), and for a step without a name each
time. Variables of the image (`image.env`) win over those of the job that --container-env does not name.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INSIDE = """#!/bin/bash
# What a step in a container of pyxis sees: a /tmp of its own, and in it what is mounted.
set -e
here=$(dirname "$0") name=${4:-$SLURM_STEP_ID} kept=,$5,
exec 9>>"$here/unpacked"; flock 9
if ! grep -qx "$SLURMD_NODENAME $name" "$here/unpacked"; then sleep 1; echo "$SLURMD_NODENAME $name" >&9; fi
exec 9>&-
while IFS='=' read -r variable value; do
  case $kept in *,$variable,*) ;; *) export "$variable=$value" ;; esac
done <"$here/image.env"
kept=$(mktemp -d /dev/shm/inside-XXXX)
number=0
IFS=, read -ra mounts <<<"$1"
mount --make-rprivate /
for pair in "${mounts[@]}"; do mkdir "$kept/$((++number))"; mount --bind "${pair%%:*}" "$kept/$number"; done
mount -t tmpfs tmpfs /tmp
number=0
for pair in "${mounts[@]}"; do mkdir -p "${pair##*:}"; mount --move "$kept/$((++number))" "${pair##*:}"; done
rm -rf "$kept"
cd "$2"
exec "${@:6}"
"""


IMAGE = "NOTE=of the image\nONLY_IN_THE_IMAGE=yes\n"
"""Variables of the image."""
SRUN = """#!/bin/bash
# Stands for pyxis, which no distribution packages.
options=()
while [ $# -gt 0 ]; do
  case $1 in
    --container-image=*) image=${1#*=} ;;
    --container-mounts=*) mounts=${1#*=} ;;
    --container-workdir=*) workdir=${1#*=} ;;
    --container-name=*) name=${1#*=} ;;
    --container-env=*) kept=${1#*=} ;;
    --no-container-mount-home) home=no ;;
    --*) options+=("$1") ;;
    *) break ;;
  esac
  shift
done
case $image in
  /*) [ -e "$image" ] || { echo "slurmstepd: error: pyxis: No such file or directory: $image" >&2; exit 1; } ;;
esac
[ -z "$image" ] || set -- unshare --mount "$(dirname "$0")/inside" "$mounts" "$workdir" "$home" "$name" "$kept" "$@"
exec /usr/bin/srun "${options[@]}" "$@"
"""


@contextmanager
def pyxis(environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Put the stand-in into the PATH, and return the values of a profile; any file is accepted as an image."""
    folder, path = Path(tempfile.mkdtemp(prefix="pyxis-", dir=Path.home())), environment["PATH"]
    for name, text in (("srun", SRUN), ("inside", INSIDE), ("image.sqsh", ""), ("image.env", IMAGE)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment["PATH"] = f"{folder}:{path}"
    yield {"container": str(folder / "image.sqsh"), "container_python": sys.executable}
    environment["PATH"] = path
    shutil.rmtree(folder)
