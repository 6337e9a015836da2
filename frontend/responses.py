"""From chunks and ends to the public messages."""

import asyncio
from collections.abc import Iterator, Sequence

from google.protobuf.duration_pb2 import Duration

from octavo.frontend.choice import ChoiceEnd, Chunk
from octavo.frontend.prompt_logprobs import PromptToken
from octavo.frontend.streams import Stream
from octavo.frontend.tokenizer import ModelTokenizer
from octavo.frontend.tools.sink import CallDelta
from octavo.v1 import generation_pb2 as pb
from octavo.wire.columns import unpack_floats, unpack_ints
from octavo.wire.requests import ChoiceLogprobs, FinishReason

_REASONS: dict[FinishReason, pb.FinishReason.ValueType] = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
}


MAX_PROMPT_EVENT_BYTES = 2**20
"""Of an event with log-probabilities of a prompt."""

PROMPT_EVENT_TOKENS = 256
"""Of such an event: so many are put into words at once, before others have their turn."""


def started_event(stream: Stream, request_id: str, model: str) -> pb.GenerateStreamResponse:
    """Return the first event of a stream."""
    started = pb.Started(
        request_id=request_id,
        model=model,
        prompt_tokens=stream.journal.call.num_prompt_tokens,
        cached_prompt_tokens=stream.num_cached_tokens,
    )
    return pb.GenerateStreamResponse(started=started)


def prompt_events(stream: Stream, tokenizer: ModelTokenizer) -> Iterator[pb.GenerateStreamResponse]:
    """Yield what is new of the prompt's log-probabilities, in events of bounded size."""
    prompt = stream.journal.prompt
    if prompt is None or not stream.started:
        return
    ids = unpack_ints(stream.journal.call.prompt_ids)
    while (first := prompt.num_taken) < (end := min(prompt.num_told, prompt.num_taken + PROMPT_EVENT_TOKENS)):
        entries: list[pb.TokenLogprob] = []
        num_bytes = 0
        for position in range(first, end):
            entry = _prompt_token(ids[position], prompt.at(position), tokenizer)
            num_bytes += entry.ByteSize() + 8  # key and length
            if entries and num_bytes > MAX_PROMPT_EVENT_BYTES - 64:
                break
            entries.append(entry)
        prompt.num_taken += len(entries)
        told = pb.PromptLogprobs(first_position=first, logprobs=entries)
        yield pb.GenerateStreamResponse(prompt_logprobs=told)


def _prompt_token(token_id: int, token: PromptToken | None, tokenizer: ModelTokenizer) -> pb.TokenLogprob:
    raw = tokenizer.token_bytes(token_id)
    entry = pb.TokenLogprob(token_id=token_id, text=raw.decode("utf-8", "replace"), raw=raw)
    if token is not None:
        entry.logprob, entry.rank = token.logprob, token.rank
        entry.top.extend(_top(token.top_ids, token.top_logprobs, tokenizer))
    return entry


def delta_event(stream: Stream, chunk: Chunk, tokenizer: ModelTokenizer) -> pb.GenerateStreamResponse:
    """Return a chunk as an event."""
    delta = pb.Delta(index=chunk.choice, text=chunk.text, first_token=chunk.first_token)
    if chunk.reasoning:
        delta.reasoning = chunk.reasoning
    for call in chunk.calls:
        delta.tool_calls.add(tool_index=call.number, id=call.call_id, name=call.name, arguments_json=call.arguments)
    if stream.journal.call.params.token_ids:
        ids = stream.choices[chunk.choice].ids
        delta.token_ids.extend(ids[chunk.first_token : chunk.first_token + chunk.num_tokens])
    if chunk.logprobs:
        delta.logprobs.extend(_token_logprobs(stream, chunk, tokenizer))
    return pb.GenerateStreamResponse(delta=delta)


def finished_event(stream: Stream, index: int, end: ChoiceEnd, is_last: bool) -> pb.GenerateStreamResponse:
    """Return a choice's end as an event; the last one carries the usage of the request."""
    finished = pb.Finished(
        index=index,
        finish_reason=_finish_reason(end),
        usage=_usage(stream) if is_last else None,
        completion_tokens=end.num_tokens,
    )
    if end.stop_string is not None:
        finished.stop_string = end.stop_string
    if end.stop_token_id is not None:
        finished.stop_token_id = end.stop_token_id
    return pb.GenerateStreamResponse(finished=finished)


async def whole_response(stream: Stream, request_id: str, model: str, tokenizer: ModelTokenizer) -> pb.GenerateResponse:
    """Return the answer of a stream that has ended well and of which nothing was taken."""
    prompt: list[pb.TokenLogprob] = []
    for event in prompt_events(stream, tokenizer):
        prompt += event.prompt_logprobs.logprobs
        await asyncio.sleep(0)  # a long prompt is no reason to keep others waiting
    params = stream.journal.call.params
    choices = [pb.Choice(index=i) for i in range(len(stream.choices))]
    for item in stream.take(max(1, stream.journal.call.max_tokens)):
        if isinstance(item, Chunk):
            choice = choices[item.choice]
            choice.text += item.text
            choice.reasoning += item.reasoning
            _add_calls(choice, item.calls)
            choice.logprobs.extend(_token_logprobs(stream, item, tokenizer))
        else:
            index, end = item
            choice = choices[index]
            choice.finish_reason = _finish_reason(end)
            if end.stop_string is not None:
                choice.stop_string = end.stop_string
            if end.stop_token_id is not None:
                choice.stop_token_id = end.stop_token_id
            if params.token_ids:
                choice.token_ids.extend(stream.choices[index].ids)
            if end.cumulative_logprob is not None:
                choice.cumulative_logprob = end.cumulative_logprob
            if params.logprobs is not None:
                choice.cumulative_logprob = sum(entry.logprob for entry in choice.logprobs)
    return pb.GenerateResponse(
        request_id=request_id, model=model, choices=choices, usage=_usage(stream), prompt_logprobs=prompt
    )


def _finish_reason(end: ChoiceEnd) -> pb.FinishReason.ValueType:
    return pb.FINISH_REASON_TOOL_CALLS if end.by_calls else _REASONS[end.reason]


def _add_calls(choice: pb.Choice, calls: Sequence[CallDelta]) -> None:
    for call in calls:
        if call.name:
            choice.tool_calls.add(id=call.call_id, name=call.name)
        choice.tool_calls[call.number].arguments_json += call.arguments


def _token_logprobs(stream: Stream, chunk: Chunk, tokenizer: ModelTokenizer) -> list[pb.TokenLogprob]:
    ids = stream.choices[chunk.choice].ids
    return [_token_logprob(ids[entry.position], entry, tokenizer) for entry in chunk.logprobs]


def _token_logprob(token_id: int, entry: ChoiceLogprobs, tokenizer: ModelTokenizer) -> pb.TokenLogprob:
    raw = tokenizer.token_bytes(token_id)
    top = _top(unpack_ints(entry.top_ids), unpack_floats(entry.top_logprobs), tokenizer)
    return pb.TokenLogprob(
        token_id=token_id,
        text=raw.decode("utf-8", "replace"),
        raw=raw,
        logprob=entry.logprob,
        rank=entry.rank,
        top=top,
    )


def _top(ids: Sequence[int], logprobs: Sequence[float], tokenizer: ModelTokenizer) -> list[pb.TopLogprob]:
    top = []
    for rank, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True), 1):
        raw = tokenizer.token_bytes(token_id)
        text = raw.decode("utf-8", "replace")
        top.append(pb.TopLogprob(token_id=token_id, text=text, raw=raw, logprob=logprob, rank=rank))
    return top


def _usage(stream: Stream) -> pb.Usage:
    timings = stream.timings
    return pb.Usage(
        prompt_tokens=stream.journal.call.num_prompt_tokens,
        cached_prompt_tokens=stream.num_cached_tokens,
        completion_tokens=stream.journal.num_completion_tokens,
        queue_time=_duration(timings.queue_s),
        prefill_time=_duration(timings.prefill_s),
        decode_time=_duration(timings.decode_s),
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(max(0.0, seconds) * 1e9))
    return duration
