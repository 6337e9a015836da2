"""Prove that the wheel stands on its own.

link VENV: let VENV see the dependencies of this environment, but not its editable Octavo.
check ROOT: in VENV, from another folder: all packages import, come from VENV, and have their data files.
"""

import importlib
import sys
import sysconfig
import tomllib
from pathlib import Path


def link(venv: Path) -> None:
    """Write a .pth file with the site-packages of the running interpreter; editable finders there are not followed."""
    (target,) = (venv / "lib").glob("python*/site-packages")
    (target / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")


def check(root: Path) -> None:
    """Import everything that pyproject.toml lists."""
    packages = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    for name in packages:
        module = importlib.import_module(name)
        place = Path(module.__file__ or "")
        if not place.is_relative_to(sys.prefix):
            raise SystemExit(f"{name} comes from {place}, not from the wheel")
        for source in (p for p in _folder(root, name).glob("*.py")):
            if not (place.parent / source.name).exists():
                raise SystemExit(f"{source} is missing from the wheel")
    v1 = Path(importlib.import_module("octavo.v1").__file__ or "").parent
    for wanted in ("generation.proto", "admin.proto", "generation_pb2.pyi", "generation_pb2_grpc.pyi", "py.typed"):
        if not (v1 / wanted).exists():
            raise SystemExit(f"{wanted} is missing from octavo.v1 in the wheel")
    for name in ("octavo.frontend.main", "octavo.scheduler.main", "octavo.cli.main", "octavo.v1.generation_pb2_grpc"):
        importlib.import_module(name)
    print(f"{len(packages)} packages of the wheel import from {sys.prefix}")


def _folder(root: Path, package: str) -> Path:
    folders = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    return root / folders[package]


if __name__ == "__main__":
    {"link": link, "check": check}[sys.argv[1]](Path(sys.argv[2]))
