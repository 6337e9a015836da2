"""Whether the output head of a checkpoint is really the embedding that config.json says it is."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from octavo.wire.model_files import open_model_file
from octavo.worker.checkpoint import CheckpointTensor
from octavo.worker.errors import WeightsError
from octavo.worker.models.description import ModelConfig

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 24


def with_own_head(config: ModelConfig, tensors: Mapping[str, CheckpointTensor]) -> ModelConfig:
    """Return the config, its embedding no longer tied where the checkpoint has a head with other numbers.

    Training a tied model's head on its own leaves such files, whose `tie_word_embeddings` is then stale; transformers 5
    computes with the head, too. A head with the same numbers is read past.

    Args:
        config: of the model.
        tensors: of the checkpoint, by full name.

    Raises:
        WeightsError: a file cannot be read.
    """
    head = tensors.get(f"{config.names.head}.weight")
    embedding = tensors.get(f"{config.names.embedding}.weight")
    if not config.tied_embeddings or head is None or embedding is None or _are_equal(head, embedding):
        return config
    logger.warning(
        "%s and %s differ: the output head is computed with the former, although config.json has tie_word_embeddings",
        head.name,
        embedding.name,
    )
    return replace(config, tied_embeddings=False)


def _are_equal(a: CheckpointTensor, b: CheckpointTensor) -> bool:
    """Compare the bytes of two tensors, a piece at a time."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    try:
        with open_model_file(a.extent.path) as first, open_model_file(b.extent.path) as second:
            first.seek(a.extent.start)
            second.seek(b.extent.start)
            left = a.extent.end - a.extent.start
            while left > 0:
                size = min(left, _CHUNK_BYTES)
                piece = first.read(size)
                if len(piece) != size or piece != second.read(size):
                    return False
                left -= size
    except OSError as error:
        raise WeightsError(f"{a.extent.path} or {b.extent.path} cannot be read: {error}") from error
    return True
