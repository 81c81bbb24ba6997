#!/usr/bin/env bash
# vLLM samplers on GPU hosts that are reached by SSH: launch/gpu_samplers.sh [--dry_run] ACTION [arguments]
#
#   setup    copies the committed source to every host, and the token, and adds the package to the Python that has vLLM
#   start    starts the samplers of every host, a server for each GPU or for each TENSOR_PARALLEL of them, unless they run
#   status   says of every sampler whether it runs and answers
#   tail     HOST [NUMBER]: follows the log of one (0)
#   stop     ends the samplers
#   scale    COUNT: starts so many of them in the order of the hosts, ends the others, and writes the addresses to URLS_FILE
#   run      setup, start, waits until all answer, and starts a learner on this host with the arguments that follow
#
#   SAMPLER_HOSTS      what ssh calls the hosts, separated by blanks: "gpu1 me@gpu2"
#   SAMPLER_ADDRESSES  addresses of a private network at which the proxies listen, in the same order; without it the hosts'
#                      names without user
#   MODEL              folder on the hosts, or Hugging Face id
#   PUBLICATION        folder for weights that learner and hosts see, or an address such as gs://BUCKET/FOLDER
#   SAMPLER_PYTHON     Python on the hosts that has vLLM (python3)
#   SAMPLER_GPUS       GPUs of each host (8)
#   TENSOR_PARALLEL    GPUs of one server, which the model's heads must divide by; without it the fewest of GPU_GB gigabytes (80) that
#                      hold the model, by the config.json of MODEL, or of the folder MODEL_CONFIG where MODEL is not seen here
#   PORT, VLLM_PORT    those of the first server of a host, as launch/sampler.sh takes them; the others follow
#   RELAY_PORT         starts a relay on each host, at this port, by which hosts pass weights on; RELAY_FOLDER as launch/sampler.sh takes it
#   VLLM_ARGUMENTS     further arguments of vLLM, separated by blanks
#   JAXRL_LLM_TOKEN    what learners must carry; without it the file ~/.jaxrl_llm_token is read
#   READY_S            most seconds until the samplers answer (1200)
#   URLS_FILE          file of this host for the addresses of the samplers there are, which `run` has the learner read again and again
set -euo pipefail
# shellcheck source=launch/steps.sh
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
actions "setup start status tail stop run scale" "$@"
set -- "${ARGUMENTS[@]}"

SAMPLER_PYTHON=${SAMPLER_PYTHON:-python3} PORT=${PORT:-9000} VLLM_PORT=${VLLM_PORT:-8000}
READY_S=${READY_S:-1200} SAMPLER_GPUS=${SAMPLER_GPUS:-8}
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
need_number VLLM_PORT 1
case $action in
  start | run | scale) need MODEL "the folder of the model on the hosts, or its Hugging Face id" ;;
esac
choose_split
servers_of_host
relay_variables
case $action in
  setup | status | run | scale) read_token ;;
esac
if [ "$action" = run ]; then
  need PUBLICATION "the folder for weights that this host and the samplers see, or an address such as gs://BUCKET/FOLDER"
  [ $# -gt 0 ] || die "run needs launch's arguments, such as --gin_file=gin/grpo_gsm8k.gin"
fi
if [ "$action" = scale ]; then
  COUNT=${1:-}
  need_number COUNT 1
  [ "$COUNT" -le $((${#hosts[@]} * SERVERS)) ] || die "there is room for $((${#hosts[@]} * SERVERS)) samplers on ${#hosts[@]} hosts (got $COUNT)"
  [ -n "${URLS_FILE:-}" ] || die "set URLS_FILE: the file that the learner reads the samplers' addresses from (VLLM_URLS_FILE)"
fi
urls=() # of the first host's servers, then of the second's
for address in "${addresses[@]}"; do
  for ((number = 0; number < SERVERS; number++)); do urls+=("http://$address:$((PORT + number))"); done
done

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
  local i number variables
  # Every host is checked, by its last server, before one is started.
  for i in "${!hosts[@]}"; do
    variables=("MODEL=$MODEL" "TENSOR_PARALLEL=$TENSOR_PARALLEL" "SAMPLER_PYTHON=$SAMPLER_PYTHON" "NUMBER=$((SERVERS - 1))" ONLY=check)
    on "${hosts[i]}" "$(quoted env "${variables[@]}" jaxrl_llm/launch/sampler.sh)"
  done
  for ((number = 0; number < ${#urls[@]}; number++)); do start_one "$number"; done
}

# start_one PLACE: the sampler at a place of `urls`, unless it runs.
start_one() {
  local i=$(($1 / SERVERS)) number=$(($1 % SERVERS)) variables
  variables=("MODEL=$MODEL" "LISTEN=${addresses[i]}" "PORT=$PORT" "VLLM_PORT=$VLLM_PORT" "TENSOR_PARALLEL=$TENSOR_PARALLEL"
    "SAMPLER_PYTHON=$SAMPLER_PYTHON" "NUMBER=$number" "${RELAY[@]}")
  on "${hosts[i]}" "$(quoted env "${variables[@]}" jaxrl_llm/launch/background.sh start "sampler-$number" jaxrl_llm/launch/sampler.sh "${more[@]}")"
}

# write_urls COUNT: the addresses of the first samplers to URLS_FILE, which is whole at every moment.
write_urls() {
  if [ -n "$DRY_RUN" ]; then
    printf '%s\n' "printf '%s\n' ${urls[*]:0:$1} >$URLS_FILE"
  else
    printf '%s\n' "${urls[@]:0:$1}" >"$URLS_FILE.$$"
    mv "$URLS_FILE.$$" "$URLS_FILE"
  fi
}

# Those that are to end are taken off the list before; what they have in flight they hand back.
scale() {
  local place
  for ((place = 0; place < COUNT; place++)); do start_one "$place"; done
  await_samplers "$READY_S" "${urls[@]:0:$COUNT}"
  write_urls "$COUNT"
  for ((place = COUNT; place < ${#urls[@]}; place++)); do
    on "${hosts[place / SERVERS]}" "jaxrl_llm/launch/background.sh stop sampler-$((place % SERVERS))"
  done
}

status() {
  local i number url
  for i in "${!hosts[@]}"; do
    for ((number = 0; number < SERVERS; number++)); do
      on "${hosts[i]}" "jaxrl_llm/launch/background.sh status sampler-$number" || true
      url=${urls[i * SERVERS + number]}
      if [ -z "$DRY_RUN" ] && sampler_answers "$url"; then say "$url answers"; else say "$url does not answer"; fi
    done
  done
}

# All servers of a host are asked to end at once.
stop() {
  local host
  for host in "${hosts[@]}"; do
    on "$host" "for number in \$(seq 0 $((SERVERS - 1))); do jaxrl_llm/launch/background.sh stop sampler-\$number & done; wait"
  done
}

run() {
  setup
  start
  await_samplers "$READY_S" "${urls[@]}"
  if [ -n "${URLS_FILE:-}" ]; then
    write_urls ${#urls[@]}
    sampler_flags "VLLM_URLS_FILE='$URLS_FILE'"
  else
    sampler_flags "$(url_list "${urls[@]}")"
  fi
  step "$LAUNCH/learner.sh" "${FLAGS[@]}" "$@" --gin_file=gin/samplers/vllm.gin
}

case $action in
  setup | start | status | stop | scale) "$action" ;;
  run) run "$@" ;;
  tail) on "${1:?name the host}" "$(quoted jaxrl_llm/launch/background.sh tail "sampler-${2:-0}")" ;;
esac
