#!/usr/bin/env bash
# Whether an address of this host answers with 200: launch/healthy.sh URL. Carries JAXRL_LLM_TOKEN, where it is set.
set -euo pipefail
# shellcheck source=launch/steps.sh
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
options "$@"
[ ${#ARGUMENTS[@]} -eq 1 ] || usage 2 >&2
exec "${SAMPLER_PYTHON:-python3}" -c '
import os, sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer " + os.environ.get("JAXRL_LLM_TOKEN", "")})
urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=4)
' "${ARGUMENTS[0]}"
