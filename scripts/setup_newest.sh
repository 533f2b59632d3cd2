#!/bin/sh
# Make .venv-newest: Python 3.12 with the newest megatron-core that the CPU platform has a table for, and the newest torch.
# Called by `make test-newest`. torch is the ordinary build with CUDA's libraries: 6 GB.
set -eu
cd "$(dirname "$0")/.."

torch=2.14.1
megatron=$(sed -n 's/^NEWEST_MEGATRON_CORE = "\(.*\)"$/\1/p' arpo_megatron/actor/cpu_platform.py)
stamp=.venv-newest/.complete
want=$(cat requirements.lock scripts/setup_newest.sh | cksum; printf '%s' "$megatron")
[ "$(cat $stamp 2>/dev/null || true)" = "$want" ] && exit 0

python=${PYTHON312:-python3.12}
"$python" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null || {
  printf '%s\n' "setup: Python 3.12 with its venv module is missing: name one, make test-newest PYTHON312=/path/to/python3.12" >&2
  exit 2
}
"$python" -m venv --clear .venv-newest
pip=".venv-newest/bin/python -m pip --disable-pip-version-check --no-input --quiet"
$pip install --no-compile "torch==$torch"
# Only the trainer is tested.
grep -v -i -E '^(torch|triton|sglang|megatron|transformer[-_]engine|nvidia|ray|nemo)' requirements.lock >.venv-newest/requirements.txt
$pip install --no-compile --no-deps -r .venv-newest/requirements.txt "megatron-core==$megatron"
$pip install --no-deps -e .
printf '%s\n' "$want" >$stamp
