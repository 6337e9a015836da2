#!/usr/bin/env bash
# Write the locked dependencies of the images (constraints/*.txt but cpu.txt) anew, from pyproject.toml.
# Needs uv (pip install uv). What is locked already stays as it is where pyproject.toml allows it; --upgrade takes newer.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Debian 12's Python. Files for every architecture have their hashes in the lock.
compile() { # NAME INPUT [MORE...]
  local name=$1 input=$2
  shift 2
  if [[ -f constraints/$name.txt ]]; then cp "constraints/$name.txt" "$work/$name.txt"; fi
  uv pip compile --quiet --python-version 3.11 --python-platform linux --generate-hashes --no-annotate --no-header \
    --output-file "$work/$name.txt" "$@" "${upgrade[@]}" "$input"
  {
    echo "# Written by deploy/lock.sh: change pyproject.toml, or run it with --upgrade."
    cat "$work/$name.txt"
  } >"constraints/$name.txt"
}

upgrade=("$@")

# The frontend and the scheduler run without these, and xgrammar, which names them, is used without what needs them.
cat >"$work/no-torch" <<'EOF'
torch; python_version < "3"
triton; python_version < "3"
transformers; python_version < "3"
EOF
# The CPU image takes torch from another index, by constraints/cpu.txt.
head -n 2 "$work/no-torch" >"$work/torch-apart"

python3 - "$work" <<'EOF'
import re, sys, tomllib
from pathlib import Path

work = Path(sys.argv[1])
project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
needs = project["dependencies"] + project["optional-dependencies"]["otel"]
name = lambda line: re.match(r"[\w.-]+", line)[0].lower().replace("_", "-")
worker_only = {"torch", "triton", "transformers", "accelerate", "gguf", "llvmlite"}
(work / "frontend.in").write_text("\n".join(line for line in needs if name(line) not in worker_only) + "\n")
(work / "worker-gpu.in").write_text("\n".join([*needs, "torch==2.11.0"]) + "\n")  # what the GPU path is measured with
(work / "worker-cpu.in").write_text("\n".join([*needs, "sympy", "networkx"]) + "\n")  # torch's own needs
(work / "build.in").write_text("setuptools\n")
EOF

compile build "$work/build.in"
compile frontend "$work/frontend.in" --override "$work/no-torch"
compile worker-cpu "$work/worker-cpu.in" --override "$work/torch-apart"
compile worker-gpu "$work/worker-gpu.in"
