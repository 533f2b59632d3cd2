#!/bin/sh
# Make .venv from the lock file. Called by `make setup`; a no-op while pyproject.toml and requirements.lock are unchanged.
set -eu
cd "$(dirname "$0")/.."

say() { printf '%s\n' "setup: $*" >&2; }
fail() { say "$*"; exit 2; }

stamp=.venv/.complete
want=$(cat pyproject.toml requirements.lock scripts/setup.sh | cksum)
[ "$(cat $stamp 2>/dev/null || true)" = "$want" ] && exit 0

python=""
for candidate in "${PYTHON:-}" python3.11 python3.12 python3; do
  [ -n "$candidate" ] || continue
  # Version shims exist for interpreters that are not there: run it, do not just look it up.
  "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && { python=$candidate; break; }
done
[ -n "$python" ] || fail "Python 3.11 or 3.12 is missing: apt-get install python3.11 python3.11-venv (Debian 12) or python3.12 python3.12-venv (Ubuntu 24.04), or name one: make setup PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "Python's venv module is missing: apt-get install $("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
rm -f $stamp
say "making .venv with $("$python" --version) (2 to 5 minutes; log: .venv/setup.log)"
"$python" -m venv --clear .venv
log=.venv/setup.log
pip=".venv/bin/python -m pip --disable-pip-version-check --no-input"
step() {
  say "$1"; shift
  "$@" >>$log 2>&1 || { tail -n 5 $log >&2; fail "that failed; the whole log is $log"; }
}
torch=$(sed -n 's/^ *"\(torch==[^"]*\)",$/\1/p' pyproject.toml)
# torch first and by its exact pin: any range, here or in a dependency, could pull another build of several gigabytes.
step "1/4 $torch" $pip install --no-compile "$torch"
# --no-deps: the lock is complete, and sglang's own requirements name CUDA packages that a CPU machine cannot use.
step "2/4 $(grep -c '==' requirements.lock) pinned packages" $pip install --no-compile --no-deps -r requirements.lock
step "3/4 arpo-megatron" $pip install --no-deps -e .
# pip would compile on one core only. Some packages ship templates that do not compile: as in pip, that is no failure.
say "4/4 byte code"
.venv/bin/python -m compileall -qq -j 0 .venv/lib arpo_megatron tools_sandbox recipes >>$log 2>&1 || true
printf '%s\n' "$want" >$stamp
say "done: .venv/bin/arpo --help"
