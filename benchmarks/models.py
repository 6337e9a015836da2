"""Parity of every architecture in every format, as the table of docs/models.md: python -m benchmarks.models

For each architecture a tiny random model is written by transformers, and each of its layers' matrices in each format by
tests/support/quantized.py, which draws what a format can hold and reads it with numpy. transformers then computes
logits from the numbers, Octavo from the files: a prompt in odd chunks, then token by token, on the backend `cpu` (fused and
packed as when serving) in fp32, but for the column bfloat16. The program writes the table between the marks of the
document, and rows with --out FILE.
"""

import argparse
import copy
import json
import logging
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as theirs_logging

from benchmarks._record import record
from octavo.worker.errors import ModelConfigError
from tests.support import quantized
from tests.support.architectures import CONFIGS, KINDS, base_values, logits_of, write_with_transformers
from tests.support.tiny_models import load_eager

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- parity: begin -->", "<!-- parity: end -->"
NUM_TOKENS = 60
CHUNKS = [23, 1, 16, 7, *([1] * 13)]
GROUP = 16

_OF_A_LAYER = re.compile(r"(.*\.)?(layers|h)\.\d+\..*\.weight")
_ROUTERS = re.compile(r".*\.(mlp|block_sparse_moe)\.(gate|shared_expert_gate)\.weight")
_SCALES = ("lookup_table", "vals", "weight_scale")
"""Tensors of a format that its numbers are proportional to."""


@dataclass(frozen=True)
class Format:
    """How a checkpoint says that it is quantised, and what draws a layer of it."""

    config: dict[str, Any]
    draw: quantized.Draw
    factor: float = 1.0  # a power of two that makes numbers of the size that layers have


FORMATS = {
    "GPTQ": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
        quantized.gptq(4, GROUP),
    ),
    "GPTQ, desc_act": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
        quantized.gptq(4, GROUP, desc_act=True),
    ),
    "AWQ": Format(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        quantized.awq_gemm(GROUP),
    ),
    "SqueezeLLM": Format({"quant_method": "squeezellm", "wbits": 4}, quantized.squeezellm(4, sparse=True), 0.125),
    "fp8": Format({"quant_method": "fp8", "activation_scheme": "dynamic"}, quantized.fp8("tensor"), 0.125),
}


@dataclass(frozen=True)
class Cell:
    """What came of one architecture in one format."""

    figure: float | None  # None: it was refused
    text: str


SHOWN = sorted(kind for kind in KINDS if not kind.endswith("-of-images"))
"""Kinds of models; those that see images are left out, since their text part has a line of its own."""


def main() -> None:
    """Compute all cells, write the table, and fail where a cell is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", default=SHOWN, help="kinds of models, by default all")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    theirs_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    rows: list[list[str]] = []
    lines: list[dict[str, Any]] = []
    for kind in arguments.only:
        name, cells = parity_of(kind)
        rows.append([f"`{name}`", *(cell.text.partition(":")[0] for cell in cells.values())])
        lines += [
            {"architecture": name, "format": label, "figure": cell.figure, "text": cell.text}
            for label, cell in cells.items()
        ]
        print(*rows[-1], sep=" | ", flush=True)
    table = in_markdown(["architecture", "float32", "bfloat16", *FORMATS], rows)
    if arguments.only == SHOWN:
        write_table(table)
    if arguments.out:
        record(arguments.out, "models", lines)


def parity_of(kind: str) -> tuple[str, dict[str, Cell]]:
    """Return the architecture's name and its cells by format."""
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "plain"
        # The first case of a kind has what transformers wants beside the sizes.
        changes = next(changes for of_kind, changes in CONFIGS.values() if of_kind == kind)
        write_with_transformers(plain, kind, copy.deepcopy(changes) | widened(kind, changes))
        name = json.loads((plain / "config.json").read_text())["architectures"][0]
        cells = {"float32": exact(plain, plain), "bfloat16": rounded(plain)}
        for label, form in FORMATS.items():
            folder, numbers = Path(scratch) / "quantised", Path(scratch) / "numbers"
            write_quantized(plain, folder, numbers, form)
            cells[label] = exact(folder, numbers)
    return name, cells


def widened(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return a kind's sizes such that every format can pack them and 6 heads share them evenly: multiples of 96."""
    values = base_values(kind) | changes
    wider = {
        name: -(-value // 96) * 96
        for name, value in values.items()
        if name.endswith(("hidden_size", "intermediate_size", "n_embd", "n_inner", "ffn_dim")) and value
    }
    return wider | ({"head_dim": 16} if "head_dim" in values else {})


def exact(folder: Path, numbers: Path) -> Cell:
    """Return the largest difference of a logit between ours of a folder and transformers' of its numbers, in fp32.

    The logits of these models spread by about one.
    """
    expected = theirs(numbers, torch.float32)
    try:
        ours = octavos(folder, "float32")
    except ModelConfigError as error:
        return Cell(None, f"refused: {error}")
    largest = float((ours - expected).abs().max())
    if not largest < 1e-3:
        raise SystemExit(f"{folder}: a logit differs by {largest:.3g}, and the logits spread by {expected.std():.3g}")
    return Cell(largest, f"{largest:.0e}")


def rounded(plain: Path) -> Cell:
    """Return our error (root mean square) in bfloat16 over transformers' own, against fp32 on the same rounded weights."""
    truth = theirs(plain, torch.float32, rounded_to=torch.bfloat16)
    own = float((theirs(plain, torch.bfloat16).float() - truth).square().mean().sqrt())
    ours = float((octavos(plain, "bfloat16").float() - truth).square().mean().sqrt())
    if not ours < 2 * own:
        raise SystemExit(f"{plain}: the error in bfloat16 is {ours:.3g}, that of transformers {own:.3g}")
    return Cell(ours / own, f"{ours / own:.2f}x")


def octavos(folder: Path, dtype: str) -> Tensor:
    """Return our logits [NUM_TOKENS, vocabulary]."""
    runner = load_eager(folder, backend="cpu", dtype=dtype)
    return logits_of(runner._model, runner._caches, ids().tolist(), CHUNKS, runner.rows.limits.block_size)


@torch.inference_mode()
def theirs(folder: Path, dtype: torch.dtype, rounded_to: torch.dtype | None = None) -> Tensor:
    """Return transformers' logits [NUM_TOKENS, vocabulary]."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    if rounded_to is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(rounded_to).to(dtype)
    logits: Tensor = model(ids()[None]).logits[0]
    return logits


def ids() -> Tensor:
    """Return the prompt."""
    return torch.randint(97, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


def write_quantized(plain: Path, folder: Path, numbers: Path, form: Format) -> None:
    """Write a plain model with its layers' matrices drawn in a format, and another with the numbers that they stand for."""
    random = np.random.default_rng(0)
    tensors = load_file(plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    is_transposed = config["architectures"][0] == "GPT2LMHeadModel"
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not _OF_A_LAYER.fullmatch(name) or _ROUTERS.fullmatch(name):
            stored[name] = meant[name] = tensor
            continue
        outputs, inputs = tensor.shape[::-1] if is_transposed else tensor.shape
        drawn = form.draw(outputs, inputs, random)
        spread = torch.from_numpy(np.ascontiguousarray(drawn.numbers)) * form.factor
        meant[name] = spread.T.contiguous() if is_transposed else spread
        for part, own in drawn.tensors.items():
            scaled = own * form.factor if part in _SCALES else own
            stored[name.removesuffix("weight") + part] = scaled.contiguous()
    for target, content, extra in ((folder, stored, {"quantization_config": form.config}), (numbers, meant, {})):
        target.mkdir(exist_ok=True)
        save_file(content, target / "model.safetensors", {"format": "pt"})
        (target / "config.json").write_text(json.dumps(config | extra))


def in_markdown(titles: list[str], rows: list[list[str]]) -> str:
    """Return a table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_table(table: str) -> None:
    """Put the table between the marks of the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
