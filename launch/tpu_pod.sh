#!/usr/bin/env bash
# A learner on a Cloud TPU pod, or on several slices: launch/tpu_pod.sh [--dry_run] ACTION [launch's arguments]
#
#   create   asks for the pod by a queued resource, unless it is there, and waits until it is ready; with launch's arguments it first
#            compiles the run's programs for that pod here, says their memory a chip, and asks for none that is too small
#   setup    copies the committed source to every host and installs it, where it is not the same already
#   run      starts launch on every host, unless it runs
#   up       create, setup and run: the whole way
#   resume   as up, after removing what is left of a pod that was preempted or failed
#   status   state of the queued resource, and whether the run goes on
#   tail     follows the log of the first host
#   stop     ends the run: it saves first
#   delete   gives the pod back
#
#   PROJECT, ZONE    Google Cloud's project and zone
#   TPU_NAME         name of the queued resource and of its nodes (NAME-0, NAME-1, ... where there are several slices)
#   TPU_TYPE         such as v6e-64 or v5p-128; TPU_RUNTIME its software, such as v2-alpha-tpuv6e
#   TPU_SLICES       slices (1); SPOT=1 asks for spot capacity
#   TPU_NETWORK, TPU_SUBNETWORK, TPU_ACCOUNT   network, subnetwork and service account, where not the defaults
#   PYTHON_VERSION   of the hosts' environment (3.12)
#   CHECK            Python that has jaxrl-llm[aot-tpu] here and compiles (python3); 0 compiles nothing
#   WAIT_S           most seconds until the pod is ready (86400)
#   ENVIRONMENT      names of variables to hand to the hosts (of those that are set here), such as "HF_HOME GSM8K_PATH"; not of
#                    secrets: they go on a command line
#   JAXRL_LLM_COMPILED  folder for compiled programs that every host sees, such as gs://BUCKET/compiled: a restart compiles nothing
#   JAXRL_LLM_TOKEN  the samplers' token, where there are samplers; it is copied to a file that its owner alone can read
#
# RUN_DIR must be a place that every host sees: a mounted file system, or a bucket.
set -euo pipefail
# shellcheck source=launch/steps.sh
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
actions "create setup run up resume status tail stop delete" "$@"
set -- "${ARGUMENTS[@]}"

TPU_SLICES=${TPU_SLICES:-1} PYTHON_VERSION=${PYTHON_VERSION:-3.12} WAIT_S=${WAIT_S:-86400} CHECK=${CHECK:-python3} POLL_S=${POLL_S:-30}
need_tools gcloud git
need PROJECT "the Google Cloud project"
need ZONE "the zone, such as us-east5-a"
need TPU_NAME "a name for the pod"
need_number TPU_SLICES 1
plain PYTHON_VERSION
case $action in
  create | up | resume)
    need TPU_TYPE "the accelerator type, such as v6e-64"
    need TPU_RUNTIME "the runtime version, such as v2-alpha-tpuv6e"
    ;;
esac
case $action in
  run | up | resume) [ $# -gt 0 ] || die "$action needs launch's arguments, such as --gin_file=gin/grpo_gsm8k.gin" ;;
esac
if [ -n "${JAXRL_LLM_TOKEN:-}" ]; then read_token; fi
place=(--project="$PROJECT" --zone="$ZONE")
queued=(gcloud compute tpus queued-resources)

nodes() {
  local number
  if [ "$TPU_SLICES" -eq 1 ]; then
    printf '%s\n' "$TPU_NAME"
  else
    for ((number = 0; number < TPU_SLICES; number++)); do printf '%s\n' "$TPU_NAME-$number"; done
  fi
}

# on WORKER NODE COMMAND...: runs a shell command on a node's host, or on all of them.
on() {
  local worker=$1 node=$2
  step gcloud compute tpus tpu-vm ssh "$node" "${place[@]}" --worker="$worker" --command="$3"
}

# State of the queued resource: ACTIVE, WAITING_FOR_RESOURCES, SUSPENDED, ...; GONE where there is none. A dry run takes $1.
state() {
  local found
  found=$(asked "$1" "${queued[@]}" list "${place[@]}" --filter="name~(^|/)$TPU_NAME\$" --format='value(state.state)')
  printf '%s\n' "${found:-GONE}"
}

# Says what the run needs of the pod that is not there yet, by TPU's own compiler.
check() {
  local target=$TPU_TYPE
  if [ $# -eq 0 ] || [ "$CHECK" = 0 ]; then return; fi
  if [ "$TPU_SLICES" -gt 1 ]; then target="$TPU_SLICES*$TPU_TYPE"; fi
  if [[ $TPU_TYPE != v6e-* && $TPU_TYPE != v5p-* ]]; then
    say "warning: the run's memory on $target is not known: programs are compiled for v6e and v5p alone"
    return
  fi
  if [ -z "$DRY_RUN" ] && ! (cd "$ROOT" && "$CHECK" -c 'import jaxrl_llm, libtpu') 2>/dev/null; then
    say "warning: the run's memory on $target is not known: $CHECK has no jaxrl-llm[aot-tpu]; install it, or set CHECK to a Python that has it"
    return
  fi
  (cd "$ROOT" && step "$CHECK" -m jaxrl_llm.launch --dry_run --topology="$target" "$@") ||
    die "the run does not do on $target: see above; CHECK=0 asks for the pod all the same"
}

create() {
  local found arguments=(--accelerator-type="$TPU_TYPE" --runtime-version="$TPU_RUNTIME")
  if [ "$TPU_SLICES" -eq 1 ]; then
    arguments+=(--node-id="$TPU_NAME")
  else
    arguments+=(--node-count="$TPU_SLICES" --node-prefix="$TPU_NAME")
  fi
  if [ -n "${SPOT:-}" ]; then arguments+=(--spot); fi
  if [ -n "${TPU_NETWORK:-}" ]; then arguments+=(--network="$TPU_NETWORK"); fi
  if [ -n "${TPU_SUBNETWORK:-}" ]; then arguments+=(--subnetwork="$TPU_SUBNETWORK"); fi
  if [ -n "${TPU_ACCOUNT:-}" ]; then arguments+=(--service-account="$TPU_ACCOUNT"); fi
  found=$(state GONE)
  case $found in
    GONE)
      check "$@"
      step "${queued[@]}" create "$TPU_NAME" "${place[@]}" "${arguments[@]}"
      ;;
    SUSPENDED | SUSPENDING | FAILED) die "$TPU_NAME is $found: '$0 resume' makes it anew, '$0 delete' removes it" ;;
    *) say "$TPU_NAME is there already: $found" ;;
  esac
  await
}

await() {
  local found until=$((SECONDS + WAIT_S)) listed=$((SECONDS + 120))
  while :; do
    found=$(state ACTIVE)
    case $found in
      ACTIVE) say "$TPU_NAME is ready" && return ;;
      SUSPENDED | FAILED) die "$TPU_NAME is $found: '$0 resume' makes it anew, '$0 delete' removes it" ;;
      GONE) [ "$SECONDS" -lt "$listed" ] || die "$TPU_NAME is not listed: was it deleted meanwhile?" ;;
    esac
    [ "$SECONDS" -lt "$until" ] || die "$TPU_NAME is still $found after $WAIT_S s; it stays in the queue: try again, or '$0 delete'"
    say "$TPU_NAME is $found"
    sleep "$POLL_S"
  done
}

# Where the archive's checksum is the one that was installed, nothing is done. uv brings the Python, which images lack.
INSTALL='set -eu; cd; sum=$(sha256sum jaxrl_llm.tar.gz)
if [ "$(cat jaxrl_llm/.installed 2>/dev/null)" = "$sum" ]; then echo "installed already"; exit; fi
mkdir -p jaxrl_llm; tar -xzf jaxrl_llm.tar.gz -C jaxrl_llm; cd jaxrl_llm
python3 -m uv --version >/dev/null 2>&1 || python3 -m pip install --quiet --user uv
[ -x .venv/bin/python ] || python3 -m uv venv --python PYTHON_VERSION .venv
python3 -m uv pip install --quiet --python .venv/bin/python -e ".[tpu,datasets]"
echo "$sum" >.installed'

setup() {
  local folder node
  folder=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$folder'" EXIT
  step git -C "$ROOT" archive --format=tar.gz --output="$folder/jaxrl_llm.tar.gz" HEAD
  for node in $(nodes); do
    step gcloud compute tpus tpu-vm scp "$folder/jaxrl_llm.tar.gz" "$node:jaxrl_llm.tar.gz" "${place[@]}" --worker=all
    if [ -n "${JAXRL_LLM_TOKEN:-}" ]; then
      (umask 077 && printf '%s' "$JAXRL_LLM_TOKEN" >"$folder/.jaxrl_llm_token")
      step gcloud compute tpus tpu-vm scp "$folder/.jaxrl_llm_token" "$node:.jaxrl_llm_token" "${place[@]}" --worker=all --scp-flag=-p
    fi
    on all "$node" "${INSTALL/PYTHON_VERSION/$PYTHON_VERSION}"
  done
}

run() {
  local node name variables=()
  for name in ${ENVIRONMENT:-} JAXRL_LLM_COMPILED; do
    if [ -n "${!name:-}" ]; then variables+=("$name=${!name}"); fi
  done
  for node in $(nodes); do
    on all "$node" "cd jaxrl_llm && $(quoted env "${variables[@]}" launch/background.sh start learner launch/learner.sh "$@")"
  done
}

delete() {
  local found
  found=$(state ACTIVE)
  if [ "$found" = GONE ]; then
    say "there is no $TPU_NAME"
  else
    step "${queued[@]}" delete "$TPU_NAME" "${place[@]}" --force --quiet
  fi
}

# Whether every node of an active resource is there: a preempted one may stay ACTIVE for a while.
whole() {
  local node found
  for node in $(nodes); do
    found=$(asked READY gcloud compute tpus tpu-vm list "${place[@]}" --filter="name~(^|/)$node\$" --format='value(state)')
    [ "$found" = READY ] || return 1
  done
}

resume() {
  local found
  found=$(state SUSPENDED)
  case $found in
    ACTIVE) if ! whole; then delete; fi ;;
    SUSPENDED | SUSPENDING | FAILED) delete ;;
  esac
  create
  setup
  run "$@"
}

first=$(nodes | head -n 1)
case $action in
  setup | delete) "$action" ;;
  create | run | resume) "$action" "$@" ;;
  up)
    create "$@"
    setup
    run "$@"
    ;;
  status)
    found=$(state ACTIVE)
    say "$TPU_NAME is $found"
    on 0 "$first" "jaxrl_llm/launch/background.sh status learner"
    ;;
  tail) on 0 "$first" "jaxrl_llm/launch/background.sh tail learner" ;;
  stop)
    stopping=()
    for node in $(nodes); do
      on all "$node" "jaxrl_llm/launch/background.sh stop learner" &
      stopping+=($!)
    done
    status=0
    for process in "${stopping[@]}"; do wait "$process" || status=$?; done
    exit "$status"
    ;;
esac
