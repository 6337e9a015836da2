"""octavo doctor: looks for what would keep a service from running well, and says what to do about it."""

import importlib.util
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import psutil
import typer
from rich.console import Console
from rich.table import Table

from octavo.cli import options
from octavo.cli.command import Command
from octavo.cli.demo_model import NAME
from octavo.cli.errors import CommandError, ConfigurationError
from octavo.cli.model_store import DEMO, folder_of, is_complete
from octavo.cli.places import check_socket_paths, models_folder, runtime_folder
from octavo.cli.ports import check_port

_PACKAGES = ("octavo", "grpcio", "protobuf", "pyzmq", "msgspec", "tokenizers", "safetensors", "torch", "transformers")
_MIN_PYTHON = (3, 11)
_MIN_MEMORY_BYTES = 2 * 2**30
_MIN_DISK_BYTES = 2**30
_MIN_OPEN_FILES = 1024
_GPU_TIMEOUT_S = 10
_GPU_QUERY = "name,compute_cap,memory.total,memory.free"
_MIN_CAPABILITY = (8, 0)
"""Of backend triton."""
_MIN_GPU_SHARE = 0.9
"""Default of --gpu-memory-utilization: less of it free is not enough for a worker with the defaults."""

_COLORS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}


DEFAULT_HOST, DEFAULT_PORT, DEFAULT_HTTP_PORT = "127.0.0.1", 50051, 8000


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    level: str
    """OK, WARN (runs, but not as well as it could) or FAIL."""
    subject: str
    words: str
    """What was found; where it is not OK, also what helps."""


def doctor(
    host: options.Host = DEFAULT_HOST,
    grpc_port: options.GrpcPort = DEFAULT_PORT,
    http_port: options.HttpPort = DEFAULT_HTTP_PORT,
) -> None:
    """Check this machine: Python, packages, cores, memory, GPU, folders, ports, limits."""
    ports = [_port(host, grpc_port, "gRPC port", "--grpc-port"), _port(host, http_port, "HTTP port", "--http-port")]
    findings = [*(check() for check in _CHECKS), *ports, _open_files()]
    table = Table(show_header=False, box=None, padding=(0, 1))
    for finding in findings:
        color = _COLORS[finding.level]
        table.add_row(f"[{color}]{finding.level}[/{color}]", finding.subject, finding.words)
    Console(soft_wrap=True).print(table)
    if any(finding.level == "FAIL" for finding in findings):
        raise typer.Exit(1)


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _MIN_PYTHON:
        return Finding("FAIL", "Python", f"{found}: install 3.11 or newer")
    return Finding("OK", "Python", f"{found} ({sys.executable})")


def _packages() -> Finding:
    found, absent = [], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            absent.append(name)
    if absent:
        return Finding("FAIL", "packages", f"{', '.join(absent)} absent: run 'make install', or pip install octavo")
    return Finding("OK", "packages", ", ".join(found))


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    if usable < 2:
        return Finding("WARN", "cores", "1: frontend, scheduler and worker will share it; two or more are better")
    return Finding("OK", "cores", str(usable))


def _memory() -> Finding:
    available = psutil.virtual_memory().available
    words = f"{available / 2**30:.1f} GiB available"
    if available < _MIN_MEMORY_BYTES:
        return Finding("WARN", "memory", f"{words}: lower --kv-cache-memory-bytes, or choose a smaller model")
    return Finding("OK", "memory", words)


def _gpu() -> Finding:
    """Ask the driver's own tool: importing torch takes seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("OK", "GPU", "none; the CPU will be used")
    try:
        query = [tool, f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader"]
        listed = subprocess.run(query, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("WARN", "GPU", f"nvidia-smi fails ({error}): check the driver; the CPU will be used")
    if not listed.strip():
        return Finding("OK", "GPU", "none; the CPU will be used")
    remedies = list(dict.fromkeys(remedy for line in listed.splitlines() for remedy in _gpu_remedies(line)))
    if importlib.util.find_spec("triton") is None:
        remedies.append("--backend reference, since triton is absent, or install it")
    words = "; ".join(listed.splitlines())
    return Finding("WARN", "GPU", f"{words}: use {'; '.join(remedies)}") if remedies else Finding("OK", "GPU", words)


def _gpu_remedies(line: str) -> list[str]:
    """Say with which flags a worker runs on the device of this line; none where the defaults do."""
    try:
        _, capability, total, free = (field.strip() for field in line.split(","))
        found = tuple(int(part) for part in capability.split("."))
        share = float(free.split()[0]) / float(total.split()[0])
    except (ValueError, IndexError, ZeroDivisionError):
        return []  # not every driver and device tells everything
    remedies = []
    if found < _MIN_CAPABILITY:
        remedies.append("--backend reference, since backend triton needs compute capability 8.0")
    if share < _MIN_GPU_SHARE:
        remedies.append(f"--gpu-memory-utilization {max(share - 0.05, 0.05):.2f}, since others use the memory")
    return remedies


def _models() -> Finding:
    folder = models_folder()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(parent, os.W_OK):
        return Finding("FAIL", "models", f"{parent} cannot be written: set OCTAVO_HOME to a folder of yours")
    free = shutil.disk_usage(parent).free
    there = "there" if is_complete(folder_of(DEMO)) else "absent ('octavo models fetch demo' fetches it)"
    words = f"{folder}, {free / 2**30:.1f} GiB free; demo model {NAME}: {there}"
    if free < _MIN_DISK_BYTES:
        return Finding("WARN", "models", f"{words}; make room, or set OCTAVO_HOME to a folder on another disk")
    return Finding("OK", "models", words)


def _runtime() -> Finding:
    try:
        folder = runtime_folder()
        check_socket_paths(folder)
    except CommandError as error:
        return Finding("FAIL", "sockets", f"{error}; or set OCTAVO_RUNTIME_DIR to a folder of yours")
    return Finding("OK", "sockets", str(folder))


def _port(host: str, port: int, subject: str, flag: str) -> Finding:
    try:
        check_port(host, port)
    except ConfigurationError as error:
        return Finding("WARN", subject, f"{error}; choose another with {flag}")
    return Finding("OK", subject, f"{host}:{port} is free")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MIN_OPEN_FILES:
        return Finding("WARN", "open files", f"limit {soft} (hard {hard}): raise it with ulimit -n {_MIN_OPEN_FILES}")
    return Finding("OK", "open files", f"limit {soft}")


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _packages,
    _cores,
    _memory,
    _gpu,
    _models,
    _runtime,
)


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(cls=Command)(doctor)
