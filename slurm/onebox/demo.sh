#!/usr/bin/env bash
# `make slurm-demo`: run the quickstart on a real Slurm with two nodes, started on this machine for the job.
set -euo pipefail
cd "$(dirname "$0")/../.."
ARPO="$PWD/.venv/bin/arpo"
OVERRIDES="platform=cpu parallel.data=2 sft.steps=100 train.steps=3 train.tasks_per_step=8 evaluation.before=false evaluation.after=false"

slurm/onebox/onebox.sh install
DIR=$(mktemp -d /tmp/onebox-XXXX)
finish() { slurm/onebox/onebox.sh down "$DIR"; rm -rf "$DIR"; }
trap finish EXIT
trap 'exit 130' INT TERM
PORT=${PORT:-26800} slurm/onebox/onebox.sh up "$DIR" >/dev/null
export SLURM_CONF="$DIR/slurm.conf"
sinfo -N -o '%N %t %P'

# shellcheck disable=SC2086
output=$("$ARPO" submit quickstart --cluster onebox --nodes 2 $OVERRIDES "$@")
echo "$output"
name=${output%%:*}
job=$(sed -n '1s/.*: job \([0-9]*\),.*/\1/p' <<<"$output")
"$ARPO" logs "$name" --follow --lines 1000
"$ARPO" status "$name"
for _ in $(seq 100); do  # Slurm reports the end a moment after the last process ends
  state=$(scontrol -o show job "$job" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p')
  [ "$state" = COMPLETING ] || [ "$state" = RUNNING ] || break
  sleep 0.2
done
echo "slurm-demo: job $job ended $state (scontrol show job $job: $(scontrol -o show job "$job" | grep -o 'ExitCode=[0-9:]*'), nodes $(scontrol -o show job "$job" | sed -n 's/.* NodeList=\([^ ]*\).*/\1/p'))"
[ "$state" = COMPLETED ]
