"""The bodies of requests, as OpenAI and vLLM have them; fields that neither knows are refused.

`None` is always the same as leaving a field out. Raw fields are not looked into: those in IGNORED have no effect with
OpenAI or vLLM either, and the others are refused when they ask for something (`octavo.frontend.openai.translate`).
"""

from typing import Annotated, TypeAlias

from msgspec import Meta, Raw, Struct

UInt32: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Int32: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]

NOTHING = Raw()

IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
)


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream brings besides text; obfuscation is OpenAI's alone, and left out."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """The form of the output."""

    type: str
    json_schema: Raw = NOTHING


class GenerationBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of completions have."""

    model: str | None = None
    n: UInt32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[UInt32, float] | None = None
    allowed_token_ids: list[UInt32] | None = None
    bad_words: list[str] | None = None
    max_tokens: UInt32 | None = None
    min_tokens: UInt32 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[UInt32] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: UInt32 | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Raw = NOTHING
    # Not served yet.
    # Ignored.
    user: Raw = NOTHING
    metadata: Raw = NOTHING
    store: Raw = NOTHING
    service_tier: Raw = NOTHING
    safety_identifier: Raw = NOTHING
    prompt_cache_key: Raw = NOTHING


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. The prompt: a text, ids, or a list of either."""

    prompt: str | list[str | UInt32 | list[UInt32]]
    logprobs: UInt32 | None = None
    best_of: UInt32 | None = None
    suffix: str | None = None


class ContentPart(Struct, forbid_unknown_fields=True):
    """A part of a message; only text is taken."""

    type: str
    text: str | None = None
    image_url: Raw = NOTHING
    input_audio: Raw = NOTHING
    file: Raw = NOTHING
    refusal: str | None = None


class CalledFunction(Struct, forbid_unknown_fields=True):
    """What a call calls."""

    name: str
    arguments: str | None = None


class MessageToolCall(Struct, forbid_unknown_fields=True):
    """A call in a message; index is of streams, from which clients put messages together."""

    id: str
    type: str = "function"
    function: CalledFunction | None = None
    custom: Raw = NOTHING
    index: int | None = None


class Message(Struct, forbid_unknown_fields=True):
    """A turn of a conversation. The fields without a use here are those of answers, which clients send back."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    function_call: Raw = NOTHING
    audio: Raw = NOTHING
    annotations: Raw = NOTHING


class FunctionDefinition(Struct, forbid_unknown_fields=True):
    """A function that may be called; `strict` changes nothing: arguments are held to their schema where a call is
    required."""

    name: str
    description: str | None = None
    parameters: Raw = NOTHING
    strict: bool | None = None


class ToolDefinition(Struct, forbid_unknown_fields=True):
    """A tool; only functions are taken."""

    type: str
    function: FunctionDefinition | None = None
    custom: Raw = NOTHING


class ChosenFunction(Struct, forbid_unknown_fields=True):
    """The function that must be called."""

    name: str


class NamedToolChoice(Struct, forbid_unknown_fields=True):
    """A choice of one tool; only functions are taken."""

    type: str
    function: ChosenFunction | None = None
    custom: Raw = NOTHING
    allowed_tools: Raw = NOTHING


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Raw = NOTHING
    max_completion_tokens: UInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Not served yet.
    functions: Raw = NOTHING
    function_call: Raw = NOTHING
    modalities: list[str] | None = None
    audio: Raw = NOTHING
    web_search_options: Raw = NOTHING
    reasoning_effort: str | None = None


class TokenizeTextBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize of a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize of a conversation."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Raw = NOTHING
    tools: list[ToolDefinition] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[UInt32]
    model: str | None = None
