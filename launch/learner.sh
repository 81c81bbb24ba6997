#!/usr/bin/env bash
# Starts this host's process of a learner: launch/learner.sh [launch's arguments]
#
#   PYTHON                   the Python to use; without it ROOT/.venv's, else python3
#   JAX_COORDINATOR_ADDRESS  host:port of the first process, JAX_NUM_PROCESSES, JAX_PROCESS_ID: where JAX does not find them
#                            by itself, as it does on TPU pods and on GKE. Under Slurm the number of the process is its task's.
#   JAXRL_LLM_TOKEN          token of the samplers' proxies; without it the file ~/.jaxrl_llm_token is read, if it is there
#
# With --dry_run, launch prints the plan of the run.
set -euo pipefail
# shellcheck source=launch/steps.sh
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
case ${1:-} in -h | --help) usage 0 ;; esac

if [ -z "${PYTHON:-}" ]; then
  PYTHON=$ROOT/.venv/bin/python
  [ -x "$PYTHON" ] || PYTHON=python3
fi
need_tools "$PYTHON"
if [ -n "${JAX_COORDINATOR_ADDRESS:-}" ]; then
  export JAX_PROCESS_ID=${JAX_PROCESS_ID:-${SLURM_PROCID:-}}
  need JAX_NUM_PROCESSES "how many processes the learner has"
  need JAX_PROCESS_ID "the number of this process, from 0"
fi
if [ -n "${JAXRL_LLM_TOKEN:-}" ] || [ -r "$TOKEN_FILE" ]; then
  read_token
fi
cd "$ROOT"
ulimit -l 68719476736 2>/dev/null || true # TPU hosts lock memory; a container may have too low a limit
export PYTHONUNBUFFERED=1
# One process alone needs no coordinator; where a launcher says nothing, JAX knows whether it is on a pod.
if [ "${JAX_NUM_PROCESSES:-}" != 1 ] && [ -z "${SINGLE_HOST:-}" ]; then
  set -- --distributed "$@"
fi
exec "$PYTHON" -m jaxrl_llm.launch "$@"
