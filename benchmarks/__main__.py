"""python -m benchmarks [NAME ...]: run the benchmarks, by default all that need no GPU."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOR_GPUS = ("gpu_", "h200")
NAMES = sorted(p.stem for p in HERE.glob("*.py") if not p.stem.startswith("_"))


def main() -> None:
    """Run each benchmark as a process of its own."""
    wanted = sys.argv[1:] or [name for name in NAMES if not name.startswith(FOR_GPUS)]
    if unknown := [name for name in wanted if name not in NAMES]:
        sys.exit(f"unknown: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    for name in wanted:
        print(f"# {name}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True, cwd=HERE.parent)


if __name__ == "__main__":
    main()
