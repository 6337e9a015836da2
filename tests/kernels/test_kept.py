"""What is told of a backend's quantised weights before they are loaded is what the backend does with them."""

import pytest
import torch
from torch import Tensor

from octavo.kernels.cpu.panels import KINDS, Panels
from octavo.kernels.kept import Form, is_kept
from octavo.kernels.ops import get_ops
from octavo.kernels.weights import Float8Weight, GroupedWeight, TableWeight, Weight

OUTPUTS, INPUTS = 64, 128
CODES = torch.zeros(OUTPUTS, INPUTS // 8, dtype=torch.int32)
WEIGHTS: dict[Form, Weight] = {
    Tensor: torch.ones(OUTPUTS, INPUTS),
    GroupedWeight: GroupedWeight(CODES, 4, torch.ones(1, OUTPUTS), None, INPUTS),
    TableWeight: TableWeight(CODES, 4, torch.ones(OUTPUTS, 16)),
    Float8Weight: Float8Weight(
        torch.ones(OUTPUTS, INPUTS).to(torch.float8_e4m3fn), torch.ones(OUTPUTS, 1), None, "none", 1, INPUTS
    ),
}


def stays_packed(prepared: object) -> bool:
    if isinstance(prepared, list):
        prepared = prepared[0]
    if isinstance(prepared, Panels):
        return prepared.kind not in KINDS.values()
    return not isinstance(prepared, Tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("form", WEIGHTS)
def test_a_backend_keeps_what_it_is_said_to(form: Form, backend: str, dtype: torch.dtype) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    ops, weight = get_ops(backend), WEIGHTS[form]
    weight = weight.to(dtype) if isinstance(weight, Tensor) else weight
    is_plain = form is Tensor
    assert stays_packed(ops.prepare_weight(weight, dtype)) == (is_kept(form, backend, dtype) and not is_plain)
    experts = ops.prepare_experts([weight, weight], dtype)
    assert stays_packed(experts) == (is_kept(form, backend, dtype, of_experts=True) and not is_plain)
