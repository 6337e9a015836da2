"""A prompt's log-probabilities as vLLM's and OpenAI's answers have them, made a part at a time."""

import asyncio
from dataclasses import dataclass, field

from msgspec import Struct

from octavo.frontend.journal import Journal
from octavo.frontend.openai.texts import LEAST_LOGPROB, legacy_text
from octavo.frontend.tokenizer import ModelTokenizer
from octavo.wire.columns import unpack_ints

TURN_TOKENS = 256
"""So many are put into words at once, before others have their turn."""


class PromptLogprob(Struct):
    """One id at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class PromptColumns:
    """A prompt as the log-probabilities of a completion that echoes it have it: columns with one entry a token.

    Attributes:
        lengths: characters of each in the text.
    """

    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: list[dict[str, float] | None] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


async def describe_prompt(
    journal: Journal, tokenizer: ModelTokenizer, num_top: int
) -> list[dict[int, PromptLogprob] | None]:
    """Return what vLLM calls prompt_logprobs: by id, the prompt's own and the likeliest; None at the first place."""
    found: list[dict[int, PromptLogprob] | None] = []
    if (prompt := journal.prompt) is None:
        return found
    for position, token_id in enumerate(unpack_ints(journal.call.prompt_ids)[: prompt.num_told]):
        if position % TURN_TOKENS == TURN_TOKENS - 1:
            await asyncio.sleep(0)
        if (token := prompt.at(position)) is None:
            found.append(None)
            continue
        ranked = [(token_id, token.logprob, token.rank)]
        likeliest = zip(token.top_ids[:num_top], token.top_logprobs[:num_top], strict=True)
        ranked += [(top_id, logprob, rank) for rank, (top_id, logprob) in enumerate(likeliest, 1) if top_id != token_id]
        found.append(
            {
                each: PromptLogprob(max(logprob, LEAST_LOGPROB), rank, _text(tokenizer, each))
                for each, logprob, rank in ranked
            }
        )
    return found


async def prompt_columns(journal: Journal, tokenizer: ModelTokenizer, num_top: int) -> PromptColumns:
    """Return a prompt that is echoed, token by token."""
    columns, prompt = PromptColumns(), journal.prompt
    if prompt is None:
        return columns
    hidden = tokenizer.special_ids if journal.call.params.skip_special_tokens else frozenset()
    for position, token_id in enumerate(unpack_ints(journal.call.prompt_ids)[: prompt.num_told]):
        if position % TURN_TOKENS == TURN_TOKENS - 1:
            await asyncio.sleep(0)
        raw, token = tokenizer.token_bytes(token_id), prompt.at(position)
        text = legacy_text(raw)
        columns.tokens.append(text)
        columns.lengths.append(0 if token_id in hidden else len(raw.decode("utf-8", "replace")))
        columns.logprobs.append(None if token is None else max(token.logprob, LEAST_LOGPROB))
        if token is None:
            columns.top.append(None)
            continue
        likeliest = zip(token.top_ids[:num_top], token.top_logprobs[:num_top], strict=True)
        top = {legacy_text(tokenizer.token_bytes(i)): max(logprob, LEAST_LOGPROB) for i, logprob in likeliest}
        columns.top.append(top | {text: max(token.logprob, LEAST_LOGPROB)})
    return columns


def _text(tokenizer: ModelTokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")
