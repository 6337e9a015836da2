"""Our metrics under vLLM's names, for boards and autoscalers that were made for it (--vllm-metric-names)."""

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from octavo.wire.requests import StatusReport

ENGINE = "0"
"""vLLM numbers its engines; here one scheduler and one worker are the engine."""

VLLM_NAMES = {
    "octavo_num_requests_running": ("vllm:num_requests_running",),
    "octavo_num_requests_waiting": ("vllm:num_requests_waiting",),
    "octavo_kv_cache_usage_perc": ("vllm:kv_cache_usage_perc",),
    "octavo_num_preemptions": ("vllm:num_preemptions",),
    "octavo_prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "octavo_prefix_cache_hits": ("vllm:prefix_cache_hits",),
    "octavo_prompt_tokens": ("vllm:prompt_tokens",),
    "octavo_generation_tokens": ("vllm:generation_tokens",),
    "octavo_request_success": ("vllm:request_success",),
    "octavo_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    # The second is the first one's name of old, which boards still ask for.
    "octavo_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "octavo_request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "octavo_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "octavo_request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "octavo_request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "octavo_request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "octavo_scheduler_step_tokens": ("vllm:iteration_tokens_total",),
}
"""Families by the name that they have without `_total` -> what vLLM calls them."""

CACHE_CONFIG = "vllm:cache_config_info"


def alias_families(families: Iterable[Metric], report: StatusReport | None, model: str) -> list[Metric]:
    """Return the families that vLLM has too, under its names and with its label `engine`.

    Args:
        families: ours.
        report: of the scheduler; None if it did not answer.
        model: what the label `model_name` says.
    """
    found = []
    for family in families:
        for name in VLLM_NAMES.get(family.name, ()):
            alias = Metric(name, f"{family.documentation} ({family.name})", family.type)
            alias.samples = [
                Sample(name + one.name.removeprefix(family.name), {**one.labels, "engine": ENGINE}, one.value)
                for one in family.samples
            ]
            found.append(alias)
    if report is not None and report.total_blocks:
        labels = {
            "model_name": model,
            "engine": ENGINE,
            "block_size": str(report.block_size),
            "num_gpu_blocks": str(report.total_blocks),
        }
        info = GaugeMetricFamily(CACHE_CONFIG, "Size of the KV cache, as labels.", labels=list(labels))
        info.add_metric(list(labels.values()), 1.0)
        found.append(info)
    return found
