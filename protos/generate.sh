#!/usr/bin/env bash
# Write the Python stubs of octavo.v1, with type stubs, beside the .proto files; --check only says whether they are stale.
# --baseline writes baseline.binpb anew, the description that later changes must not break: only at a release.
# Needs grpcio-tools and mypy-protobuf of the dev group, from .venv or, without it, from PATH.
set -euo pipefail
cd "$(dirname "$0")"
PATH="$(dirname "$PWD")/.venv/bin:$PATH"

generate() {
  python -m grpc_tools.protoc -I. --python_out="$1" --grpc_python_out="$1" --mypy_out="$1" --mypy_grpc_out="$1" \
    octavo/v1/*.proto
}

case "${1:-}" in
  "")
    generate .
    ;;
  --check)
    fresh=$(mktemp -d)
    trap 'rm -rf "$fresh"' EXIT
    generate "$fresh" 2>"$fresh/messages" || { cat "$fresh/messages" >&2; exit 1; }
    for file in octavo/v1/*_pb2*.py octavo/v1/*_pb2*.pyi; do
      [ -e "$fresh/$file" ] || { echo "protos/$file has no .proto: remove it" >&2; exit 1; }
    done
    for file in "$fresh"/octavo/v1/*; do
      if ! diff -u "octavo/v1/${file##*/}" "$file" >"$fresh/diff" 2>&1; then
        head -20 "$fresh/diff" >&2
        echo "protos/octavo/v1/${file##*/} is stale: run 'make protos' and commit" >&2
        exit 1
      fi
    done
    echo "The stubs are up to date."
    ;;
  --baseline)
    (cd .. && buf build --exclude-source-info -o protos/baseline.binpb)
    ;;
  *)
    echo "usage: generate.sh [--check | --baseline]" >&2
    exit 2
    ;;
esac
