"""How a step lies on the device: rows with one token first, then the others; everything in one column of int32.

The host sends which rows compute how much, and where; ids, positions, slots, lengths and tables are built on the device.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.gpu import inputs
from octavo.worker.gpu.device_rows import DeviceRows
from octavo.worker.mirror import Step
from octavo.worker.models.interface import Batch
from octavo.worker.transfer import upload

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Layout:
    """The rows of a step in the order of the kernels: R rows, S of which sample (forked rows are not among them)."""

    rows: Ints  # [R]
    starts: Ints  # [R] where each begins
    query_start: Ints  # [R + 1]
    logits_index: Ints  # [S] last token of each row that samples, in the plan's order
    num_decodes: int  # rows with one token
    first_tokens: Ints  # [R] where each row's tokens begin, in the plan's order

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.query_start[-1])

    @property
    def longest(self) -> int:
        """Keys of the longest row."""
        return int((self.starts + np.diff(self.query_start)).max())


def lay_out(step: Step) -> Layout:
    """Order a step's rows; the order of the plan is kept among those of a kind."""
    counts = np.array(step.counts, np.int32)
    order = np.argsort(counts != 1, kind="stable")
    query_start = np.zeros(len(order) + 1, np.int32)
    np.cumsum(counts[order], out=query_start[1:])
    last_token = np.empty(len(order), np.int32)  # of each row, in the plan's order
    last_token[order] = query_start[1:] - 1
    return Layout(
        rows=np.array(step.rows, np.int32)[order],
        starts=np.array(step.starts, np.int32)[order],
        query_start=query_start,
        logits_index=last_token[step.sampling],
        num_decodes=int((counts == 1).sum()),
        first_tokens=last_token - counts + 1,
    )


def eager_batch(device_rows: DeviceRows, layout: Layout, block_size: int, device: torch.device) -> Batch:
    """Build a forward pass that is as large as its step."""
    columns = [layout.rows, layout.starts, layout.query_start, layout.logits_index]
    rows, starts, query_start, logits_index = upload(np.concatenate(columns), device).split([c.size for c in columns])
    num_tokens, num_rows = layout.num_tokens, layout.rows.size
    batch = Batch(
        input_ids=torch.empty(num_tokens, dtype=torch.int32, device=device),
        positions=torch.empty(num_tokens, dtype=torch.int32, device=device),
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=device),
        block_tables=torch.empty(num_rows, -(-layout.longest // block_size), dtype=torch.int32, device=device),
        query_start=query_start,
        seq_lens=torch.empty(num_rows, dtype=torch.int32, device=device),
        logits_index=logits_index,
        num_decodes=layout.num_decodes,
    )
    prepare(device_rows, rows, starts, batch, block_size)
    return batch


def prepare(device_rows: DeviceRows, rows: Tensor, starts: Tensor, batch: Batch, block_size: int) -> None:
    """Fill a batch from the rows: [R] int32 which, [R] int32 where each begins (-1: padding)."""
    inputs.prepare_inputs(
        device_rows.ids,
        device_rows.tables,
        rows,
        starts,
        batch.query_start,
        block_size,
        batch.input_ids,
        batch.positions,
        batch.slot_mapping,
        batch.seq_lens,
        batch.block_tables,
    )
