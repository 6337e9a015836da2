"""Kernels as machine code: compiled by LLVM for this processor when they are first needed, and run on torch's threads."""

import ctypes
import logging
import os
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding, ir

from octavo.kernels.cpu.code import FIRST

logger = logging.getLogger(__name__)

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_THREADING_LIBRARIES = ("libgomp", "libiomp", "libomp")


@dataclass(frozen=True)
class Kernel:
    """A function that takes the address of its arguments."""

    address: int
    call: Callable[[Any], None]


@dataclass(frozen=True)
class _Team:
    """What runs a kernel on so many threads at once."""

    name: str
    run: Callable[[Kernel, Any, int], None]


class _Machine:
    """The processor that code is made for."""

    def __init__(self) -> None:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        features = binding.get_host_cpu_features()
        has = features.get
        self.width = 16 if has("avx512f") else 8 if has("avx2") and has("fma") else 4
        target = binding.Target.from_default_triple()
        self._target_machine = target.create_target_machine(
            cpu=binding.get_host_cpu_name(), features=features.flatten(), opt=3, jit=True
        )
        logger.info(
            "kernels of the CPU are compiled for %s, %d-bit vectors, and run on %s",
            binding.get_host_cpu_name(),
            self.width * 32,
            _team().name,
        )
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), self._target_machine)
        self._lock = threading.Lock()

    def compile(self, module: Any, name: str) -> Kernel:
        """Compile a module; return the address of a function of it. The code stays as long as the process."""
        with self._lock:
            parsed = binding.parse_assembly(str(module))
            parsed.verify()
            # The code says itself what is a vector and what is unrolled: passes that look for more only take time.
            options = binding.create_pipeline_tuning_options(speed_level=1)
            options.loop_vectorization = options.slp_vectorization = False
            options.loop_unrolling = options.loop_interleaving = False
            builder = binding.create_pass_builder(self._target_machine, options)
            builder.getModulePassManager().run(parsed, builder)
            self._engine.add_module(parsed)
            self._engine.finalize_object()
            address = int(self._engine.get_function_address(name))
        return Kernel(address, _ENTRY(address))


@cache
def _machine() -> _Machine:
    return _Machine()


def vector_width() -> int:
    """Return how many floats the vectors of this processor hold."""
    return _machine().width


def compiled(name: str, write: Callable[[Any, int], None]) -> Kernel:
    """Compile a kernel.

    Args:
        name: of its function.
        write: writes it, and what it calls, into a module; gets the width of vectors as well.
    """
    machine = _machine()
    module = ir.Module(name)
    module.triple = binding.get_default_triple()
    write(module, machine.width)
    return machine.compile(module, name)


def launch(kernel: Kernel, num_chunks: int, arguments: tuple[int, ...], *, alone: bool = False) -> None:
    """Run a kernel over chunks 0 ... num_chunks - 1, which the threads take one by one; return when all are done.

    Args:
        kernel: from `compiled`.
        num_chunks: how many there are.
        arguments: its own: addresses, counts, and what `real` makes of floats.
        alone: on this thread: what is less work than to wake another.
    """
    memory = (ctypes.c_int64 * (FIRST + len(arguments)))(0, 0, num_chunks, *arguments)
    threads = 1 if alone else min(num_chunks, torch.get_num_threads())
    if threads <= 1:
        kernel.call(memory)
    else:
        _team().run(kernel, memory, threads)


@lru_cache(maxsize=256)
def real(value: float) -> int:
    """Return an argument that a kernel sees as a double."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def num_threads() -> int:
    """Return the threads that a launch has at most; each gets a number below it."""
    return torch.get_num_threads()


@cache
def _team() -> _Team:
    """Return what runs a kernel on several threads: those of torch where its OpenMP is found, else threads of Python."""
    library = _openmp()
    if library is None:
        return _Team("threads of Python", _python_threads)
    parallel = library.GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None

    def run(kernel: Kernel, arguments: Any, threads: int) -> None:
        parallel(kernel.address, arguments, threads, 0)

    return _Team("torch's threads", run)


def _openmp() -> Any:
    """Return the OpenMP library that torch has loaded: two of them in a process would fight for the cores."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None  # not Linux
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/") and ".so" in line}
    for path in sorted(paths):
        if Path(path).name.startswith(_THREADING_LIBRARIES):
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            if hasattr(library, "GOMP_parallel"):
                return library
    return None


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="kernels")


def _python_threads(kernel: Kernel, arguments: Any, threads: int) -> None:
    waiting = [_pool().submit(kernel.call, arguments) for _ in range(threads - 1)]
    kernel.call(arguments)
    for future in waiting:
        future.result()
