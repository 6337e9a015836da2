"""Paged attention as transformers' attention interface wants it: a function of a module, its queries, keys and values.

One object a model. While a step is computed, each call of the function is that of the next layer: its keys and values go to
the next cache, and its queries attend through the block tables of the step. Nothing of a mask is made. Before that, a probe
of a few tokens learns what the layers are, and refuses what they ask for beyond paged attention. Imports no transformers.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from octavo.kernels.ops import Ops
from octavo.worker.models.attention_calls import (
    CallRefused,
    Options,
    plain_attention,
    read_options,
    shape_of_call,
    window_of_mask,
)
from octavo.worker.models.interface import Batch, KVCache


@dataclass(frozen=True)
class AttendingLayer:
    """One call of the attention function, as the probe saw it."""

    module: nn.Module
    asked: Options  # by the arguments
    window: int  # by arguments and mask
    num_heads: int
    num_kv_heads: int
    head_size: int


@dataclass
class _Step:
    """What is computed at this moment."""

    interface: "PagedInterface"
    batch: Batch
    caches: list[KVCache]
    layer: int = 0  # that attends next


_STEP: ContextVar[_Step] = ContextVar("step")
"""Of this thread: kernels are compiled by several."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Attend in the step that is computed, as the attention interface calls it; a mask is not needed."""
    step = _STEP.get()
    return step.interface.attend(step, module, query, key, value, arguments), None


class PagedInterface:
    """The attention of one model.

    Args:
        ops: the backend's operations.
        no_rotation: a table for `rotary_and_write_kv` that turns nothing: the model has turned queries and keys.
    """

    def __init__(self, ops: Ops, no_rotation: Tensor) -> None:
        self._ops = ops
        self._no_rotation = no_rotation
        self.layers: list[AttendingLayer] = []

    @contextmanager
    def computing(self, batch: Batch, caches: list[KVCache]) -> Iterator[None]:
        """Attend over this batch and these caches meanwhile."""
        step = _Step(self, batch, caches)
        token = _STEP.set(step)
        try:
            yield
        finally:
            _STEP.reset(token)
        if step.layer != len(self.layers):
            raise RuntimeError(f"{step.layer} layers attended, expected {len(self.layers)}")

    def attend(
        self, step: _Step, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]
    ) -> Tensor:
        """Write keys and values of the next layer and attend: [1, heads, T, head size] -> [1, T, heads, head size]."""
        layer = self.layers[step.layer]
        if layer.module is not module or layer.asked != read_options(layer.head_size, arguments):
            raise RuntimeError(f"{type(module).__name__} does not attend as it did when the model was loaded")
        cache = step.caches[step.layer]
        step.layer += 1
        return self.attend_paged(layer, q, k, v, step.batch, cache).unsqueeze(0)

    def attend_paged(
        self, layer: AttendingLayer, q: Tensor, k: Tensor, v: Tensor, batch: Batch, cache: KVCache
    ) -> Tensor:
        """[1, heads, T, head size] -> [T, heads, head size]."""
        flat_q, flat_k, flat_v = (part[0].transpose(0, 1).contiguous() for part in (q, k, v))
        flat_q = self._ops.rotary_and_write_kv(
            flat_q,
            flat_k,
            flat_v,
            batch.positions,
            self._no_rotation,
            cache.keys,
            cache.values,
            batch.slot_mapping,
        )
        return self._ops.paged_attention(
            flat_q,
            cache.keys,
            cache.values,
            batch.block_tables,
            batch.query_start,
            batch.seq_lens,
            layer.asked.scale,
            num_decodes=batch.num_decodes,
            window=layer.window,
            softcap=layer.asked.softcap,
        )


class Probe:
    """The attention of one pass over one sequence, computed as the model's own modules do, looked at and compared.

    Args:
        interface: which learns the layers.
        batch: the pass, as `PagedInterface` wants it.
        new_cache: makes a cache that holds the pass: KV heads, head size -> cache.
        limit: tokens of the longest sequence.
        tolerance: share of the largest number by which paged attention may differ.
    """

    def __init__(
        self,
        interface: PagedInterface,
        batch: Batch,
        new_cache: Callable[[int, int], KVCache],
        limit: int,
        tolerance: float,
    ) -> None:
        self._interface = interface
        self._batch = batch
        self._new_cache = new_cache
        self._limit = limit
        self._tolerance = tolerance
        self._masks: dict[int, tuple[Tensor, int]] = {}  # by address: the mask, which keeps it, and its window

    def mask(self, dense: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        """Return the mask that transformers makes for its own attention, and remember which window it has.

        Raises:
            CallRefused: it is no causal mask.
        """
        window = window_of_mask(arguments["mask_function"], self._limit, self._batch.input_ids.device)
        mask = dense(**arguments)
        self._masks[mask.data_ptr()] = (mask, window)
        return mask

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, arguments: dict[str, Any]
    ) -> Tensor:
        """Attend as the module's own code does: [1, heads, T, head size] -> [1, T, heads, head size].

        Raises:
            CallRefused: the module asks for what paged attention does not do, or that gives something else.
        """
        num_heads, num_kv_heads, head_size = shape_of_call(q, k, v, self._batch.input_ids.shape[0])
        asked = read_options(head_size, arguments)
        layer = AttendingLayer(module, asked, self._window(mask, asked), num_heads, num_kv_heads, head_size)
        eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
        own = plain_attention(q, k, v, mask, asked) if eager is None else eager(module, q, k, v, mask, **arguments)[0]
        ours = self._interface.attend_paged(layer, q, k, v, self._batch, self._new_cache(num_kv_heads, head_size))
        if ours.shape != own.shape[1:]:
            raise CallRefused(f"attends to an output of shape {list(own.shape)}")
        largest = float(own.abs().max())
        differs = float((ours - own[0]).abs().max())
        if not differs <= self._tolerance * largest:
            raise CallRefused(f"attends otherwise than its arguments say (by {differs:.2g} of {largest:.2g})")
        self._interface.layers.append(layer)
        return own

    def _window(self, mask: Tensor | None, asked: Options) -> int:
        if mask is None:
            raise CallRefused("attends without a mask, to what comes later as well")
        if mask.data_ptr() not in self._masks:
            raise CallRefused("makes masks of its own")
        window = self._masks[mask.data_ptr()][1]
        if asked.window > 0 and window != (asked.window if asked.window < self._limit else 0):
            raise CallRefused(f"has a window of {asked.window} that its mask does not have")
        return window
