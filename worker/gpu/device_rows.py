"""The persistent batch on a GPU: ids, block tables and plain sampling parameters, one line a row.

Nothing here waits for the device. The mirror says what is valid and has checked what a plan asks for; the ids behind what
the host knows are those that steps under way write.
"""

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.gpu import inputs
from octavo.kernels.ops import Ops
from octavo.worker.mirror import Beam, BegunRow, Fork, RowLimits
from octavo.worker.sampler import as_int64
from octavo.worker.transfer import to_device, upload


class DeviceRows:
    """Tensors of the rows. Behind the last row there is one more, the scratch row, which padding names.

    Attributes:
        ids: [rows + 1, max_model_len] int32.
        tables: [rows + 1, max_blocks] int32.
        scratch: number of the scratch row.
    """

    def __init__(self, limits: RowLimits, device: torch.device) -> None:
        self.scratch = limits.max_num_seqs
        num_lines = limits.max_num_seqs + 1
        self._device = device
        self.ids = torch.zeros(num_lines, limits.max_model_len, dtype=torch.int32, device=device)
        self.tables = torch.zeros(num_lines, limits.max_blocks, dtype=torch.int32, device=device)
        self._temperature = torch.zeros(num_lines, dtype=torch.float32, device=device)
        self._noise = torch.zeros(3, num_lines, dtype=torch.int64, device=device)  # seed, choice, prompt tokens

    def begin(self, begun: list[BegunRow]) -> None:
        """Write ids and parameters of rows that begin."""
        if not begun:
            return
        lengths = [len(row.ids) for row in begun]
        prefix = np.cumsum([0, *lengths], dtype=np.int32)
        count = len(begun)
        columns = [np.array([row.row for row in begun], np.int32), np.zeros(count, np.int32), prefix]
        columns += [np.frombuffer(row.ids, np.int32) for row in begun]  # type: ignore[call-overload]
        slots, starts, ends, flat = upload(np.concatenate(columns), self._device).split(
            [count, count, count + 1, int(prefix[-1])]
        )
        inputs.write_ids(self.ids, slots, starts, ends, flat)
        states = [row.state for row in begun]
        self._temperature.index_copy_(
            0, slots.long(), to_device([s.sampling.temperature for s in states], torch.float32, self._device)
        )
        noise = (
            [as_int64(s.sampling.seed) for s in states] + [s.choice for s in states] + [s.num_prompt for s in states]
        )
        self._noise.index_copy_(1, slots.long(), to_device(noise, torch.int64, self._device).view(3, count))

    def write_cells(self, cells: list[tuple[int, int, int]]) -> None:
        """Write cells (row, place, block) of the tables."""
        if cells:
            inputs.write_cells(self.tables, upload(np.array(cells, np.int32), self._device))

    def fork(self, forks: list[Fork]) -> None:
        """Start rows from what other rows are now; sources that are forked in this step themselves come first."""
        for fork in forks:  # in order: one may be the source of the next
            source, target = to_device([fork.source, fork.target], torch.int32, self._device).split(1)
            inputs.copy_rows(self.ids, self.tables, source, target)
            self._temperature[fork.target] = self._temperature[fork.source]
            self._noise[:, fork.target] = self._noise[:, fork.source]
            # An assigned number would be copied from host memory, and waited for.
            self._noise[1, fork.target].fill_(fork.choice)

    def go_on(self, beams: list[Beam]) -> None:
        """Let rows go on with chosen ids, themselves or as copies of others; no source is the target of another one."""
        if not beams:
            return
        copied = [beam for beam in beams if beam.row != beam.source]
        columns = [[beam.row for beam in beams], [beam.place for beam in beams]]
        columns += [[beam.source for beam in copied], [beam.row for beam in copied]]
        rows, places, sources, targets = to_device([*chain(*columns)], torch.int32, self._device).split(
            [len(column) for column in columns]
        )
        inputs.copy_rows(self.ids, self.tables, sources, targets)
        self._temperature.index_copy_(0, targets.long(), self._temperature.index_select(0, sources))
        self._noise.index_copy_(1, targets.long(), self._noise.index_select(1, sources))
        inputs.store_tokens(
            self.ids, rows, places, to_device([beam.token for beam in beams], torch.int64, self._device)
        )

    def draw(self, ops: Ops, logits: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """Draw an id for each row by its temperature alone, and store it.

        Args:
            ops: the backend's operations.
            logits: [S, vocab], only ids that may be drawn.
            rows: [S] int32.
            places: [S] int32: where in the row the id goes; -1: padding, the id goes nowhere.

        Returns:
            [S] int64, -1 where the logits are not finite.
        """
        temperature = self._temperature.index_select(0, rows)
        seeds, choices, num_prompt = self._noise.index_select(1, rows).unbind(0)
        tokens = ops.sample(logits, temperature, seeds, choices, places - num_prompt)
        self.store(rows, places, tokens)
        return tokens

    def store(self, rows: Tensor, places: Tensor, tokens: Tensor) -> None:
        """Store drawn ids [S] int64; a row without one (-1) gets a placeholder."""
        inputs.store_tokens(self.ids, rows, places, tokens)
