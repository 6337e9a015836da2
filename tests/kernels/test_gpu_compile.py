"""The kernels for packed weights compile for the GPU that they are made for, with its matrix instructions, without one."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

PROGRAM = """
import json, re, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from octavo.kernels.gpu.quantized_product import packed_kernel

def built(case):
    half, tile = case["half"], case["tile"]
    kinds = {"x": f"tensordesc<{half}[{tile[1]},{tile[2] * 128}]>", "words": "*i16", "metas": "*i32", "scales": "*fp32",
             "bias": f"*{half}", "addend": "*fp32", "out": f"*{half}", "partials": "*fp32", "counters": "*i32"}
    kinds |= dict.fromkeys(("num_tokens", "num_outputs", "num_rows", "num_blocks", "split"), "i32")
    constants = {"KIND": case["kind"], "LAYOUT": tuple(case["layout"]), "STRIDES": tuple(case["strides"]),
                 "TILE": tuple(tile), "WAYS": case["ways"], "ACTIVATION": "silu", "HAS": tuple(case["has"]),
                 "OVERLAP": True}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(1, 11) if place != 9}
    source = ASTSource(packed_kernel, kinds | dict.fromkeys(constants, "constexpr"), constants, aligned)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": case["warps"], "launch_pdl": True})

words = "wgmma.mma_async", "mma.sync", "cp.async.cg.shared.global", "griddepcontrol.wait"
result = {}
for name, case in json.loads(sys.argv[1]).items():
    kernel = built(case)
    layouts = dict(re.findall(r"(#\\w+) = #ttg.linear<{register = (\\[\\[.*?\\]\\])", kernel.asm["ttgir"]))
    used = re.findall(r"inline_asm .*packed_element = 2.*?: tensor<\\S+?, (#\\w+)>", kernel.asm["ttgir"])
    result[name] = {word: word in kernel.asm["ptx"] for word in words}
    result[name] |= {"shared": kernel.metadata.shared, "pairs": [layouts[layout] for layout in used]}
print(json.dumps(result))
"""

FOUR_BITS = {"kind": 0, "layout": [4, 32, 128], "strides": [32, 2048], "warps": 4, "half": "fp16", "ways": 1}
CASES: dict[str, dict[str, Any]] = {
    "few tokens": FOUR_BITS | {"tile": [128, 8, 2, 3, 4], "has": [False, False, False, True]},
    "gated": FOUR_BITS | {"tile": [128, 16, 2, 3, 4], "has": [False, True, False, True], "half": "bf16", "ways": 2},
    "many tokens": FOUR_BITS | {"tile": [128, 256, 1, 3, 4], "has": [False] * 4, "warps": 8},
    "table": FOUR_BITS | {"tile": [64, 16, 1, 3, 4], "has": [False, False, True, False], "kind": 1},
    "float8": FOUR_BITS
    | {"tile": [64, 16, 1, 3, 4], "has": [True, False, False, True], "kind": 2, "layout": [8, 64, 128], "half": "bf16"}
    | {"strides": [2048, 64]},
}
SHARED_MEMORY = 227 * 1024


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    """Compile in a process of its own: here kernels may have been made for the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_packed_weights_compile(compiled: dict[str, dict[str, Any]], name: str) -> None:
    found = compiled[name]
    many = CASES[name]["tile"][1] >= 16
    assert (found["wgmma.mma_async"], found["mma.sync"]) == (many, not many)
    assert found["cp.async.cg.shared.global"]  # 16 bytes at a time
    assert found["griddepcontrol.wait"]
    assert found["shared"] <= SHARED_MEMORY
    # Registers of two words hold neighbours of one output, which the assembly of tables relies on.
    assert found["pairs"]
    assert all(layout.startswith("[[0, 0, 1], ") for layout in found["pairs"])
