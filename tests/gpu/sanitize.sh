#!/usr/bin/env bash
# Every operation once, and random traffic through the runner without graphs, under compute-sanitizer.
#
#   sanitize.sh [SECONDS]    limit of each of the three runs, 100 by default
#
# memcheck finds accesses outside of allocations, which are made one by one for it; racecheck, hazards in shared memory.
# Exit code 0: nothing was found and nothing was cut short.
set -uo pipefail
cd "$(dirname "$0")/../.."

limit=${1:-100}
python=${PYTHON:-python3}
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
export PYTHONPATH=$PWD/.typing${PYTHONPATH:+:$PYTHONPATH}
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # an allocation for each tensor: whatever lies behind it is not ours
export OCTAVO_TEST_STEPS=20
pytest=("$python" -m pytest -q -p no:cacheprovider)
operations=tests/gpu/test_canaries.py
traffic=(tests/gpu/test_long_run.py -k "writes and eager and bfloat16")
failed=0

# What is compiled now is not compiled under the tool, which would take minutes.
"${pytest[@]}" "$operations" "${traffic[@]}" >"$log/plain" 2>&1 || { tail -n 20 "$log/plain"; echo "plain: FAILED"; exit 1; }

# $1: name; $2: tool; the rest: tests
check() {
  local name=$1 tool=$2 code began=$SECONDS
  shift 2
  timeout --signal=INT --kill-after=10 "$limit" compute-sanitizer --tool "$tool" --report-api-errors no --print-limit 20 \
    --error-exitcode 9 --target-processes all "${pytest[@]}" "$@" >"$log/$name" 2>&1
  code=$?
  case $code in
    0) words=clean ;;
    124 | 137) words="CUT SHORT after $limit s" ;;
    *) words="FAILED ($code)" ;;
  esac
  printf '%-24s %-28s %4d s   %s\n' "$name" "$words" $((SECONDS - began)) \
    "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY| passed| failed' "$log/$name" | tr -d '=' | tr '\n' ' ')"
  if [ "$code" -ne 0 ]; then
    failed=1
    grep -vE '^(\.|$)' "$log/$name" | head -n 40
  fi
}

check memcheck-operations memcheck "$operations"
check memcheck-runner memcheck "${traffic[@]}"
check racecheck-attention racecheck "$operations" -k "paged_attention"
exit "$failed"
