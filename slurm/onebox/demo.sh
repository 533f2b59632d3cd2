#!/usr/bin/env bash
# `make slurm-demo`: run the quickstart on a real Slurm with four nodes, started on this machine for the job. While it
# trains on two of them, one is drained and a trainer rank on the other is killed; the job restarts on the remaining
# two. Export, evaluation and a server that answers one question are jobs of their own.
set -euo pipefail
cd "$(dirname "$0")/../.."
ARPO="$PWD/.venv/bin/arpo"
OVERRIDES="platform=cpu parallel.data=2 sft.steps=60 train.steps=3 train.tasks_per_step=8 evaluation.before=false
  evaluation.after=false evaluation.tasks=16"
LIMIT_S=600  # for one phase, on a busy machine

say() { printf 'slurm-demo: %s\n' "$*"; }
field() { scontrol -o show job "$1" | sed -n "s/^\(.* \)\?$2=\([^ ]*\).*/\2/p"; }
ended() { case $(field "$1" JobState) in PENDING | CONFIGURING | RUNNING | COMPLETING | SIGNALING) return 1 ;; esac; }
wait_for() { # WHAT JOB COMMAND...: until the command succeeds; fail if the job ends before
  local what=$1 job=$2 over; shift 2
  for ((over = SECONDS + LIMIT_S; SECONDS < over; )); do
    "$@" && return
    ! ended "$job" || "$@" || { say "no $what: job $job ended $(field "$job" JobState)"; exit 1; }
    sleep 0.5
  done
  say "no $what within $LIMIT_S s"; exit 1
}
completed() { # WHAT JOB: wait for the end
  wait_for "end of $1" "$2" ended "$2"
  say "$1: job $2 ended $(field "$2" JobState) on $(field "$2" NodeList), $((SECONDS)) s after the start"
  [ "$(field "$2" JobState)" = COMPLETED ]
}
rank_on() { # NODE: process id of a trainer rank of this Slurm there
  local pid
  for pid in $(pgrep -f arpo_megatron.cluster.rank); do
    tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -qx "SLURM_CONF=$SLURM_CONF" || continue
    tr '\0' '\n' <"/proc/$pid/environ" | grep -qx "SLURMD_NODENAME=$1" && { echo "$pid"; return; }
  done
  return 1
}
nodes_of() { scontrol show hostnames "$(field "$1" NodeList)"; }

slurm/onebox/onebox.sh install
DIR=$(mktemp -d /tmp/onebox-XXXX)
FOLLOW=
finish() { [ -z "$FOLLOW" ] || kill "$FOLLOW" 2>/dev/null || true; slurm/onebox/onebox.sh down "$DIR"; rm -rf "$DIR"; }
trap finish EXIT
trap 'exit 130' INT TERM
NODES=4 PORT=${PORT:-26800} slurm/onebox/onebox.sh up "$DIR" >/dev/null
export SLURM_CONF="$DIR/slurm.conf"
sinfo -N -o '%N %t %P'

# shellcheck disable=SC2086
output=$("$ARPO" submit quickstart --cluster onebox --nodes 2 --then export,eval $OVERRIDES "$@")
echo "$output"
name=${output%%:*}
read -r job export evaluation <<<"$(sed -n 's/^[^ ]*: job \([0-9]*\)[, ].*/\1/p' <<<"$output" | tr '\n' ' ')"
run=$(sed -n '1s/.*run directory //p' <<<"$output")
"$ARPO" logs "$name" --follow --lines 1000 &
FOLLOW=$!

wait_for "first step" "$job" test -d "$run/checkpoints/step_1"
{ read -r drained; read -r guilty; } <<<"$(nodes_of "$job")"
scontrol update NodeName="$drained" State=DRAIN Reason=slurm-demo
killed=$(rank_on "$guilty")
kill -KILL "$killed"
say "drained $drained, and killed trainer rank $killed on $guilty"
completed "training" "$job"
wait "$FOLLOW" || true
FOLLOW=
case " $(nodes_of "$job" | tr '\n' ' ')" in *" $drained "* | *" $guilty "*) say "it did not leave its nodes"; exit 1 ;; esac
[ "$(field "$job" Restarts)" = 1 ]

completed "export" "$export"
completed "evaluation" "$evaluation"
"$ARPO" logs "$name" --service eval --lines 12

output=$("$ARPO" serve "$name" --cluster onebox --step 3)
echo "$output"
server=$(sed -n '1s/.*: job \([0-9]*\),.*/\1/p' <<<"$output")
log="$run/logs/serve"
wait_for "server" "$server" grep -qs '^http.*/v1$' -r "$log"
url=$(grep -ho '^http.*/v1$' -r "$log")
ARPO_SERVE_TOKEN=$(grep -ho 'token: .*' -r "$log" | cut -d' ' -f2)
export ARPO_SERVE_TOKEN
say "question to $url"
printf 'What is 12 + 30?\n\n' | "$ARPO" chat "$url"
scancel "$server"
wait_for "end of the server" "$server" ended "$server"
"$ARPO" status "$name"
say "trained through a drained node and a killed rank, exported, evaluated and served in $SECONDS s"
