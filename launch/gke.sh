#!/usr/bin/env bash
# A learner on TPU slices and vLLM samplers on GPUs, on Google Kubernetes Engine: launch/gke.sh [--dry_run] ACTION [launch's arguments]
#
#   apply    creates or updates token, samplers and learner; a learner that is there already is left as it is
#   show     prints the filled-in manifests, but for the token
#   scale    COUNT: so many samplers, of which the learner gets to know by itself
#   status   what there is of it; logs follows the first learner
#   restart  ends the learner and starts it again, with these arguments, from its last checkpoint
#   delete   removes all of it; the claim, with checkpoints, stays
#
#   NAME             of this run (jaxrl), NAMESPACE where it lives (default)
#   LEARNER_IMAGE, SAMPLER_IMAGE      built from launch/Dockerfile.learner and launch/Dockerfile.sampler, best named by digest
#   CLAIM            PersistentVolumeClaim, ReadWriteMany, that learner and samplers see as /shared
#   MODEL            folder below /shared, or Hugging Face id
#   TPU_ACCELERATOR, TPU_TOPOLOGY     such as tpu-v6e-slice and 4x4
#   HOSTS, CHIPS     hosts of a slice, and chips of a host (4): 4x4 has 16 chips, so 4 hosts
#   TPU_SLICES       slices (1)
#   GPU_ACCELERATOR, GPUS             such as nvidia-h100-80gb, and GPUs of a sampler, which the model's heads must divide by; without it the
#                    fewest of GPU_GB gigabytes (80) that hold the model, of a node's SAMPLER_GPUS (8), by the config.json of the folder MODEL_CONFIG
#                    of this host; 1 without that
#   SAMPLERS         how many samplers (2)
#   RELAY_PORT       starts a relay in each sampler's pod, at this port, by which pods pass weights on (none); RELAY_FOLDER in the pod's memory,
#                    which then holds two versions of the model (/dev/shm/jaxrl_llm_relay)
#   SPOT             1 takes preemptible nodes for the samplers
#   SANDBOXES        how many pods run the programs of gin/rewards/code.gin (0), from the learner's image built with EXTRA=tpu,serve;
#                    the learner is told where they are, unless --gin="SANDBOX='http://NAME-sandbox.NAMESPACE.svc:8001'" tells an agent's tool
#   SAVE_S           seconds that a preempted learner has to save (300)
#   JAXRL_LLM_TOKEN  what learners carry; without it the file ~/.jaxrl_llm_token is read
#
# The cluster needs JobSet (kubectl apply --server-side -f .../jobset/releases/...) and a network plugin that enforces policies.
set -euo pipefail
# shellcheck source=launch/steps.sh
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
actions "apply show scale status logs restart delete" "$@"
set -- "${ARGUMENTS[@]}"

NAME=${NAME:-jaxrl} NAMESPACE=${NAMESPACE:-default} CHIPS=${CHIPS:-4} TPU_SLICES=${TPU_SLICES:-1} GPUS=${GPUS:-} RELAY_PORT=${RELAY_PORT:-} RELAY_FOLDER=${RELAY_FOLDER:-} SAMPLER_GPUS=${SAMPLER_GPUS:-8}
SAMPLERS=${SAMPLERS:-2} SPOT=${SPOT:-} SANDBOXES=${SANDBOXES:-0} SAVE_S=${SAVE_S:-300}
need_tools kubectl python3
need NAME "a name for the run"
need NAMESPACE "the namespace"
kubectl=(kubectl --namespace="$NAMESPACE")

# filled FILE: the manifest with its ${NAMES} filled in.
filled() {
  local text name
  shopt -u patsub_replacement 2>/dev/null || true # "&" is a letter like others
  text=$(<"$1")
  for name in NAME NAMESPACE LEARNER_IMAGE SAMPLER_IMAGE CLAIM MODEL TPU_ACCELERATOR TPU_TOPOLOGY HOSTS CHIPS TPU_SLICES \
    GPU_ACCELERATOR GPUS SAMPLERS SANDBOXES SAVE_S SPOT_NODES RELAY_PORT RELAY_FOLDER; do
    text=${text//"\${$name}"/${!name}}
  done
  # shellcheck disable=SC2154
  printf '%s\n' "${text//"\${ARGUMENTS}"/$arguments}"
}

token() {
  printf 'apiVersion: v1\nkind: Secret\nmetadata: {name: %s-token, namespace: %s}\nstringData: {token: "%s"}\n' \
    "$NAME" "$NAMESPACE" "$JAXRL_LLM_TOKEN"
}

prepare() {
  local name
  need LEARNER_IMAGE "the learner's image"
  need SAMPLER_IMAGE "the samplers' image"
  need CLAIM "a ReadWriteMany claim that both see as /shared"
  need MODEL "the model's folder below /shared, or its Hugging Face id"
  need TPU_ACCELERATOR "the TPU node pool's accelerator, such as tpu-v6e-slice"
  need TPU_TOPOLOGY "its topology, such as 4x4"
  need GPU_ACCELERATOR "the GPU node pool's accelerator, such as nvidia-h100-80gb"
  HOSTS=${HOSTS:-} TENSOR_PARALLEL=$GPUS
  choose_split
  GPUS=$TENSOR_PARALLEL
  for name in HOSTS CHIPS TPU_SLICES GPUS SAVE_S; do need_number "$name" 1; done
  need_number SAMPLERS 0
  need_number SANDBOXES 0
  relay_variables
  # shellcheck disable=SC2034
  case $SPOT in
    "") SPOT_NODES= ;;
    1) SPOT_NODES='cloud.google.com/gke-spot: "true"' ;;
    *) die "SPOT is 1 or not set (got $SPOT)" ;;
  esac
  [ $# -gt 0 ] || die "$action needs launch's arguments, such as --gin_file=gin/grpo_gsm8k.gin"
  PUBLICATION=/shared/publication/$NAME
  sampler_flags "VLLM_URLS_DNS='http://$NAME-samplers.$NAMESPACE.svc:9000'"
  # An agent's tools are given the address by a macro of their own; a setting that nothing reads would end the run.
  if [ "$SANDBOXES" -gt 0 ] && [[ " $*" != *" --gin=SANDBOX="* ]]; then
    FLAGS+=("--gin=sandbox/service.Service.urls=('http://$NAME-sandbox.$NAMESPACE.svc:8001',)" "--gin=sandbox/service.Service.token_env='JAXRL_LLM_TOKEN'")
  fi
  # JSON is YAML, and json.dumps quotes whatever an argument holds; Kubernetes itself would read $(NAME).
  arguments=$(python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]).replace("$(", "$$("))' "${FLAGS[@]}" "$@" --gin_file=gin/samplers/vllm.gin)
}

# samplers: the manifest of the samplers, with relays where there are to be some.
samplers() {
  if [ -n "$RELAY_PORT" ]; then filled "$LAUNCH/gke/samplers.yaml"; else filled "$LAUNCH/gke/samplers.yaml" | sed '/^ *# relay: /,/^ *# end of relay$/d'; fi
}

# sandbox: the manifest of the sandbox, where there is to be one.
sandbox() {
  if [ "$SANDBOXES" -gt 0 ]; then filled "$LAUNCH/gke/sandbox.yaml"; fi
}

# create MANIFEST...: applies manifests from standard input; a dry run prints them.
create() {
  if [ -n "$DRY_RUN" ]; then
    printf '%s\n' "kubectl --namespace=$NAMESPACE apply -f -"
    cat
  else
    "${kubectl[@]}" apply -f -
  fi
}

learner() {
  local found
  found=$(asked "" "${kubectl[@]}" get jobset "$NAME-learner" --ignore-not-found --output=name)
  if [ -n "$found" ]; then
    say "$found is there already: '$0 restart' starts it with other arguments"
  else
    filled "$LAUNCH/gke/learner.yaml" | create
  fi
}

gone() { step "${kubectl[@]}" delete jobset "$NAME-learner" --ignore-not-found --wait=true; }

case $action in
  apply)
    prepare "$@"
    read_token
    if [ -n "$DRY_RUN" ]; then say "the Secret $NAME-token is applied first"; else token | create; fi
    samplers | create
    if [ "$SANDBOXES" -gt 0 ]; then sandbox | create; fi
    learner
    ;;
  show)
    prepare "$@"
    samplers
    echo ---
    sandbox
    if [ "$SANDBOXES" -gt 0 ]; then echo ---; fi
    filled "$LAUNCH/gke/learner.yaml"
    ;;
  restart)
    prepare "$@"
    gone
    filled "$LAUNCH/gke/learner.yaml" | create
    ;;
  scale)
    COUNT=${1:-}
    need_number COUNT 0
    step "${kubectl[@]}" scale deployment "$NAME-samplers" --replicas="$COUNT"
    ;;
  status) step "${kubectl[@]}" get jobset,deployment,service,networkpolicy,pods --selector="app.kubernetes.io/instance=$NAME" ;;
  logs)
    first="jobset.sigs.k8s.io/jobset-name=$NAME-learner,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
    step "${kubectl[@]}" logs --follow --tail=100 --selector="$first"
    ;;
  delete)
    gone
    step "${kubectl[@]}" delete deployment,service,networkpolicy "$NAME-samplers" --ignore-not-found
    step "${kubectl[@]}" delete deployment,service,networkpolicy "$NAME-sandbox" --ignore-not-found
    step "${kubectl[@]}" delete networkpolicy "$NAME-learner" --ignore-not-found
    step "${kubectl[@]}" delete secret "$NAME-token" --ignore-not-found
    ;;
esac
