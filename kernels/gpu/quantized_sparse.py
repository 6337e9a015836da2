"""The few numbers that are added to a matrix of tables: their part of a product, or into the plain matrix."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.launch import overlaps
from octavo.kernels.weights import SparseRows

_ROWS = 4
_LANES = 64
_LONG = 1024


@triton.jit
def _part(x, columns, values, first, end, place, x_stride, token):
    """Products of the numbers at ``first + place`` that come before ``end``."""
    inside = first + place < end
    column = tl.load(columns + first + place, inside, other=0)
    value = tl.load(values + first + place, inside, other=0.0).to(tl.float32)
    return value * tl.load(x + token * x_stride + column, inside, other=0.0).to(tl.float32)


@triton.jit
def _product_kernel(
    x, row_start, columns, values, out, x_stride, num_outputs, ROWS: tl.constexpr, LANES: tl.constexpr,
    LONG: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (ROWS rows, token). Rows are short but for a few whole ones, which get all lanes one after another.

    The next kernel's programs are let in only once the kernel before has ended, so that they may read x at once.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.load(row_start + row, row < num_outputs, other=0)
    end = tl.load(row_start + row + 1, row < num_outputs, other=0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(1).to(tl.int64)
    longest = tl.max(end - first, 0)
    if longest <= 4 * LANES:
        total = tl.zeros([ROWS, LANES], tl.float32)
        for start in range(0, longest, LANES):
            place = start + tl.arange(0, LANES)[None, :]
            total += _part(x, columns, values, first[:, None], end[:, None], place, x_stride, token)
        tl.store(out + token * num_outputs + row, tl.sum(total, 1), row < num_outputs)
    else:
        for lane in range(ROWS):
            this = tl.arange(0, ROWS) == lane
            begin = tl.sum(tl.where(this, first, 0), 0)
            stop = tl.sum(tl.where(this, end, 0), 0)
            whole = tl.zeros([LONG], tl.float32)
            for start in range(0, stop - begin, LONG):
                whole += _part(x, columns, values, begin, stop, start + tl.arange(0, LONG), x_stride, token)
            output = tl.program_id(0) * ROWS + lane
            tl.store(out + token * num_outputs + output, tl.sum(whole, 0), output < num_outputs)


def sparse_product(x: Tensor, sparse: SparseRows) -> Tensor:
    """Multiply x [T, K] by the sparse matrix -> fp32 sums [T, N], each in one fixed order."""
    num_outputs = sparse.row_start.shape[0] - 1
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((x.shape[0], num_outputs), dtype=torch.float32, device=x.device)
    overlap = overlaps(x)
    _product_kernel[(triton.cdiv(num_outputs, _ROWS), x.shape[0])](
        x,
        sparse.row_start,
        sparse.columns,
        sparse.values,
        out,
        x.stride(0),
        num_outputs,
        ROWS=_ROWS,
        LANES=_LANES,
        LONG=_LONG,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out


@triton.jit
def _add_kernel(matrix, row_start, columns, values, size, LANES: tl.constexpr):
    row = tl.program_id(0)
    first = tl.load(row_start + row)
    end = tl.load(row_start + row + 1)
    line = matrix + row.to(tl.int64) * size
    for start in range(first, end, LANES):
        place = start + tl.arange(0, LANES)
        column = tl.load(columns + place, place < end, other=0)
        value = tl.load(values + place, place < end, other=0.0).to(tl.float32)
        number = tl.load(line + column, place < end, other=0.0).to(tl.float32)
        tl.store(line + column, (number + value).to(matrix.dtype.element_ty), place < end)


def add_sparse(matrix: Tensor, sparse: SparseRows) -> None:
    """Add the sparse matrix to a contiguous one [N, K], in place."""
    _add_kernel[(matrix.shape[0],)](
        matrix, sparse.row_start, sparse.columns, sparse.values, matrix.shape[1], LANES=128, num_warps=4
    )
