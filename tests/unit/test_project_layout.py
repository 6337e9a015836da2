"""The packaging tells the truth about the folders: what works in a checkout must also be in the wheel."""

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("cli", "frontend", "scheduler", "worker", "kernels", "protos/octavo/wire", "protos/octavo/v1")


def settings() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        tool: dict[str, object] = tomllib.load(file)["tool"]["setuptools"]
    return tool


def package_of(folder: Path) -> str:
    parts = folder.relative_to(ROOT).parts
    return ".".join(parts[1:] if parts[0] == "protos" else ("octavo", *parts))


def package_folders() -> dict[str, str]:
    """Return every folder that holds Python files, by its package."""
    found = {}
    for source in SOURCES:
        for path in (ROOT / source).rglob("*.py"):
            found[package_of(path.parent)] = str(path.parent.relative_to(ROOT))
    return found


def test_every_folder_is_packaged() -> None:
    tool = settings()
    assert sorted(package_folders()) == sorted(tool["packages"])  # type: ignore[call-overload]
    assert package_folders() == tool["package-dir"]


@pytest.mark.parametrize("folder", package_folders().values())
def test_every_package_has_an_init(folder: str) -> None:
    assert (ROOT / folder / "__init__.py").is_file()


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_is_typed_and_seen_by_the_type_checker(source: str) -> None:
    assert (ROOT / source / "py.typed").is_file()
    link = ROOT / ".typing" / "octavo" / Path(source).name
    assert link.is_symlink()
    assert link.resolve() == ROOT / source


def test_nothing_shadows_the_namespace() -> None:
    """`octavo` is a namespace package: an __init__.py in it would hide the other folders."""
    spec = find_spec("octavo")
    assert spec is not None
    assert spec.origin is None


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("octavo.frontend.main", ("torch", "transformers")),
        ("octavo.scheduler.main", ("torch", "transformers", "grpc")),
        ("octavo.worker.main", ("transformers", "grpc")),
        ("octavo.cli.main", ("torch", "transformers", "grpc")),
    ],
)
def test_a_process_does_not_load_what_it_must_not(module: str, banned: tuple[str, ...]) -> None:
    """Also not through something else that it imports."""
    program = f"import sys, {module}; print([name for name in {banned!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "[]\n"


def test_folders_of_tests_are_no_packages() -> None:
    """In importlib mode an __init__.py would give a test module two names."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
