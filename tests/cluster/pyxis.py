"""A stand-in for pyxis, which no distribution packages: an `srun` that runs a step in a mount namespace, and `enroot`.

Like pyxis 0.24 it unpacks an image once per name and node (slowly; `unpacked` lists it), and for a step without a name
each time. A step joins the namespace of a running step with its name, whose mounts it gets (`unpacked` notes that),
unless the name ends in `:no_exec`. Unpacked images stay until `enroot remove`, which lists them in `removed`. Variables
of the image (`image.env`) win over those of the job that --container-env does not name.
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
mode=${name#*:} name=${name%%:*}
running=$here/running-$SLURMD_NODENAME-$name
if [ "$mode" != no_exec ] && read -r pid step 2>/dev/null <"$running" &&
  [ "$step" != "$SLURM_STEP_ID" ] && [ -d "/proc/$pid" ]; then
  echo "$SLURMD_NODENAME $name attached" >>"$here/unpacked"
  exec nsenter --mount --target "$pid" bash -c 'cd "$1" && exec "${@:2}"' enter "$2" "${@:6}"
fi
echo "$$ $SLURM_STEP_ID" >"$running"
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
make() { if [ -d "$1" ]; then mkdir -p "$2"; else mkdir -p "$(dirname "$2")"; touch "$2"; fi; }
for pair in "${mounts[@]}"; do
  make "${pair%%:*}" "$kept/$((++number))"
  mount --bind "${pair%%:*}" "$kept/$number"
done
mount -t tmpfs tmpfs /tmp
number=0
for pair in "${mounts[@]}"; do
  IFS=: read -r _ target _ <<<"$pair"
  make "$kept/$((++number))" "$target"
  mount --move "$kept/$number" "$target"
done
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
ENROOT = """#!/bin/bash
here=$(dirname "$0")
exec 9>>"$here/unpacked"; flock 9
case $1 in
  list) sed -n "s/^$SLURMD_NODENAME /pyxis_/p" "$here/unpacked" ;;
  remove)
    line="$SLURMD_NODENAME ${3#pyxis_}"
    rest=$(grep -vx "$line" "$here/unpacked")
    grep -x "$line" "$here/unpacked" >>"$here/removed" || exit 1
    echo "$rest" >"$here/unpacked" ;;
esac
"""


@contextmanager
def pyxis(environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Put the stand-in into the PATH, and return the values of a profile; any file is accepted as an image."""
    folder, path = Path(tempfile.mkdtemp(prefix="pyxis-", dir=Path.home())), environment["PATH"]
    files = {"srun": SRUN, "inside": INSIDE, "enroot": ENROOT, "image.sqsh": "", "image.env": IMAGE}
    for name, text in files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment["PATH"] = f"{folder}:{path}"
    yield {"container": str(folder / "image.sqsh"), "container_python": sys.executable}
    environment["PATH"] = path
    shutil.rmtree(folder)
