"""How a step lies on the device: its rows in the order that the kernels want, in as few columns as it takes.

A step is sent as one column of int32; everything else (ids, positions, slots, lengths, tables) is built there.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.gpu import inputs
from octavo.worker.gpu.device_rows import DeviceRows
from octavo.worker.mirror import Step
from octavo.worker.models.decoder import Batch
from octavo.worker.transfer import upload


@dataclass(frozen=True)
class StepColumns:
    """Columns of a step on the device, int32: R rows, S rows that sample and are of the plan."""

    rows: Tensor  # [R]
    starts: Tensor  # [R]
    query_start: Tensor  # [R + 1]
    logits_index: Tensor  # [S] tokens whose logits are wanted, in the plan's order


def mixed_batch(device_rows: DeviceRows, step: Step, block_size: int, device: torch.device) -> Batch:
    """Build the forward pass of any step: rows with one token first, then the others."""
    order = sorted(range(len(step.rows)), key=lambda place: step.counts[place] != 1)
    counts = np.array(step.counts, np.int32)[order]
    query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    last_token = np.empty(len(order), np.int32)  # of each row, in the plan's order
    last_token[order] = query_start[1:] - 1
    starts = np.array(step.starts, np.int32)[order]
    columns = _send(
        np.array(step.rows, np.int32)[order], starts, query_start, last_token[step.sampling], device=device
    )
    num_tokens, longest = int(query_start[-1]), int((starts + counts).max())
    num_decodes = int((counts == 1).sum())
    batch = Batch(
        input_ids=torch.empty(num_tokens, dtype=torch.int32, device=device),
        positions=torch.empty(num_tokens, dtype=torch.int32, device=device),
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=device),
        block_tables=torch.empty(len(order), -(-longest // block_size), dtype=torch.int32, device=device),
        query_start=columns.query_start,
        seq_lens=torch.empty(len(order), dtype=torch.int32, device=device),
        logits_index=columns.logits_index,
        num_decodes=num_decodes,
        max_query_len=int(counts.max()) if num_decodes < len(order) else 0,
    )
    prepare(device_rows, columns.rows, columns.starts, batch, block_size)
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


def _send(*columns: NDArray[np.int32], device: torch.device) -> StepColumns:
    together = upload(np.concatenate(columns), device)
    return StepColumns(*together.split([column.size for column in columns]))
