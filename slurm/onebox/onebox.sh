#!/usr/bin/env bash
# A real Slurm of several nodes on one machine, for `make slurm-demo` and the tests: no systemd, no cgroups, no
# accounting database. Everything it writes is in one folder, and everything it starts ends with `down`.
#
#   onebox.sh install          install missing packages of the distribution; starts no service
#   onebox.sh installable      fail if Slurm is not installed and `install` could not install it
#   onebox.sh up DIR           start Slurm; the last line of output is `export SLURM_CONF=...`
#   onebox.sh down DIR         cancel all jobs and stop every daemon of DIR
#
# Optional environment: NODES (2), CPUS per node (8), PORT (26800, the first of a few), PROCTRACK (linuxproc), WARNING
# (preempt_send_user_signal; if empty, a preempted job gets SIGTERM). DIR needs a short path, because it has a socket.
# Each node has its own loopback address (127.0.0.11, ...), so that a service on the wrong address fails.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
say() { printf 'onebox: %s\n' "$*" >&2; }
fail() { say "$*"; exit 2; }

PROGRAMS="munged slurmctld slurmd srun sbatch scontrol"
missing() { for program in $PROGRAMS; do command -v "$program" >/dev/null || { echo "$program"; return; }; done; }

installable() {
  [ -n "$(missing)" ] || return 0
  command -v apt-get >/dev/null || fail "$(missing) is not installed: install Slurm and munge (this script only supports apt-get)"
  [ "$(id -u)" = 0 ] || fail "$(missing) is not installed: as root, apt-get install slurmctld slurmd slurm-client munge"
}

install_packages() {
  [ -n "$(missing)" ] || return 0
  installable
  say "Slurm is not installed here: installing the distribution's slurmctld, slurmd, slurm-client and munge (10 to 30 s);" \
    "their services are not started (run systemctl disable munge before the next boot)"
  local log; log=$(mktemp)
  "$(dirname "$0")/install.sh" slurmctld slurmd slurm-client munge >"$log" 2>&1 || { tail -n 5 "$log" >&2; fail "the installation failed; log: $log"; }
  rm -f "$log"
}

configure() {
  local dir=$1 host index; host=$(hostname -s)
  mkdir -p "$dir"/{state,log,pid}
  chmod 755 "$dir"
  [ -f "$dir/munge.key" ] || (umask 077; dd if=/dev/urandom of="$dir/munge.key" bs=1024 count=1 status=none)
  chmod 400 "$dir/munge.key"
  printf '#!/bin/sh\necho "$@" >>%s/log/mail\n' "$dir" >"$dir/mail"  # mail goes into a file
  chmod 755 "$dir/mail"
  cat >"$dir/slurm.conf" <<CONF
ClusterName=onebox
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$PORT
# Distinct job ids: they name directories in /tmp, which all instances on a machine share.
FirstJobId=$((100 * PORT))
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
# A requeued job waits until its old credentials have expired.
AuthInfo=socket=$dir/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/pid/slurmctld.pid
SlurmdPidFile=$dir/pid/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
MailProg=$dir/mail
ProctrackType=proctrack/$PROCTRACK
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
# A preempted job gets the signal of its --signal option instead of SIGTERM.
${WARNING:+SlurmctldParameters=$WARNING}
KillWait=10
OverTimeLimit=0
MinJobAge=3600
SlurmctldTimeout=30
SlurmdTimeout=10
InactiveLimit=0
SlurmdParameters=config_overrides
GresTypes=gpu
CONF
  # GPUs only in Slurm's view: null devices, or empty files if mknod is not permitted.
  mkdir -p "$dir/gpu"
  for index in $(seq 0 7); do mknod "$dir/gpu/$index" c 1 3 2>/dev/null || : >>"$dir/gpu/$index"; done
  echo "NodeName=n[1-$NODES] Name=gpu File=$dir/gpu/[0-7]" >"$dir/gres.conf"
  for index in $(seq 1 "$NODES"); do
    mkdir -p "$dir/spool/n$index"
    echo "NodeName=n$index NodeHostname=$host NodeAddr=127.0.0.$((10 + index)) Port=$((PORT + index)) CPUs=$CPUS Gres=gpu:8 State=UNKNOWN" >>"$dir/slurm.conf"
  done
  cat >>"$dir/slurm.conf" <<CONF
PartitionName=batch Nodes=n[1-$NODES] Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=120 State=UP
PartitionName=urgent Nodes=n[1-$NODES] MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
CONF
}

start() {
  local dir=$1 index ready
  munged --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/pid/munged.pid" \
    --log-file="$dir/log/munged.log" --seed-file="$dir/munge.seed" --force
  export SLURM_CONF="$dir/slurm.conf"
  slurmctld -c
  for index in $(seq 1 "$NODES"); do slurmd -N "n$index"; done
  for _ in $(seq $((130 + 10 * NODES))); do  # tenths of a second
    ready=$(sinfo -h -N -p batch -t idle -o %N 2>/dev/null | wc -l)
    [ "$ready" = "$NODES" ] && { echo "export SLURM_CONF=$SLURM_CONF"; return; }
    sleep 0.1
  done
  tail -n 5 "$dir"/log/*.log >&2
  stop "$dir"
  fail "the nodes did not come up within $((13 + NODES)) s (are the ports $PORT to $((PORT + NODES)) free?); logs in $dir/log"
}

stop() {
  local dir=$1 file
  export SLURM_CONF="$dir/slurm.conf"
  if [ -s "$dir/pid/slurmctld.pid" ] && timeout 5 scancel --user="$(id -un)" 2>/dev/null; then
    for _ in $(seq 150); do
      [ -z "$(timeout 5 squeue -h -t R,CG -o %i 2>/dev/null)" ] && break
      sleep 0.1
    done
  fi
  local pids=()
  for file in "$dir"/pid/*.pid; do [ -s "$file" ] && pids+=("$(cat "$file")"); done
  [ ${#pids[@]} -gt 0 ] || return 0
  kill "${pids[@]}" 2>/dev/null || true
  for _ in $(seq 30); do kill -0 "${pids[@]}" 2>/dev/null || break; sleep 0.1; done
  kill -9 "${pids[@]}" 2>/dev/null || true  # the controller would spend seconds on saving its state
}

NODES=${NODES:-2}; CPUS=${CPUS:-8}; PORT=${PORT:-26800}
PROCTRACK=${PROCTRACK:-linuxproc}; WARNING=${WARNING-preempt_send_user_signal}
case "${1:-}" in
  install) install_packages ;;
  installable) installable ;;
  up) DIR=$(realpath -m "${2:?a folder}"); install_packages; configure "$DIR"; start "$DIR" ;;
  down) stop "$(realpath -m "${2:?a folder}")" ;;
  *) fail "usage: onebox.sh install | installable | up DIR | down DIR" ;;
esac
