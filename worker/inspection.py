"""Whether a model's files hold what its config asks for, and what its weights take: python -m octavo.worker.inspection.

The model is built without memory and its tensors are compared with the headers of the files, as a worker does before it
reads the first of them. A process of its own, since whoever asks does not want to import torch.
"""

import json
import sys
from pathlib import Path

import torch

from octavo.kernels.ops import get_ops
from octavo.worker.errors import StartError
from octavo.worker.models.config import load_model_config, naming
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.sizes import num_parameters, weight_bytes
from octavo.worker.models.targets import Placement, ShardSpec
from octavo.worker.quantization.config import read_quantization
from octavo.worker.quantization.methods import file_of
from octavo.worker.tied_head import with_own_head
from octavo.worker.weights import match, open_checkpoint


def inspect(folder: Path, gguf: Path | None) -> dict[str, object]:
    """Return what was found.

    Args:
        folder: of the model.
        gguf: the file that the weights are in, if it is such a file.

    Returns:
        `num_parameters`; `weight_bytes` by device, as they are held there by default; and `problem`, None if a worker
        would read the files.
    """
    found: dict[str, object] = {"num_parameters": None, "weight_bytes": {}, "problem": None}
    try:
        config = load_model_config(folder)
        found["num_parameters"] = num_parameters(config)
        checkpoint = open_checkpoint(folder, gguf)
        tensors = {config.names.full(tensor.name): tensor for tensor in checkpoint.tensors}
        config = with_own_head(config, tensors)
        with naming(file_of(folder)):
            quantization = read_quantization(config.quantization, tensors=tensors)
        found["weight_bytes"] = {
            device: weight_bytes(config, getattr(torch, dtype), ShardSpec(), backend, tensors)
            for device, dtype, backend in (("cpu", "float32", "cpu"), ("cuda", config.dtype, "triton"))
        }
        placement = Placement(getattr(torch, config.dtype), torch.device("meta"))
        model = Decoder(config, get_ops("reference"), placement, ShardSpec(), 1, quantization)
        match(
            checkpoint,
            model.targets(),
            lambda name: model.is_ignored(name) or quantization.is_ignored(name),
            model.name_of,
        )
    except StartError as error:
        found["problem"] = str(error)
    return found


def main() -> None:
    """Inspect sys.argv[1], a folder, with the weights of sys.argv[2], a GGUF file, if there is one."""
    gguf = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    print(json.dumps(inspect(Path(sys.argv[1]), gguf)))  # noqa: T201 - the answer to whoever started this


if __name__ == "__main__":
    main()
