"""From a config to a runner that is ready: model, weights, cache, warm-up."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from octavo.kernels.ops import get_ops
from octavo.wire.columns import pack_ints
from octavo.wire.handshake import WorkerFacts
from octavo.wire.plan import FLAG_SAMPLE, NewRow, RowSampling, StepPlan
from octavo.worker import kv_cache
from octavo.worker.config import WorkerConfig
from octavo.worker.errors import MemoryShortage, StartError
from octavo.worker.models.config import ModelConfig, load_model_config
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.layers import Placement, ShardSpec
from octavo.worker.rows import RowLimits
from octavo.worker.runner import Runner
from octavo.worker.weights import fill_dummy, load_weights

logger = logging.getLogger(__name__)

_PROGRESS_STEPS = 10
_SETTINGS_END = 2**63
_LOAD_FORMATS = ("auto", "dummy")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedWorker:
    """A worker that can execute plans, and what it tells the scheduler."""

    runner: Runner
    facts: WorkerFacts


def load(config: WorkerConfig, between_tensors: Callable[[], None]) -> LoadedWorker:
    """Load the model and prove that it runs.

    Args:
        config: what to load, and how.
        between_tensors: called now and then while weights are read; what it raises ends the loading.

    Raises:
        StartError: the config asks for something impossible, or the model folder is not as it should be.
    """
    started = time.monotonic()
    _check_settings(config)
    device = _device(config.device)
    backend = _backend(config.backend, device)
    ops = get_ops(backend)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    model_config = load_model_config(config.model_path)
    valid_vocab = _valid_vocab(config, model_config)
    max_model_len = _max_model_len(config, model_config)
    placement = Placement(_dtype(config, model_config, device), device)
    shard = ShardSpec()
    _check_memory(model_config, max_model_len, placement)
    model = Decoder(model_config, ops, placement, shard, max_model_len)
    progress = _Progress(between_tensors)
    if config.load_format == "dummy":
        fill_dummy(model.targets(), config.seed, progress)
    else:
        load_weights(config.model_path, model.targets(), model.is_ignored, progress)
    model.finish_loading()
    caches = kv_cache.allocate(config, model_config, shard, placement)
    limits = RowLimits(
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=caches[0].keys.shape[0],
        vocab_size=model_config.vocab_size,
    )
    runner = Runner(model, ops, caches, limits, device, valid_vocab)
    _warm_up(runner)
    facts = WorkerFacts(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        vocab_size=limits.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        backend=backend,
        device=str(device),
        dtype=str(placement.dtype).removeprefix("torch."),
    )
    logger.info(
        "ready in %.1f s: %s, %d blocks of %d tokens, %s on %s, backend %s, %d threads",
        time.monotonic() - started,
        model_config.architecture,
        limits.num_blocks,
        limits.block_size,
        facts.dtype,
        facts.device,
        facts.backend,
        torch.get_num_threads(),
    )
    return LoadedWorker(runner, facts)


class _Progress:
    """Logs how far loading is, at most _PROGRESS_STEPS times."""

    def __init__(self, between_tensors: Callable[[], None]) -> None:
        self._between_tensors = between_tensors
        self._shown = 0

    def __call__(self, done: int, total: int) -> None:
        self._between_tensors()
        step = done * _PROGRESS_STEPS // total
        if step > self._shown:
            self._shown = step
            logger.info("loading weights %d%% (%d of %d MB)", done * 100 // total, done // 10**6, total // 10**6)


def _check_settings(config: WorkerConfig) -> None:
    minima = {
        "block_size": 1,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "max_model_len": 2,
        "num_gpu_blocks_override": kv_cache.MIN_BLOCKS,
        "kv_cache_memory_bytes": 1,
        "num_threads": 1,
        "seed": 0,
    }
    for name, least in minima.items():
        value = getattr(config, name)
        if value is not None and not least <= value < _SETTINGS_END:
            raise StartError(f"{name} = {value}: expected {least} to {_SETTINGS_END - 1}")
    if config.load_format not in _LOAD_FORMATS:
        raise StartError(f"load_format {config.load_format!r} is unknown; there are {', '.join(_LOAD_FORMATS)}")


def _check_memory(model: ModelConfig, max_model_len: int, placement: Placement) -> None:
    needed = model.num_parameters * placement.dtype.itemsize
    needed += max_model_len * model.head_size * torch.float32.itemsize  # the rotary table
    free = kv_cache.free_bytes(placement.device)
    if needed > free:
        raise MemoryShortage(f"the weights need {needed} bytes on {placement.device}, {free} are free")


def _backend(name: str, device: torch.device) -> str:
    if name == "auto":
        return "cpu" if device.type == "cpu" else "reference"
    try:
        get_ops(name)
    except ValueError as error:
        raise StartError(str(error)) from error
    if name == "cpu" and device.type != "cpu":
        raise StartError(f"backend {name!r} does not run on device {str(device)!r}; backend 'reference' does")
    return name


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StartError(f"device {name!r} is unknown; there are auto, cpu and cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise StartError(f"device {name!r} is not supported; supported are cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartError(f"device {name!r} is not there: torch finds no CUDA device")
    return device


def _dtype(config: WorkerConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    name = ("float32" if device.type == "cpu" else model.dtype) if config.dtype == "auto" else config.dtype
    if name not in _DTYPES:
        raise StartError(f"dtype {config.dtype!r} is unknown; there are auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _max_model_len(config: WorkerConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_positions
    if not 2 <= config.max_model_len <= model.max_positions:
        raise StartError(
            f"max_model_len = {config.max_model_len}: expected 2 to {model.max_positions}, the model's positions"
        )
    return config.max_model_len


def _valid_vocab(config: WorkerConfig, model: ModelConfig) -> int:
    """Return the number of ids that the tokenizer knows: the embedding may be padded beyond them."""
    path = config.model_path / "tokenizer.json"
    if not path.exists():
        return model.vocab_size
    try:
        vocabulary: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:
        raise StartError(f"{path} cannot be read: {error}") from error
    size = max(vocabulary.values(), default=0) + 1
    if size > model.vocab_size:
        raise StartError(f"{path} has ids up to {size - 1}, but the embedding has only {model.vocab_size} rows")
    return size


def _warm_up(runner: Runner) -> None:
    """Run a short prefill, then a mixed step, so that the first request finds everything loaded and compiled."""
    limits = runner.rows.limits
    prompt = max(1, min(4, limits.block_size - 1, limits.max_num_batched_tokens - 1, limits.max_model_len - 2))
    runner.execute(_warm_up_plan(1, {0: prompt}, prompt))
    if prompt + 1 <= min(limits.block_size, limits.max_num_batched_tokens, limits.max_model_len - 1) and (
        limits.max_num_seqs > 1 and limits.num_blocks > kv_cache.MIN_BLOCKS
    ):
        runner.execute(_warm_up_plan(2, {0: 1, 1: prompt}, prompt))
    runner.rows.clear()


def _warm_up_plan(step: int, counts: dict[int, int], prompt: int) -> StepPlan:
    """Return a plan whose last row is new and takes the block behind the null block that has its number."""
    new = max(counts)
    return StepPlan(
        epoch=0,
        step=step,
        row=pack_ints(counts.keys()),
        num_tokens=pack_ints(counts.values()),
        flags=pack_ints([FLAG_SAMPLE] * len(counts)),
        new_rows=(NewRow(new, "warm-up", 0, prompt, 0, pack_ints([0] * prompt), RowSampling(seed=0)),),
        append_row=pack_ints([new]),
        append_block=pack_ints([new + 1]),
    )
