#!/usr/bin/env bash
# Classifiers on this host, a server for each GPU, for rewards that ask many of them: launch/classifiers.sh [--dry_run] ACTION
#
#   start            starts them, unless they run, waits until all answer, and prints the binding for a run
#   status           says of every server whether it runs and answers
#   tail [NUMBER]    follows the log of one (0)
#   stop             ends them
#
#   MODEL        folder or Hugging Face id of the classifier
#   SERVER       "vllm" (vLLM's /classify, which takes ids of tokens) or "own" (this package's, which takes texts and pairs) (vllm)
#   GPUS         how many servers (8): one for each of the first GPUs that CUDA_VISIBLE_DEVICES names (without it: of all)
#   PORT         that of the first server (8000); the others follow
#   PYTHON       the Python that has vLLM, or this package (python3)
#   MORE         further arguments of each server, separated by blanks, such as "--max-model-len 4096"
#   MACRO        the macro of the printed binding (PARTITION_URLS); REWARD_URLS for a reward model
#   READY_S      most seconds until they answer (600)
#
# They listen on loopback: a run on another host reaches them through a tunnel (ssh -L), or through a proxy of yours.
set -euo pipefail
# shellcheck source=launch/steps.sh
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
actions "start status tail stop" "$@"

SERVER=${SERVER:-vllm} GPUS=${GPUS:-8} PORT=${PORT:-8000} PYTHON=${PYTHON:-python3} MACRO=${MACRO:-PARTITION_URLS} READY_S=${READY_S:-600}
need_number GPUS 1
need_number PORT 1
need_number READY_S 1
plain MACRO
read -ra more <<<"${MORE:-}"
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"; else mapfile -t devices < <(seq 0 $((GPUS - 1))); fi
[ ${#devices[@]} -ge "$GPUS" ] || die "GPUS=$GPUS servers need as many GPUs, and CUDA_VISIBLE_DEVICES names ${#devices[@]}: lower GPUS"
urls=()
for ((number = 0; number < GPUS; number++)); do urls+=("http://127.0.0.1:$((PORT + number))"); done

# answers URL: whether the server there is healthy.
answers() { curl --silent --fail --max-time 5 --output /dev/null --noproxy '*' "$1/health"; }

start() {
  local number server until=$((SECONDS + READY_S))
  need MODEL "the folder or Hugging Face id of the classifier"
  need_tools "$PYTHON" curl
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # of PyTorch: with one for each core, those of several servers wait for one another
  for ((number = 0; number < GPUS; number++)); do
    case $SERVER in
      vllm) server=(-m vllm.entrypoints.openai.api_server --model "$MODEL" --served-model-name similarity --runner pooling) ;;
      own) server=(-m jaxrl_llm.rewards.services.classifier_server --model "$MODEL" --device cuda) ;;
      *) die "SERVER must be vllm or own (got $SERVER)" ;;
    esac
    step "$LAUNCH/background.sh" start "classifier-$number" env "CUDA_VISIBLE_DEVICES=${devices[number]}" "$PYTHON" "${server[@]}" \
      --host 127.0.0.1 --port $((PORT + number)) "${more[@]}"
  done
  for ((number = 0; number < GPUS; number++)); do
    if [ -n "$DRY_RUN" ]; then
      printf '%s\n' "curl ${urls[number]}/health  # until it answers, at most $READY_S s"
      continue
    fi
    until answers "${urls[number]}"; do
      "$LAUNCH/background.sh" status "classifier-$number" 2>/dev/null || die "classifier-$number has ended: look at launch/classifiers.sh tail $number"
      [ "$SECONDS" -lt "$until" ] || die "${urls[number]} does not answer after $READY_S s: look at launch/classifiers.sh tail $number"
      sleep "${POLL_S:-5}"
    done
    say "${urls[number]} answers"
  done
  printf -- "--gin=\"%s=(%s)\"\n" "$MACRO" "$(printf "'%s'," "${urls[@]}")"
}

status() {
  local number
  for ((number = 0; number < GPUS; number++)); do
    "$LAUNCH/background.sh" status "classifier-$number" || true
    if answers "${urls[number]}"; then say "${urls[number]} answers"; else say "${urls[number]} does not answer"; fi
  done
}

# All are asked to end at once.
stop() {
  local number
  for ((number = 0; number < GPUS; number++)); do step "$LAUNCH/background.sh" stop "classifier-$number" & done
  wait
}

case $action in
  start | status | stop) "$action" ;;
  tail) step "$LAUNCH/background.sh" tail "classifier-${ARGUMENTS[0]:-0}" ;;
esac
