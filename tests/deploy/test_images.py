"""The Dockerfile, and that what the images are made of is locked as pyproject.toml asks."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKER_ONLY = {"torch", "triton", "transformers", "accelerate", "gguf", "llvmlite"}
LEFT_OUT = {
    "frontend": WORKER_ONLY,
    "worker-cpu": {"torch", "triton"},  # torch comes from constraints/cpu.txt; the CPU backend has no Triton
    "worker-gpu": set[str](),
}


def locked(name: str) -> dict[str, str]:
    """Return the versions of a lock by name; each must have its hashes."""
    text = (ROOT / "constraints" / f"{name}.txt").read_text()
    found: dict[str, str] = {}
    for name_, version, _ in re.findall(r"^([\w.-]+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)$", text, re.M):
        found[canonicalize_name(name_)] = version
    assert len(found) == len(re.findall(r"^\w", text, re.M))
    return found


@pytest.mark.parametrize("name", LEFT_OUT)
def test_locks_hold_what_the_project_needs(name: str) -> None:
    project = PROJECT["project"]
    needs = [Requirement(line) for line in project["dependencies"] + project["optional-dependencies"]["otel"]]
    versions = locked(name)
    for need in needs:
        if canonicalize_name(need.name) in LEFT_OUT[name]:
            assert canonicalize_name(need.name) not in versions
            continue
        assert canonicalize_name(need.name) in versions, f"{need.name} is not locked: run deploy/lock.sh"
        version = versions[canonicalize_name(need.name)]
        assert need.specifier.contains(version, prereleases=True), f"{need} is locked as {version}: run deploy/lock.sh"


def test_locks_agree_and_the_builder_is_locked() -> None:
    frontend, cpu, gpu = (locked(name) for name in LEFT_OUT)
    assert frontend.items() <= cpu.items()
    assert {name: gpu[name] for name in cpu} == cpu
    (backend,) = map(Requirement, PROJECT["build-system"]["requires"])
    assert backend.specifier.contains(locked("build")[backend.name])


def test_hadolint_has_nothing_to_say() -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not there: pip install --group containers")
    done = subprocess.run(
        [program, "--no-color", "deploy/Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def stages() -> dict[str, tuple[str, str]]:
    """Return by name what each stage is from, and its lines."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.M)[1:]
    return {name: (base, text) for base, name, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


def test_images_hold_no_tools_to_build_with_and_run_as_a_user() -> None:
    found = stages()
    for target in ("frontend", "worker-cpu", "worker-gpu"):
        base, text = found[target]
        assert base == "base"
        assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", text, re.M)
        assert set(re.findall(r"image\.(\w+)=", text)) >= {"title", "description", "licenses", "version", "revision"}
        assert ("gcc" in text) is (target == "worker-gpu")
        assert "pip" not in re.sub(r"#.*", "", text)
    assert re.fullmatch(r"debian:\d+\.\d+-slim", re.findall(r"^ARG BASE_IMAGE=(.*)$", DOCKERFILE, re.M)[0])


def test_the_version_is_the_projects() -> None:
    version = PROJECT["project"]["version"]
    assert set(re.findall(r"^ARG VERSION=(.*)$", DOCKERFILE, re.M)) == {version}
    assert f"OCTAVO_VERSION={version}\n" in (ROOT / ".env").read_text()


def test_every_package_reaches_the_builder() -> None:
    folders = {path.split("/")[0] for path in PROJECT["tool"]["setuptools"]["package-dir"].values()}
    ignore = (ROOT / ".dockerignore").read_text()
    for folder in folders:
        assert f"\n!{folder}\n" in ignore
        assert re.search(rf"^COPY {folder} {folder}$", DOCKERFILE, re.M)
