# shellcheck shell=bash
# What the scripts of this folder share; they source it.

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "error: these scripts need bash 4.4 or newer (this is $BASH_VERSION)" >&2
  exit 2
fi
shopt -s inherit_errexit

LAUNCH=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck disable=SC2034
ROOT=$(dirname "$LAUNCH")
TOKEN_FILE=${TOKEN_FILE:-$HOME/.jaxrl_llm_token}
DRY_RUN=${DRY_RUN:-}

say() { printf '%s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 2
}

# Prints the comment at the head of the script, without its first line, and leaves.
usage() {
  sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
  exit "$1"
}

# need_tools NAME...: all are on PATH.
need_tools() {
  local tool
  for tool in "$@"; do
    command -v "$tool" >/dev/null || die "$tool is not on PATH; install it first"
  done
}

# need NAME MEANING: the variable is set, to letters, digits and ._:/@,+=- alone, so that it is safe in a manifest.
need() {
  local value=${!1:-}
  [ -n "$value" ] || die "set $1: $2"
  plain "$1"
}

plain() {
  [[ ${!1} =~ ^[A-Za-z0-9._:/@,+=-]*$ ]] || die "$1 may hold letters, digits and ._:/@,+=- alone (got ${!1})"
}

# need_number NAME LEAST: the variable is an integer.
need_number() {
  if ! [[ ${!1} =~ ^[0-9]+$ ]] || [ "${!1}" -lt "$2" ]; then
    die "$1 must be an integer >= $2 (got ${!1})"
  fi
}

# servers_of_host: sets SERVERS to how many servers of TENSOR_PARALLEL GPUs share the SAMPLER_GPUS of a host.
servers_of_host() {
  need_number SAMPLER_GPUS 1
  need_number TENSOR_PARALLEL 1
  [ $((SAMPLER_GPUS % TENSOR_PARALLEL)) -eq 0 ] ||
    die "TENSOR_PARALLEL=$TENSOR_PARALLEL leaves $((SAMPLER_GPUS % TENSOR_PARALLEL)) of SAMPLER_GPUS=$SAMPLER_GPUS idle: give a divisor"
  # shellcheck disable=SC2034
  SERVERS=$((SAMPLER_GPUS / TENSOR_PARALLEL))
}

# choose_split: sets TENSOR_PARALLEL, where it is not set, to the fewest of a host's SAMPLER_GPUS, of GPU_GB gigabytes each, that hold the
# model and that its heads can be split over, by the config.json of MODEL or of MODEL_CONFIG, a folder of this host.
choose_split() {
  if [ -n "${TENSOR_PARALLEL:-}" ]; then return; fi
  local folder=${MODEL_CONFIG:-${MODEL:-}}
  GPU_GB=${GPU_GB:-80}
  need_number SAMPLER_GPUS 1
  need_number GPU_GB 1
  if [ ! -r "$folder/config.json" ]; then
    TENSOR_PARALLEL=1
    say "there is no config.json of the model here ($folder), so a server takes one GPU: set TENSOR_PARALLEL, or MODEL_CONFIG to a folder with it"
    return
  fi
  need_tools python3
  TENSOR_PARALLEL=$(python3 "$LAUNCH/tensor_sizes.py" "$folder" auto "$SAMPLER_GPUS" "$GPU_GB") || exit 2
  say "a server takes $TENSOR_PARALLEL of the $SAMPLER_GPUS GPUs of a host"
}

# check_split PYTHON: refuses a TENSOR_PARALLEL over which MODEL cannot be split; one GPU takes any model, and is not looked up.
check_split() {
  if [ "$TENSOR_PARALLEL" -gt 1 ]; then "$1" "$LAUNCH/tensor_sizes.py" "$MODEL" "$TENSOR_PARALLEL" || exit 2; fi
}

# step COMMAND...: runs it; a dry run prints it.
step() {
  if [ -n "$DRY_RUN" ]; then
    printf '%s\n' "$(quoted "$@")"
  else
    "$@"
  fi
}

# asked DEFAULT COMMAND...: what a command that changes nothing prints; a dry run prints the command and takes DEFAULT.
asked() {
  local default=$1
  shift
  if [ -n "$DRY_RUN" ]; then
    printf '%s\n' "$(quoted "$@")" >&2
    printf '%s\n' "$default"
  else
    "$@"
  fi
}

# quoted WORD...: the words as a shell reads them back.
quoted() {
  local line
  printf -v line '%q ' "$@"
  printf '%s' "${line% }"
}

# The token that proxies and learners share, from JAXRL_LLM_TOKEN or the file; at least 16 characters.
read_token() {
  if [ -z "${JAXRL_LLM_TOKEN:-}" ] && [ -r "$TOKEN_FILE" ]; then
    JAXRL_LLM_TOKEN=$(<"$TOKEN_FILE")
  fi
  [[ ${JAXRL_LLM_TOKEN:-} =~ ^[A-Za-z0-9._~+/=-]{16,}$ ]] ||
    die "set JAXRL_LLM_TOKEN, or write $TOKEN_FILE, to a random token of at least 16 letters and digits: openssl rand -hex 32"
  export JAXRL_LLM_TOKEN
}

# options "$@": takes --dry_run and --help off the front; ARGUMENTS holds the rest.
options() {
  while [ $# -gt 0 ]; do
    case $1 in
      --dry_run) DRY_RUN=1 ;;
      -h | --help) usage 0 ;;
      *) break ;;
    esac
    shift
  done
  # shellcheck disable=SC2034
  ARGUMENTS=("$@")
}

# actions WORDS "$@": takes the action, one of the words, off the front as well.
actions() {
  local known=$1
  shift
  options "$@"
  # shellcheck disable=SC2034
  action=${ARGUMENTS[0]:-none}
  [[ " $known " == *" $action "* ]] || usage 2 >&2
  ARGUMENTS=("${ARGUMENTS[@]:1}")
}

# await_samplers SECONDS URL...: returns when every proxy answers. curl reads the token from a pipe: no list of processes shows it.
await_samplers() {
  local url until=$((SECONDS + $1)) most=$1
  shift
  for url in "$@"; do
    if [ -n "$DRY_RUN" ]; then
      printf '%s\n' "curl $url/health  # until it answers, at most $most s"
      continue
    fi
    until sampler_answers "$url"; do
      [ "$SECONDS" -lt "$until" ] || die "$url does not answer after $most s: look at the sampler's log"
      sleep "${POLL_S:-5}"
    done
    say "$url answers"
  done
}

sampler_answers() {
  printf 'header = "Authorization: Bearer %s"\n' "$JAXRL_LLM_TOKEN" |
    curl --silent --fail --max-time 5 --output /dev/null --noproxy '*' --config - "$1/health"
}

# sampler_flags BINDING: sets FLAGS to launch's flags for a learner whose samplers BINDING says, behind their proxies, with relays at RELAY_PORT.
sampler_flags() {
  # shellcheck disable=SC2034
  FLAGS=(--gin="VLLM_SPAWN=False" --gin="$1" --gin="PUBLICATION='$PUBLICATION'"
    --gin="vllm.VllmSampler.proxied=True" --gin="vllm.VllmSampler.api_key_variable='JAXRL_LLM_TOKEN'")
  if [ -n "${RELAY_PORT:-}" ]; then FLAGS+=(--gin="VLLM_RELAY_PORT=$RELAY_PORT"); fi
}

# relay_variables: sets RELAY to the variables by which launch/sampler.sh starts a host's relay; to nothing where RELAY_PORT is not set.
relay_variables() {
  # shellcheck disable=SC2034
  RELAY=()
  [ -n "${RELAY_PORT:-}" ] || return 0
  need_number RELAY_PORT 1
  RELAY_FOLDER=${RELAY_FOLDER:-/dev/shm/jaxrl_llm_relay}
  plain RELAY_FOLDER
  # shellcheck disable=SC2034
  RELAY=("RELAY_PORT=$RELAY_PORT" "RELAY_FOLDER=$RELAY_FOLDER")
}

# url_list URL...: the binding of a list of samplers.
url_list() {
  local urls
  printf -v urls "'%s'," "$@"
  printf 'VLLM_URLS=(%s)' "$urls"
}
