#!/usr/bin/env bash
# vLLM samplers on GPU hosts that are reached by SSH: launch/gpu_samplers.sh [--dry_run] ACTION [arguments]
#
#   setup    copies the committed source to every host, and the token, and adds the package to the Python that has vLLM
#   start    starts a sampler on every host, unless it runs
#   status   says of every host whether its sampler runs and answers
#   tail     HOST: follows the log of one
#   stop     ends the samplers
#   run      setup, start, waits until all answer, and starts a learner on this host with the arguments that follow
#
#   SAMPLER_HOSTS      what ssh calls the hosts, separated by blanks: "gpu1 me@gpu2"
#   SAMPLER_ADDRESSES  addresses of a private network at which the proxies listen, in the same order; without it the hosts'
#                      names without user
#   MODEL              folder on the hosts, or Hugging Face id
#   PUBLICATION        folder for weights that learner and hosts see, or an address such as gs://BUCKET/FOLDER
#   SAMPLER_PYTHON     Python on the hosts that has vLLM (python3)
#   PORT, TENSOR_PARALLEL, VLLM_PORT   as launch/sampler.sh takes them
#   VLLM_ARGUMENTS     further arguments of vLLM, separated by blanks
#   JAXRL_LLM_TOKEN    what learners must carry; without it the file ~/.jaxrl_llm_token is read
#   READY_S            most seconds until the samplers answer (1200)
set -euo pipefail
# shellcheck source=launch/steps.sh
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
actions "setup start status tail stop run" "$@"
set -- "${ARGUMENTS[@]}"

SAMPLER_PYTHON=${SAMPLER_PYTHON:-python3} PORT=${PORT:-9000} VLLM_PORT=${VLLM_PORT:-8000} TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}
READY_S=${READY_S:-1200}
need_tools ssh git curl
[ -n "${SAMPLER_HOSTS:-}" ] || die "set SAMPLER_HOSTS: what ssh calls the hosts, separated by blanks"
read -ra hosts <<<"$SAMPLER_HOSTS"
read -ra addresses <<<"${SAMPLER_ADDRESSES:-${hosts[*]#*@}}"
read -ra more <<<"${VLLM_ARGUMENTS:-}"
[ ${#addresses[@]} -eq ${#hosts[@]} ] ||
  die "SAMPLER_ADDRESSES has ${#addresses[@]} addresses for ${#hosts[@]} hosts: name one for each"
for host in "${hosts[@]}" "${addresses[@]}"; do
  case $host in -*) die "SAMPLER_HOSTS and SAMPLER_ADDRESSES hold names, not options (got $host)" ;; esac
  plain host
done
plain SAMPLER_PYTHON
need_number PORT 1
case $action in
  start | run) need MODEL "the folder of the model on the hosts, or its Hugging Face id" ;;
esac
case $action in
  setup | status | run) read_token ;;
esac
if [ "$action" = run ]; then
  need PUBLICATION "the folder for weights that this host and the samplers see, or an address such as gs://BUCKET/FOLDER"
  [ $# -gt 0 ] || die "run needs launch's arguments, such as --gin_file=gin/grpo_gsm8k.gin"
fi
urls=("${addresses[@]/#/http://}")
urls=("${urls[@]/%/:$PORT}")

# on HOST COMMAND: runs a shell command there.
on() { step ssh -o BatchMode=yes "$1" "$2"; }

setup() {
  local host
  for host in "${hosts[@]}"; do
    if [ -n "$DRY_RUN" ]; then
      printf '%s\n' "git archive HEAD | ssh $host 'tar -x -C jaxrl_llm'" "ssh $host 'cat >.jaxrl_llm_token'  # the token, by standard input"
    else
      git -C "$ROOT" archive --format=tar HEAD | ssh -o BatchMode=yes "$host" 'mkdir -p jaxrl_llm && tar -x -C jaxrl_llm'
      printf '%s' "$JAXRL_LLM_TOKEN" | ssh -o BatchMode=yes "$host" 'umask 077 && cat >.jaxrl_llm_token && chmod 600 .jaxrl_llm_token'
    fi
    on "$host" "$SAMPLER_PYTHON -m pip install --quiet --no-deps ./jaxrl_llm && $SAMPLER_PYTHON -m pip install --quiet numpy ml_dtypes 'tensorstore>=0.1.77'"
  done
}

start() {
  local i variables
  for i in "${!hosts[@]}"; do
    variables=("MODEL=$MODEL" "LISTEN=${addresses[i]}" "PORT=$PORT" "VLLM_PORT=$VLLM_PORT" "TENSOR_PARALLEL=$TENSOR_PARALLEL"
      "SAMPLER_PYTHON=$SAMPLER_PYTHON")
    on "${hosts[i]}" "$(quoted env "${variables[@]}" jaxrl_llm/launch/background.sh start sampler jaxrl_llm/launch/sampler.sh "${more[@]}")"
  done
}

run() {
  setup
  start
  await_samplers "$READY_S" "${urls[@]}"
  sampler_flags "$(url_list "${urls[@]}")"
  step "$LAUNCH/learner.sh" "${FLAGS[@]}" "$@" --gin_file=gin/samplers/vllm.gin
}

case $action in
  setup | start) "$action" ;;
  run) run "$@" ;;
  status)
    for i in "${!hosts[@]}"; do
      on "${hosts[i]}" "jaxrl_llm/launch/background.sh status sampler" || true
      if [ -z "$DRY_RUN" ] && sampler_answers "${urls[i]}"; then
        say "${urls[i]} answers"
      else
        say "${urls[i]} does not answer"
      fi
    done
    ;;
  tail) on "${1:?name the host}" "jaxrl_llm/launch/background.sh tail sampler" ;;
  stop) for host in "${hosts[@]}"; do on "$host" "jaxrl_llm/launch/background.sh stop sampler"; done ;;
esac
