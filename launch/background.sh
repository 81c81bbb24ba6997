#!/usr/bin/env bash
# Keeps one command of a name going on this host after the connection that started it has ended.
#
#   launch/background.sh [--dry_run] start NAME COMMAND...   starts it, unless it runs
#   launch/background.sh [--dry_run] status NAME             says whether it runs (exit code 0) or not (1)
#   launch/background.sh [--dry_run] tail NAME [LINES]       the end of its log, and what follows, until it ends
#   launch/background.sh [--dry_run] stop NAME               SIGTERM to its process group, and after STOP_S seconds (120) SIGKILL to all of it
#
# Its process group's number and its log are in KEEP (~/.jaxrl_llm). --dry_run prints what would be run, and leaves all as it is.
set -euo pipefail
# shellcheck source=launch/steps.sh
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
options "$@"
[ ${#ARGUMENTS[@]} -ge 2 ] || usage 2 >&2
action=${ARGUMENTS[0]} NAME=${ARGUMENTS[1]}
command=("${ARGUMENTS[@]:2}")
case $NAME in -*) die "the action is followed by a name, not by an option (got $NAME): --dry_run comes before the action" ;; esac
plain NAME
KEEP=${KEEP:-$HOME/.jaxrl_llm} STOP_S=${STOP_S:-120}
number=$KEEP/$NAME.pid log=$KEEP/$NAME.log
boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null || true) # numbers of processes mean nothing after it

# The number of the process, which its group has too, if it lives. A zombie, which nobody may take away in a container, does not.
group() {
  local found began facts
  [ -r "$number" ] && read -r found began <"$number" && [ "$began" = "$boot" ] &&
    read -r facts 2>/dev/null <"/proc/$found/stat" && [[ ${facts##*) } != [ZX]* ]] && printf '%s' "$found"
}

case $action in
  start)
    [ ${#command[@]} -gt 0 ] || die "start needs a command"
    if found=$(group); then
      say "$NAME runs already (process $found); its log is $log"
      exit
    fi
    step mkdir -p "$KEEP"
    if [ -n "$DRY_RUN" ]; then
      printf '%s >>%q 2>&1 </dev/null &\n' "$(quoted setsid nohup "${command[@]}")" "$log"
      exit
    fi
    printf -- '--- %s %s\n' "$(date +%FT%T%z)" "$(quoted "${command[@]}")" >>"$log"
    setsid nohup "${command[@]}" >>"$log" 2>&1 </dev/null &
    echo "$! $boot" >"$number"
    say "$NAME runs (process $!); its log is $log"
    ;;
  status)
    found=$(group) || { say "$NAME does not run; its log is $log"; exit 1; }
    say "$NAME runs (process $found); its log is $log"
    ;;
  tail)
    [ -r "$log" ] || die "there is no $log: start $NAME first"
    following=()
    if found=$(group); then following=(-f --pid="$found"); fi
    step exec tail -n "${command[0]:-50}" "${following[@]}" "$log"
    ;;
  stop)
    found=$(group) || { say "$NAME does not run"; exit 0; }
    step kill -TERM -- "-$found"
    [ -z "$DRY_RUN" ] || exit 0
    for _ in $(seq $((STOP_S * 10))); do
      group >/dev/null || { say "$NAME has ended"; exit 0; }
      sleep 0.1
    done
    for stat in /proc/[0-9]*/stat; do # of its session: a part may have a group of its own
      read -r facts 2>/dev/null <"$stat" || continue
      read -r _ _ _ session _ <<<"${facts##*) }"
      [ "$session" != "$found" ] || kill -KILL "$(basename "$(dirname "$stat")")" 2>/dev/null || true
    done
    while group >/dev/null; do sleep 0.1; done
    say "$NAME did not end within $STOP_S s and was killed"
    ;;
  *) usage 2 >&2 ;;
esac
