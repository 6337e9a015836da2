"""Weights of a model that transformers fills: which tensors it is given, and whether it took all of them."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from octavo.worker.checkpoint import FLOATS, Checkpoint, CheckpointTensor
from octavo.worker.errors import WeightsError
from octavo.worker.models.targets import whole
from octavo.worker.safetensors_file import some
from octavo.worker.staging import Staging

_WATCH_INTERVAL_S = 0.2
_T = TypeVar("_T")


class ForeignTensors:
    """The tensors of a checkpoint under their names, each of which is read when it is indexed.

    Args:
        checkpoint: of the model.

    Raises:
        WeightsError: a tensor comes twice, or has a dtype that is not supported.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.by_name: dict[str, _Tensor] = {}
        self.num_bytes = checkpoint.num_bytes
        self.num_bytes_read = 0
        self.staging = Staging(torch.device("cpu"))
        self.reading = threading.Lock()  # transformers reads in several threads, a checkpoint has one place
        for tensor in checkpoint.tensors:
            if tensor.name in self.by_name:
                raise WeightsError(f"tensor {tensor.name} comes twice; the second time in {tensor.extent.path}")
            if tensor.torch_dtype not in FLOATS:
                raise WeightsError(
                    f"tensor {tensor.name} in {tensor.extent.path} has dtype {tensor.dtype}, expected F32, F16, BF16"
                )
            self.by_name[tensor.name] = _Tensor(self, tensor)


class _Tensor:
    """One of them, as far as transformers looks at it before it has what it wants of it."""

    def __init__(self, owner: ForeignTensors, stored: CheckpointTensor) -> None:
        self._owner = owner
        self._stored = stored
        self.shape = torch.Size(stored.shape)
        self.dtype = stored.torch_dtype

    def __getitem__(self, index: Any) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with self._owner.reading:
            for _ in self._stored.fill(whole(tensor), self._owner.staging):
                pass
            self._owner.num_bytes_read += tensor.nbytes
        taken: Tensor = tensor[index]
        return taken


def require_all(folder: Path, info: dict[str, Any]) -> None:
    """Refuse weights that do not fit the model, by what transformers says of the loading.

    Raises:
        WeightsError: a tensor is missing, unexpected, or of another shape.
    """
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise WeightsError(f"{folder} lacks {len(names)} tensors that the model needs: {some(names)}")
    if info["unexpected_keys"]:
        names = sorted(info["unexpected_keys"])
        raise WeightsError(f"{folder} holds {len(names)} tensors that the model does not know: {some(names)}")
    if info["mismatched_keys"]:
        name, found, expected = min(info["mismatched_keys"])
        raise WeightsError(f"tensor {name} in {folder} has shape {list(found)}, expected {list(expected)}")
    if info["error_msgs"]:
        raise WeightsError(f"{folder}: {'; '.join(map(str, info['error_msgs']))}")


def watched(work: Callable[[], _T], look: Callable[[], None]) -> _T:
    """Return what the work returns, which another thread does, and look now and then until it is done.

    What looking raises ends the wait; the thread then ends with the process.
    """
    done: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            done.put((None, error))

    threading.Thread(target=run, name="load", daemon=True).start()
    while True:
        try:
            result, error = done.get(timeout=_WATCH_INTERVAL_S)
        except queue.Empty:
            look()
            continue
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # there is one where there is no error
