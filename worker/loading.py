"""From a config to a runner that is ready: model, weights, profile, cache, warm-up."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer

from octavo.kernels.ops import Ops, get_ops
from octavo.wire.handshake import WorkerFacts
from octavo.wire.model_files import read_model_text
from octavo.worker import backends, kv_cache, memory
from octavo.worker.config import WorkerConfig
from octavo.worker.errors import MemoryShortage, StartError
from octavo.worker.grammar import Grammars
from octavo.worker.interface import Runner
from octavo.worker.memory import in_words
from octavo.worker.metrics import Held, Sizes
from octavo.worker.mirror import RowLimits
from octavo.worker.models.config import CONFIG_NAME, naming, parse_model_config, read_config_values
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.description import ModelConfig
from octavo.worker.models.implementation import IMPLEMENTATIONS, choose_implementation
from octavo.worker.models.interface import LoadedModel, Model
from octavo.worker.models.sizes import weight_bytes
from octavo.worker.models.targets import Placement, ShardSpec
from octavo.worker.quantization.config import read_quantization
from octavo.worker.quantization.methods import file_of, method_in_words, method_of
from octavo.worker.rehearsal import meanwhile, sampling_rehearsed
from octavo.worker.runner import EagerRunner
from octavo.worker.tied_head import with_own_head
from octavo.worker.warmup import warm_up
from octavo.worker.weights import fill_dummy, load_weights, open_checkpoint

if TYPE_CHECKING:
    from octavo.worker.models.transformers_model import TransformersModelConfig

logger = logging.getLogger(__name__)

_PROGRESS_STEPS = 10
_SETTINGS_END = 2**63
_LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
_SMALLER_STEPS = "lower --max-num-batched-tokens or --max-num-seqs"


@dataclass(frozen=True)
class LoadedWorker:
    """A worker that can execute plans, and what it tells the scheduler."""

    runner: Runner
    facts: WorkerFacts
    grammars: Grammars
    sizes: Sizes
    device: torch.device

    def held(self) -> Held:
        """Return what it holds now."""
        rows, grammar_rows, in_flight = len(self.runner.rows), self.grammars.num_rows, self.runner.num_in_flight
        if self.device.type != "cuda":
            return Held(rows, grammar_rows, in_flight)
        allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        return Held(rows, grammar_rows, in_flight, allocated, reserved)


@dataclass(frozen=True)
class _Choices:
    """A config with everything decided that it leaves open."""

    config: WorkerConfig
    model: "ModelConfig | TransformersModelConfig"
    backend: str
    placement: Placement
    cache_dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    valid_vocab: int  # ids that the tokenizer knows
    shard: ShardSpec

    def cache(self, loaded: LoadedModel) -> kv_cache.CacheSpec:
        """Return the blocks that the model needs."""
        # One head's tokens side by side are what fast attention loads in one piece.
        head_major, device = self.backend != "reference", self.placement.device
        return kv_cache.spec_of(
            loaded.cached, self.shard, self.config.block_size, self.cache_dtype, device, head_major=head_major
        )

    def quantization_in_words(self) -> str:
        """Return how the weights are quantised, in the checkpoint or on load."""
        stored = self.model.quantization if isinstance(self.model, ModelConfig) else None
        return (
            f"{self.config.quantization} on load"
            if stored is None and self.config.quantization
            else method_in_words(stored)
        )

    def limits(self, num_blocks: int) -> RowLimits:
        """Return what rows can hold with so many blocks."""
        return RowLimits(
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.config.block_size,
            num_blocks=num_blocks,
            vocab_size=self.model.vocab_size,
        )


def load(config: WorkerConfig, between_tensors: Callable[[], None]) -> LoadedWorker:
    """Load the model and prove that it runs.

    Args:
        config: what to load, and how.
        between_tensors: called now and then while weights are read; what it raises ends the loading.

    Raises:
        StartError: the config asks for something impossible, or the model folder is not as it should be.
        MemoryShortage: the device has too little memory; the message names need, free and the flags to change.
    """
    started = time.monotonic()
    chosen = _choose(config)
    device = chosen.placement.device
    ops = get_ops(chosen.backend, batch_invariant=config.batch_invariant)
    _check_memory(chosen)
    grammars = Grammars(config.model_path if (config.model_path / "tokenizer.json").exists() else None)
    with sampling_rehearsed(ops, chosen.model.vocab_size, chosen.valid_vocab, device):
        model = _load_model(chosen, ops, between_tensors)
        cache = chosen.cache(model)
        loaded = time.monotonic()

        def make_runner(num_blocks: int) -> Runner:
            return _make_runner(chosen, model.model, cache, ops, num_blocks, grammars)

        if device.type == "cuda":
            with memory.named_shortage(device, "the largest step", _SMALLER_STEPS):
                _compile(make_runner(kv_cache.MIN_BLOCKS), device)
    measured = _profile(chosen, make_runner) if device.type == "cuda" else None
    num_blocks = kv_cache.choose_num_blocks(config, cache, measured)
    with memory.named_shortage(device, "the KV cache and the warm-up", "leave it more of the device"):
        runner = make_runner(num_blocks)
        between_tensors()
        warm_up(runner)
        if not chosen.config.enforce_eager:
            _capture(runner, device)
    facts = _facts(chosen, num_blocks)
    logger.info(
        "ready in %.1f s (%.1f s after the weights): %s, quantisation %s, %d blocks of %d tokens (%s), %s on %s, backend %s, "
        "%d threads",
        time.monotonic() - started,
        time.monotonic() - loaded,
        chosen.model.architecture,
        chosen.quantization_in_words(),
        num_blocks,
        facts.block_size,
        in_words(num_blocks * cache.block_bytes),
        facts.dtype,
        facts.device,
        facts.backend,
        torch.get_num_threads(),
    )
    _, device_bytes = memory.free_and_total(device)
    load_s = time.monotonic() - started
    sizes = Sizes(model.num_bytes, num_blocks * cache.block_bytes, device_bytes, load_s)
    return LoadedWorker(runner, facts, grammars, sizes, device)


def _choose(config: WorkerConfig) -> _Choices:
    """Check the config, the device and the model folder, and decide what is left open; nothing is allocated."""
    _check_settings(config)
    device = backends.choose_device(config.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels are launched on the current one
    backend = backends.choose_backend(config, device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    model, config = _read_model(config)
    if isinstance(model, ModelConfig):
        method_of(model.quantization, config.quantization)
        backends.check_head_size(backend, model.head_size)
    dtype = backends.choose_dtype(config.dtype, model.dtype, device)
    cache_dtype = backends.choose_cache_dtype(config.kv_cache_dtype, backend, device, dtype)
    seqs, tokens = backends.step_limits(config, device)
    return _Choices(
        config=config,
        model=model,
        backend=backend,
        placement=Placement(dtype, device),
        cache_dtype=cache_dtype,
        max_model_len=_max_model_len(config, model),
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        valid_vocab=_valid_vocab(config, model),
        shard=ShardSpec(),
    )


def _read_model(config: WorkerConfig) -> "tuple[ModelConfig | TransformersModelConfig, WorkerConfig]":
    """Return what config.json says of the model, and what of the config holds for it."""
    values = read_config_values(config.model_path)
    with naming(config.gguf or config.model_path / CONFIG_NAME):
        if choose_implementation(values, config.model_impl) == "octavo":
            return parse_model_config(values), config
        from octavo.worker.models.transformers_model import read_transformers_config  # takes seconds

        model = read_transformers_config(values)
    if config.gguf is not None:
        raise StartError(
            f"{config.gguf}: {model.architecture} is computed by transformers, which is given safetensors alone"
        )
    method_of(None, config.quantization)
    if config.quantization is not None:
        raise StartError(
            f"--quantization {config.quantization}: {model.architecture} is computed by transformers, as it is"
        )
    if config.batch_invariant:
        raise StartError(
            f"batch_invariant: {model.architecture} is computed by transformers, whose bits depend on the batch"
        )
    logger.info("%s is computed by transformers, with paged attention and without CUDA graphs", model.architecture)
    return model, replace(config, enforce_eager=True)


def _load_model(chosen: _Choices, ops: Ops, between_tensors: Callable[[], None]) -> LoadedModel:
    config, placement = chosen.config, chosen.placement
    progress = _Progress(between_tensors)
    with memory.named_shortage(placement.device, "loading the weights", "choose a smaller model"):
        if not isinstance(chosen.model, ModelConfig):
            loaded = chosen.model.load(config, ops, placement, chosen.max_model_len, progress)
            backends.check_head_size(chosen.backend, loaded.cached.head_size)
            return loaded
        name_of = chosen.model.names.full
        checkpoint = None if config.load_format == "dummy" else open_checkpoint(config.model_path, config.gguf)
        tensors = None if checkpoint is None else {name_of(tensor.name): tensor for tensor in checkpoint.tensors}
        described = with_own_head(chosen.model, tensors or {})
        with naming(file_of(config.model_path)):
            quantization = read_quantization(chosen.model.quantization, config.quantization, tensors)
        model = Decoder(described, ops, placement, chosen.shard, chosen.max_model_len, quantization)
        num_bytes = sum(target.view.nbytes for target in model.targets().values())
        if checkpoint is None:
            fill_dummy(model.targets(), config.seed, progress)
        else:
            load_weights(
                checkpoint,
                model.targets(),
                lambda name: model.is_ignored(name) or quantization.is_ignored(name),
                progress,
                model.name_of,
            )
        model.finish_loading()
    return LoadedModel(model, chosen.model.cached, num_bytes)


def _make_runner(
    chosen: _Choices, model: Model, cache: kv_cache.CacheSpec, ops: Ops, num_blocks: int, grammars: Grammars
) -> Runner:
    caches = kv_cache.allocate(cache, num_blocks)
    limits, device = chosen.limits(num_blocks), chosen.placement.device
    if chosen.backend == "triton":
        from octavo.worker.gpu.runner import GpuRunner  # where there is no Triton, the others run without

        return GpuRunner(model, ops, caches, limits, device, chosen.valid_vocab, grammars)
    return EagerRunner(model, ops, caches, limits, device, chosen.valid_vocab, grammars)


def _compile(runner: Runner, device: torch.device) -> None:
    """Run steps of every kind, so that the model's kernels are compiled at the same time as those of the sampler."""
    with meanwhile("rehearse decodes", lambda: runner.rehearse(prompts=False), device):
        runner.profile()
        runner.rehearse(prompts=True)


def _profile(chosen: _Choices, make_runner: Callable[[int], Runner]) -> memory.DeviceMemory:
    """Measure what weights and the largest step take; the runner that is tried has the smallest cache there is."""
    device = chosen.placement.device
    captures = chosen.backend == "triton" and not chosen.config.enforce_eager

    def largest_step() -> None:
        runner = make_runner(kv_cache.MIN_BLOCKS)
        runner.profile()
        runner.profile_sampling()

    with memory.named_shortage(device, "the largest step", _SMALLER_STEPS):
        measured = memory.measure(
            device,
            largest_step,
            graphs=memory.GRAPH_BYTES if captures else 0,
        )
    logger.info(
        "memory of %s: %s in all, %s free; weights %s, activations of the largest step %s",
        device,
        in_words(measured.total),
        in_words(measured.free),
        in_words(measured.weights),
        in_words(measured.activations),
    )
    return measured


def _capture(runner: Runner, device: torch.device) -> None:
    before, _ = memory.free_and_total(device)
    runner.capture()
    if device.type == "cuda":
        after, _ = memory.free_and_total(device)
        reserve = in_words(memory.GRAPH_BYTES)
        logger.info(
            "captured graphs take %s of %s reserved; %s left", in_words(before - after), reserve, in_words(after)
        )


def _facts(chosen: _Choices, num_blocks: int) -> WorkerFacts:
    return WorkerFacts(
        num_blocks=num_blocks,
        block_size=chosen.config.block_size,
        vocab_size=chosen.model.vocab_size,
        max_model_len=chosen.max_model_len,
        max_num_seqs=chosen.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        backend=chosen.backend,
        device=str(chosen.placement.device),
        dtype=str(chosen.placement.dtype).removeprefix("torch."),
    )


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
    if not 0.0 < config.gpu_memory_utilization <= 1.0:
        raise StartError(f"gpu_memory_utilization = {config.gpu_memory_utilization}: expected above 0, at most 1")
    if config.load_format not in _LOAD_FORMATS:
        raise StartError(f"load_format {config.load_format!r} is unknown; there are {', '.join(_LOAD_FORMATS)}")
    there = "safetensors" if config.gguf is None else "gguf"
    if config.load_format not in ("auto", "dummy", there):
        raise StartError(f"load_format {config.load_format!r}, but the weights of {config.model_path} are {there}")
    if config.model_impl not in IMPLEMENTATIONS:
        raise StartError(f"model_impl {config.model_impl!r} is unknown; there are {', '.join(IMPLEMENTATIONS)}")


def _check_memory(chosen: _Choices) -> None:
    """Refuse weights that cannot fit before any of them is allocated."""
    config, device = chosen.config, chosen.placement.device
    if isinstance(chosen.model, ModelConfig):
        needed = weight_bytes(chosen.model, chosen.placement.dtype, chosen.shard, chosen.backend)
        tables = max(1, len(chosen.model.ropes))  # of the rotary embeddings
        needed += tables * chosen.max_model_len * chosen.model.head_size * torch.float32.itemsize
    else:
        needed = chosen.model.weight_bytes(chosen.placement.dtype)
    free, total = memory.free_and_total(device)
    if needed > free:
        raise MemoryShortage(
            f"the weights need {in_words(needed)} on {device}, {in_words(free)} of {in_words(total)} are free; "
            "end other processes that use the memory, or choose a smaller model"
        )
    by_share = config.num_gpu_blocks_override is None and config.kv_cache_memory_bytes is None
    budget = int(total * config.gpu_memory_utilization)
    if device.type == "cuda" and by_share and needed + memory.CONTEXT_BYTES > budget:
        raise MemoryShortage(
            f"the weights need {in_words(needed)} and the CUDA context {in_words(memory.CONTEXT_BYTES)}, utilisation "
            f"{config.gpu_memory_utilization:g} of {in_words(total)} is {in_words(budget)}; raise --gpu-memory-utilization"
        )


def _max_model_len(config: WorkerConfig, model: "ModelConfig | TransformersModelConfig") -> int:
    if config.max_model_len is None:
        return model.max_positions
    if not 2 <= config.max_model_len <= model.max_positions:
        raise StartError(
            f"max_model_len = {config.max_model_len}: expected 2 to {model.max_positions}, the model's positions"
        )
    return config.max_model_len


def _valid_vocab(config: WorkerConfig, model: "ModelConfig | TransformersModelConfig") -> int:
    """Return the number of ids that the tokenizer knows: the embedding may be padded beyond them."""
    path = config.model_path / "tokenizer.json"
    if not path.exists():
        return model.vocab_size
    try:
        vocabulary: dict[str, int] = Tokenizer.from_str(read_model_text(path)).get_vocab(with_added_tokens=True)
    except Exception as error:
        raise StartError(f"{path} cannot be read: {error}") from error
    size = max(vocabulary.values(), default=0) + 1
    if size > model.vocab_size:
        raise StartError(f"{path} has ids up to {size - 1}, but the embedding has only {model.vocab_size} rows")
    return size
