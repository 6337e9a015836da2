"""bad_words: from texts to the ids that must not follow one another."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from octavo.frontend.errors import InvalidArgument
from octavo.frontend.tokenizer import ModelTokenizer
from octavo.frontend.validation import GenerationParams
from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.plan import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS

MAX_WORDS = MAX_BAD_WORDS // 2
"""Of a request. Each is looked for as it stands and with a space before it, whose ids differ in most vocabularies."""

_PATH = "input.sampling.bad_words"


def check_bad_words(words: Sequence[str]) -> None:
    """See that words can be looked at one by one.

    Raises:
        InvalidArgument: too many, or one is empty.
    """
    if len(words) > MAX_WORDS:
        raise InvalidArgument(f"{len(words)} entries, limit {MAX_WORDS}", field_path=_PATH)
    for i, word in enumerate(words):
        if not word:
            raise InvalidArgument("a bad word must not be empty", field_path=f"{_PATH}[{i}]")


def with_bad_words(
    params: GenerationParams, words: Sequence[str], tokenizer: ModelTokenizer, vocab_size: int
) -> GenerationParams:
    """Return parameters that hold back the last id of each word where those before it have been drawn.

    It tokenises, so it runs where prompts are tokenised.

    Raises:
        InvalidArgument: a word has no or too many ids, or ids that the model does not have, or nothing could be drawn.
    """
    if not words:
        return params
    found: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(words):
        found |= dict.fromkeys(_forms(word, i, tokenizer, vocab_size))
    forbidden = {ids[0] for ids in found if len(ids) == 1}
    allowed = unpack_ints(params.sampling.allowed_token_ids)
    if allowed and forbidden.issuperset(allowed):
        message = f"all {len(allowed)} allowed_token_ids are bad words: nothing could be drawn"
        raise InvalidArgument(message, field_path=_PATH)
    sampling = msgspec.structs.replace(
        params.sampling,
        bad_word_ids=pack_ints(token_id for ids in found for token_id in ids),
        bad_word_lengths=pack_ints(map(len, found)),
    )
    return replace(params, sampling=sampling)


def _forms(word: str, index: int, tokenizer: ModelTokenizer, vocab_size: int) -> list[tuple[int, ...]]:
    """Return the ids of a word without and with a space before it."""
    path, most_bytes = f"{_PATH}[{index}]", tokenizer.max_prompt_bytes(MAX_BAD_WORD_TOKENS)
    if (num_bytes := len(word.encode())) > most_bytes:
        message = f"{num_bytes} bytes, limit {most_bytes} (more than {MAX_BAD_WORD_TOKENS} tokens)"
        raise InvalidArgument(message, field_path=path)
    bare = word.lstrip(" ")
    forms = []
    for text in (bare, f" {bare}"):
        ids = tokenizer.encode_text(text, add_special_tokens=False) if text else []
        if len(ids) > MAX_BAD_WORD_TOKENS:
            raise InvalidArgument(f"{len(ids)} tokens, limit {MAX_BAD_WORD_TOKENS}", field_path=path)
        if ids and max(ids) >= vocab_size:
            raise InvalidArgument(f"token id {max(ids)} lies outside the vocabulary", field_path=path)
        forms.append(tuple(ids))
    if not any(forms):
        raise InvalidArgument("the tokenizer makes no token of it", field_path=path)
    return [form for form in forms if form]
