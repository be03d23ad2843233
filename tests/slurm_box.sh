#!/bin/bash
# A real Slurm cluster of N nodes on this machine: one slurmctld, one slurmd a node, a munge of its own. It installs nothing.
#   slurm_box.sh up N DIR PORT     then: export SLURM_CONF=DIR/slurm.conf; sinfo; srun -N4 -n4 hostname
#   slurm_box.sh down DIR
# Needs root and Debian's slurm-wlm and munge. Nodes are called n1 … nN; only the processes on them know these names: their daemons
# have a hosts file of their own. PORT is the first of N + 1 free ones.
set -euo pipefail
verb=${1:-}; shift || true
case $verb in
up)
  nodes=$1 dir=$2 port=$3 host=$(hostname)
  mkdir -p "$dir"/{state,log}
  for k in $(seq "$nodes"); do mkdir -p "$dir/spool/n$k"; done
  { cat /etc/hosts; for k in $(seq "$nodes"); do echo "127.0.0.1 n$k"; done; } >"$dir/hosts"
  cat >"$dir/slurm.conf" <<C
ClusterName=box
SlurmctldHost=$host(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
SlurmctldPort=$port
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=20
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
SchedulerParameters=batch_sched_delay=1,sched_interval=2
NodeName=n[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=8 RealMemory=4000 Gres=gpu:8
PartitionName=main Nodes=n[1-$nodes] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-$nodes] MaxTime=INFINITE State=UP PriorityTier=2
C
  # Links to a device that does nothing stand for GPUs: Slurm wants device files, and nothing opens them.
  for k in $(seq 0 7); do ln -s /dev/null "$dir/gpu$k"; done
  echo "NodeName=n[1-$nodes] Name=gpu File=$dir/gpu[0-7]" >"$dir/gres.conf"
  head -c 1024 /dev/urandom >"$dir/munge.key"; chmod 600 "$dir/munge.key"
  munged --force --socket="$dir/munge.socket" --key-file="$dir/munge.key" --pid-file="$dir/munged.pid" \
    --log-file="$dir/log/munged.log" --seed-file="$dir/munge.seed"
  export SLURM_CONF=$dir/slurm.conf
  slurmctld
  for k in $(seq "$nodes"); do unshare -m sh -c 'mount --bind "$1" /etc/hosts && exec slurmd -N "$2"' - "$dir/hosts" "n$k"; done
  for _ in $(seq 60); do [ "$(sinfo -h -p main -t idle -o %D 2>/dev/null)" = "$nodes" ] && exit 0; sleep 1; done
  sinfo >&2; tail -n 5 "$dir"/log/*.log >&2; exit 1 ;;
down)
  dir=$1; export SLURM_CONF=$dir/slurm.conf
  timeout 10 scancel -u root 2>/dev/null || true
  for _ in $(seq 50); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep .2; done
  for file in "$dir"/slurmd-n*.pid "$dir/slurmctld.pid" "$dir/munged.pid"; do
    [ -f "$file" ] && kill -9 "$(cat "$file")" 2>/dev/null || true  # What they would save goes with the folder.
  done
  rm -rf "$dir" ;;
*) sed -n '2,6s/^# \?//p' "$0"; exit 2 ;;
esac
