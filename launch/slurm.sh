#!/usr/bin/env bash
# Submits a run to Slurm, learner nodes and sampler nodes in one allocation: launch/slurm.sh [--dry_run] [launch's arguments]
#
#   LEARNER_NODES, LEARNER_GPUS   nodes of the learner (1), GPUS of each (8); one process a node
#   SAMPLER_NODES, SAMPLER_GPUS   nodes of vLLM samplers (0: the embedded sampler), GPUS of each (8)
#   TENSOR_PARALLEL               GPUS of one server, which the model's heads must divide by; without it the fewest of GPU_GB gigabytes (80)
#                                 that hold the model, by the config.json of MODEL, or of the folder MODEL_CONFIG where MODEL is not seen here
#   MODEL, SAMPLER_PYTHON         as launch/sampler.sh takes them
#   PUBLICATION                   folder of a shared file system for weights; without it RUN_ROOT/publication
#   RELAY_PORT                    starts a relay on each sampler node, at this port, by which nodes pass weights on; RELAY_FOLDER as launch/sampler.sh takes it
#   RUN_ROOT                      folder of a shared file system for logs (runs/slurm below the source)
#   JOB_NAME (jaxrl_llm), TIME (24:00:00), PARTITION, SAMPLER_PARTITION, ACCOUNT, QOS
#   SAVE_S                        seconds before the end of TIME, or of a preemption, at which the run is told to save (300)
#
# A run that was preempted, or lost a host, is queued again under the same number and goes on from its last checkpoint.
# `squeue`, `scancel NUMBER` and `tail -f RUN_ROOT/JOB_NAME-NUMBER.log` are Slurm's own.
set -euo pipefail
# shellcheck source=launch/steps.sh
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
options "$@"
set -- "${ARGUMENTS[@]}"
[ $# -gt 0 ] || usage 2 >&2

LEARNER_NODES=${LEARNER_NODES:-1} LEARNER_GPUS=${LEARNER_GPUS:-8} SAMPLER_NODES=${SAMPLER_NODES:-0} SAMPLER_GPUS=${SAMPLER_GPUS:-8}
RUN_ROOT=${RUN_ROOT:-$ROOT/runs/slurm} JOB_NAME=${JOB_NAME:-jaxrl_llm} TIME=${TIME:-24:00:00} SAVE_S=${SAVE_S:-300}
need_tools sbatch
need_number LEARNER_NODES 1
need_number LEARNER_GPUS 0
need_number SAMPLER_NODES 0
if [ "$SAMPLER_NODES" -gt 0 ]; then
  need MODEL "the folder or Hugging Face id of the model, for the samplers"
  choose_split
fi
TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}
servers_of_host
need_number SAVE_S 1
for name in RUN_ROOT JOB_NAME TIME; do plain "$name"; done
export LEARNER_NODES SAMPLER_NODES TENSOR_PARALLEL SERVERS RUN_ROOT ROOT

job=(--job-name="$JOB_NAME" --time="$TIME" --requeue --open-mode=append --output="$RUN_ROOT/%x-%j.log" --signal="TERM@$SAVE_S"
  ${ACCOUNT:+--account="$ACCOUNT"} ${QOS:+--qos="$QOS"})
learner=(--nodes="$LEARNER_NODES" --ntasks-per-node=1 --exclusive ${PARTITION:+--partition="$PARTITION"})
if [ "$LEARNER_GPUS" -gt 0 ]; then learner+=(--gpus-per-node="$LEARNER_GPUS"); fi
samplers=()
if [ "$SAMPLER_NODES" -gt 0 ]; then
  export MODEL PUBLICATION=${PUBLICATION:-$RUN_ROOT/publication} SAMPLER_PYTHON=${SAMPLER_PYTHON:-python3}
  plain PUBLICATION
  relay_variables
  if [ ${#RELAY[@]} -gt 0 ]; then export RELAY_PORT RELAY_FOLDER; fi
  # A model that this host does not see is checked by launch/sampler.sh.
  if [ -r "$MODEL/config.json" ]; then
    need_tools python3
    check_split python3
  fi
  other=${SAMPLER_PARTITION:-${PARTITION:-}}
  samplers=(: --nodes="$SAMPLER_NODES" --ntasks-per-node="$SERVERS" --gpus-per-node="$SAMPLER_GPUS" --exclusive ${other:+--partition="$other"})
fi
step mkdir -p "$RUN_ROOT" ${PUBLICATION:+"$PUBLICATION"}
step sbatch "${job[@]}" "${learner[@]}" "${samplers[@]}" "$LAUNCH/slurm.sbatch" "$@"
