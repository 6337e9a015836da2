"""--quantization int8: what plain weights become."""

import pytest
import torch

from octavo.kernels.weights import dequantized
from octavo.worker.errors import ModelConfigError
from octavo.worker.quantization.config import read_quantization
from octavo.worker.quantization.int8 import GROUP_SIZE, quantized_int8
from octavo.worker.quantization.layers import OnLoadScheme


@pytest.mark.parametrize("inputs", [4, GROUP_SIZE, 3 * GROUP_SIZE + 20])
def test_each_number_is_off_by_half_a_step_of_its_group_at_most(inputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, inputs) * torch.rand(7, 1).exp()
    weight[3] = 0.0
    quantised = quantized_int8(weight)
    got = dequantized(quantised, torch.float32)
    for start in range(0, inputs, GROUP_SIZE):
        part, found = weight[:, start : start + GROUP_SIZE], got[:, start : start + GROUP_SIZE]
        greatest = part.abs().amax(1, keepdim=True)
        assert ((part - found).abs() <= greatest / 127 * 0.5001).all()
        torch.testing.assert_close(found.abs().amax(1, keepdim=True), greatest)


def test_the_output_head_is_quantised_as_well() -> None:
    for prefix in ("model.layers.0.self_attn.q_proj", "lm_head"):
        assert isinstance(read_quantization(None, "int8").scheme_of(prefix), OnLoadScheme)


def test_a_width_that_cannot_be_packed_is_named() -> None:
    with pytest.raises(ModelConfigError, match="a layer has 6 inputs, expected a multiple of 4"):
        quantized_int8(torch.ones(2, 6))
