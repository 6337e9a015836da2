"""Models that transformers computes, with paged attention in place of its own: for architectures without a description.

The only module of the worker that imports transformers, and imported only where such a model is loaded: it takes seconds.
Nothing is fetched, no code of a model folder runs, and transformers opens no file: it is given the values of config.json and
the tensors of the safetensors. What it computes is compared with itself before the model is used (`paged_check`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import initialization
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_outputs import MoEModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.kernels.ops import Ops
from octavo.worker.config import WorkerConfig
from octavo.worker.errors import ModelConfigError, WeightsError
from octavo.worker.models import paged_interface
from octavo.worker.models.attention_calls import CallRefused
from octavo.worker.models.config import SUPPORTED_ARCHITECTURES, architecture_of
from octavo.worker.models.families.common import read_dtype
from octavo.worker.models.fields import Fields
from octavo.worker.models.foreign_weights import ForeignTensors, require_all, watched
from octavo.worker.models.implementation import refusal
from octavo.worker.models.interface import Batch, Hidden, KVCache, LoadedModel
from octavo.worker.models.paged_check import Sizes, check_paged
from octavo.worker.models.paged_interface import PagedInterface, Probe
from octavo.worker.models.rope import rotary_table
from octavo.worker.models.targets import Placement, whole
from octavo.worker.safetensors_reader import SafetensorsCheckpoint
from octavo.worker.weights import Progress, fill_dummy

_PAGED, _PROBE, _OWN = "octavo_paged", "octavo_probe", "eager"
"""Names of attention functions: in steps, while a model is looked at, and the model's own."""
_CHOICES_OF_CODE = ("attn_implementation", "experts_implementation", "fusion_config", "kernel_config", "use_kernels")
"""Values of config.json that say which code transformers runs, some of it from a hub: never honoured."""
_LAYER_TYPES = ("full_attention", "sliding_attention")

_probe: ContextVar[Probe] = ContextVar("probe")
_given: ContextVar[Tensor | None] = ContextVar("given", default=None)
"""What the body of a model hands to its head without computing anything: [1, S, hidden_size]."""


def _probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    return _probe.get().attend(module, query, key, value, attention_mask, arguments), None


def _probe_mask(**arguments: Any) -> Tensor:
    return _probe.get().mask(eager_mask, arguments)


# For an attention function without a mask function of its name transformers makes no masks.
ALL_ATTENTION_FUNCTIONS.register(_PAGED, paged_interface.attend)
ALL_ATTENTION_FUNCTIONS.register(_PROBE, _probe_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(_PROBE, _probe_mask)


def read_transformers_config(values: dict[str, Any]) -> "TransformersModelConfig":
    """Return the model that config.json names, if transformers knows it and nothing shows that it cannot be served.

    Raises:
        ModelConfigError: as described.
    """
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its reports become errors of ours
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    architecture, kind = architecture_of(values), values["model_type"]
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, ())
    if architecture not in ((known,) if isinstance(known, str) else known):
        raise ModelConfigError(
            f"architecture {architecture!r} with model_type {kind!r} is not supported: it is neither described here (there "
            f"are {', '.join(SUPPORTED_ARCHITECTURES)}) nor one of the {len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)} causal "
            f"language models of transformers {transformers.__version__}"
            + (
                f", which has {known if isinstance(known, str) else ', '.join(known)} of this model_type"
                if known
                else ""
            )
        )
    try:
        config: Any = CONFIG_MAPPING[kind].from_dict(_without_code(values))
    except Exception as error:  # whatever its code does with values that do not fit
        raise ModelConfigError(f"{architecture}: transformers cannot read config.json: {error}") from error
    model_class: Any = getattr(transformers, architecture)
    _refuse(architecture, model_class, config)
    return TransformersModelConfig(architecture, model_class, config, read_dtype(Fields(values)))


class TransformersModelConfig:
    """What config.json says of a model that transformers computes.

    Args:
        architecture: as in config.json.
        model_class: of transformers.
        config: its config.
        dtype: of the checkpoint.
    """

    def __init__(self, architecture: str, model_class: Any, config: Any, dtype: str) -> None:
        self.architecture = architecture
        self.dtype = dtype
        self._class = model_class
        self._config = config
        text = config.get_text_config()
        fields = Fields({name: getattr(text, name, None) for name in ("vocab_size", "max_position_embeddings")})
        self.vocab_size = fields.count("vocab_size")
        self.max_positions = fields.count("max_position_embeddings")

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the weights.

        Raises:
            ModelConfigError: transformers cannot make the model.
        """
        return _num_bytes(self._make(Placement(dtype, torch.device("meta"))))

    def load(
        self, config: WorkerConfig, ops: Ops, placement: Placement, max_model_len: int, progress: Progress
    ) -> LoadedModel:
        """Make the model, fill it, and prove that it computes with paged attention what it computes without.

        Raises:
            ModelConfigError: it does not, or asks for what is not supported.
            WeightsError: the weights are missing, damaged, or do not fit.
        """
        _refuse_changing_rotation(self.architecture, self._config, max_model_len)
        if config.load_format == "dummy":
            module = self._make(placement)
            fill_dummy({name: whole(weight) for name, weight in module.named_parameters()}, config.seed, progress)
        else:
            module = self._read(config, placement, progress)
        model = TransformersModel(module.eval(), ops, placement, self.vocab_size, max_model_len)
        sizes = Sizes(self.vocab_size, max_model_len, config.block_size)
        try:
            cached = check_paged(model, model.interface, placement, sizes)
        except CallRefused as error:
            raise refusal(self.architecture, str(error)) from error
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever its code does
            why = f"{type(error).__name__}: {error}"
            raise ModelConfigError(f"{self.architecture}: transformers fails to compute a few tokens: {why}") from error
        return LoadedModel(model, cached, _num_bytes(module))

    def _make(self, placement: Placement) -> Any:
        """Return the model with weights that nobody has written yet."""
        try:
            with placement.device, initialization.no_init_weights():
                made = self._class._from_config(self._config, dtype=placement.dtype, attn_implementation=_OWN)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever its code does with values that do not fit
            raise ModelConfigError(f"{self.architecture}: transformers cannot make the model: {error}") from error
        return made.requires_grad_(False)

    def _read(self, config: WorkerConfig, placement: Placement, progress: Progress) -> Any:
        checkpoint = SafetensorsCheckpoint(config.model_path)
        tensors = ForeignTensors(checkpoint)

        def read() -> Any:
            return self._class.from_pretrained(
                None,
                config=self._config,
                state_dict=tensors.by_name,
                dtype=placement.dtype,
                attn_implementation=_OWN,
                device_map=None if placement.device.type == "cpu" else {"": placement.device},
                ignore_mismatched_sizes=True,  # they are told below
                output_loading_info=True,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
            )

        try:
            with checkpoint:
                module, info = watched(read, lambda: progress(tensors.num_bytes_read, tensors.num_bytes))
        except (WeightsError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"{config.model_path}: transformers cannot load the weights: {error}") from error
        require_all(config.model_path, info)
        progress(tensors.num_bytes, tensors.num_bytes)
        return module.requires_grad_(False)


class TransformersModel:
    """A causal language model of transformers, as runners want it.

    Args:
        module: the model, with its weights.
        ops: the backend's operations.
        placement: of the weights.
        vocab_size: as config.json has it.
        max_positions: tokens of the longest sequence.
    """

    def __init__(self, module: Any, ops: Ops, placement: Placement, vocab_size: int, max_positions: int) -> None:
        self.interface = PagedInterface(ops, rotary_table(ops, None, 2, max_positions, placement))
        self._module = module
        self._placement = placement
        self._vocab_size = vocab_size
        self._body = _body_of(module)
        self._body.forward = _unless_given(self._body.forward)

    def empty_logits(self, num_rows: int) -> Tensor:
        """Return memory for logits: [num_rows, vocab_size] in the dtype of `forward`."""
        return torch.empty(num_rows, self._vocab_size, dtype=self._placement.dtype, device=self._placement.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, caches: list[KVCache]) -> Tensor:
        """Compute the batch's tokens, store their keys and values, and return logits.

        Returns:
            [S, vocab_size] in the model's dtype.
        """
        return self.logits(self.hidden(batch, caches), batch.logits_index)

    @torch.inference_mode()
    def hidden(self, batch: Batch, caches: list[KVCache]) -> Hidden:
        """Compute the batch's tokens and store their keys and values; return what logits are made of."""
        with self.interface.computing(batch, caches):
            output = self._body(
                input_ids=batch.input_ids.long().unsqueeze(0),
                position_ids=batch.positions.long().unsqueeze(0),
                use_cache=False,
            )
        return Hidden(output.last_hidden_state.squeeze(0), None)

    @torch.inference_mode()
    def logits(self, hidden: Hidden, wanted: Tensor | None) -> Tensor:
        """Return the logits of some tokens of a batch.

        Args:
            hidden: of the batch.
            wanted: [S] integer: which tokens; None: all.

        Returns:
            [S, vocab_size] in the model's dtype.
        """
        x = hidden.x if wanted is None else hidden.x[wanted]
        token = _given.set(x.unsqueeze(0))
        try:
            # The model's own way from hidden states to logits, whatever it scales or caps there.
            output = self._module(input_ids=x.new_zeros(1, x.shape[0], dtype=torch.int64), use_cache=False)
        finally:
            _given.reset(token)
        logits: Tensor = output.logits
        return logits.squeeze(0).to(self._placement.dtype)

    @torch.inference_mode()
    def own_logits(self, ids: Tensor) -> Tensor:
        """Return the logits [T, vocab_size] that the model computes of a sequence [T] with its own attention."""
        with self._attending(_OWN):
            logits: Tensor = self._module(input_ids=ids.unsqueeze(0), use_cache=False).logits
        return logits.squeeze(0)

    @torch.inference_mode()
    def probe(self, probe: Probe, ids: Tensor) -> None:
        """Have the probe look at a pass over a sequence [T]; steps can be computed from then on."""
        token = _probe.set(probe)
        try:
            with self._attending(_PROBE):
                self._module(input_ids=ids.unsqueeze(0), use_cache=False)
        finally:
            _probe.reset(token)

    @contextmanager
    def _attending(self, name: str) -> Iterator[None]:
        self._module.set_attn_implementation(name)
        try:
            yield
        finally:
            self._module.set_attn_implementation(_PAGED)


def _body_of(module: Any) -> Any:
    """Return the part of a model whose output the head turns into logits."""
    decoder = module.get_decoder()
    is_body = isinstance(decoder, transformers.PreTrainedModel) and decoder is not module
    return decoder if is_body else module.base_model


def _unless_given(forward: Any) -> Any:
    """Return the forward function of a body that can be passed by: see `_given`."""

    def given_or_computed(*args: Any, **kwargs: Any) -> Any:
        given = _given.get()
        return (
            forward(*args, **kwargs)
            if given is None
            else MoEModelOutputWithPastAndCrossAttentions(last_hidden_state=given)
        )

    return given_or_computed


def _num_bytes(module: Any) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def _without_code(values: Any) -> Any:
    """Return the values of config.json without those that choose code, at any depth."""
    if isinstance(values, list):
        return [_without_code(value) for value in values]
    if not isinstance(values, dict):
        return values
    if values.keys() == {"__float__"}:  # as transformers writes what JSON has no number for
        return float(values["__float__"])
    return {
        name: _without_code(value)
        for name, value in values.items()
        if not name.removeprefix("_").startswith(_CHOICES_OF_CODE)
    }


def _refuse(architecture: str, model_class: Any, config: Any) -> None:
    """Refuse what the class and the config show, before anything is made.

    Raises:
        ModelConfigError: as described.
    """
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise refusal(architecture, "is an encoder and a decoder (is_encoder_decoder)")
    if getattr(text, "add_cross_attention", False):
        raise refusal(architecture, "has cross attention (add_cross_attention)")
    if model_class._is_stateful:
        raise refusal(architecture, "keeps a recurrent state beside keys and values")
    others = set(getattr(text, "layer_types", None) or ()) - set(_LAYER_TYPES)
    if others:
        raise refusal(architecture, f"has layers of type {', '.join(sorted(map(str, others)))}")
    if not model_class._can_set_attn_implementation():
        raise refusal(architecture, "does not attend through transformers' attention interface (AttentionInterface)")


def _refuse_changing_rotation(architecture: str, config: Any, max_model_len: int) -> None:
    """Refuse rotary embeddings that depend on how long the longest sequence of a step is.

    Raises:
        ModelConfigError: as described.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    for rope in [parameters, *(part for part in parameters.values() if isinstance(part, dict))]:
        original = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        if rope.get("rope_type") in ("longrope", "dynamic") and max_model_len > original:
            raise ModelConfigError(
                f"{architecture} turns all tokens of a step otherwise once one of them is beyond {original} (rope_type "
                f"{rope['rope_type']}), which is not supported where transformers computes the model; "
                f"--max-model-len {original} avoids it"
            )
