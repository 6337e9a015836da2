"""The inline assembly that turns packed codes into numbers, read as it stands, against the formula."""

import pytest
import torch
from torch import Tensor

from tests.support import ptx

pytest.importorskip("triton")
from octavo.kernels.gpu import quantized_codes

DTYPES = {"FP16": torch.float16, "BF16": torch.bfloat16}


def assembly(name: str) -> str:
    text = getattr(quantized_codes, name).value
    assert isinstance(text, str)
    return text


def words(count: int = 4096) -> Tensor:
    """Return registers of two random words each."""
    return torch.randint(0, 2**32, (count,), generator=torch.Generator().manual_seed(0))


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int16).long() & 0xFFFF


def halves(register: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the numbers of the first and of the second word."""
    low, high = register & 0xFFFF, register >> 16
    return low.to(torch.int16).view(dtype), high.to(torch.int16).view(dtype)


@pytest.mark.parametrize("half", DTYPES)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_integer_codes_become_scaled_numbers_rounded_once(width: int, half: str) -> None:
    dtype, codes = DTYPES[half], 16 // width
    word = words()
    generator = torch.Generator().manual_seed(1)
    metas, expected = [], []
    for shift in (0, 16):
        scale = torch.rand(len(word), generator=generator).to(dtype)
        zero = torch.randint(0, 2**width, (len(word),), generator=generator)
        metas.append(bits(scale) | bits(-(zero + quantized_codes.base(dtype, width)).to(dtype)) << 16)
        each = [(word >> (shift + width * place) & (2**width - 1)) - zero for place in range(codes)]
        expected.append([(code.float() * scale.float()).to(dtype) for code in each])
    got = ptx.run(assembly(f"_GROUPED_{width}_{half}"), codes, [word, *metas])
    for place, register in enumerate(got):
        for number, wanted in zip(halves(register, dtype), (expected[0][place], expected[1][place]), strict=True):
            assert torch.equal(number, wanted)


@pytest.mark.parametrize("half", DTYPES)
def test_float8_codes_become_exact_numbers(half: str) -> None:
    word = torch.cat((words(), torch.arange(256) * 0x01010101))
    dtype = DTYPES[half]
    scales = [torch.rand(len(word), generator=torch.Generator().manual_seed(place)) for place in range(2)]
    plain = ptx.run(assembly(f"_FLOAT8_{half}"), 2, [word])
    raw = [scale.view(torch.int32).long() for scale in scales]
    scaled = ptx.run(assembly(f"_FLOAT8_SCALED_{half}"), 2, [word, *raw])
    for place in range(2):
        for second in range(2):
            code = (word >> (16 * second + 8 * place) & 0xFF).to(torch.uint8)
            wanted = code.view(torch.float8_e4m3fn).float()
            known = ~wanted.isnan()
            assert torch.equal(halves(plain[place], dtype)[second][known], wanted.to(dtype)[known])
            product = (wanted * scales[second]).to(dtype)
            assert torch.equal(halves(scaled[place], dtype)[second][known], product[known])


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_codes_become_entries_of_the_table(dtype: torch.dtype) -> None:
    word = words()
    table = torch.randn(16, generator=torch.Generator().manual_seed(2)).to(dtype)
    entry = table.view(torch.uint8).view(16, 2).long()
    packed = [sum(entry[4 * place + i, byte] << (8 * i) for i in range(4)) for byte in range(2) for place in range(4)]
    twice = [torch.full_like(word, int(value)) for value in packed for _ in range(2)]
    got = ptx.run(assembly("_TABLE_ANY"), 4, [word, *twice])
    for place, register in enumerate(got):
        for second, number in enumerate(halves(register, dtype)):
            assert torch.equal(number, table[word >> (8 * place + 4 * second) & 15])
