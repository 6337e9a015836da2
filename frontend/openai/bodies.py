"""Bodies of requests: what they hold is counted before they are decoded, and large ones are decoded in a thread.

Decoding holds the interpreter, thread or not. Texts cost little for each byte of them; values cost hundreds of times as
much, so it is their number that is bounded.
"""

from octavo.frontend.openai.errors import HttpError

INLINE_BYTES = 32768
"""Bodies up to this size are decoded at once."""

MAX_VALUES = 262_144
"""Of a body: numbers, texts, lists, objects. A prompt of ids is as many values as it has ids."""

MAX_DEPTH = 4096
"""More than any decoder goes down."""


def check_values(body: bytes, limit: int = MAX_VALUES) -> None:
    """See that a body does not hold too many values; they are counted by the commas between them.

    Raises:
        HttpError: it does.
    """
    if body.count(b",") <= limit:
        return
    # Commas in texts do not count. Without escapes, every second quote ends a text.
    max_texts = 2 * limit + MAX_DEPTH  # a value in an object has a name beside it, the only one there no comma
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num_commas = num_texts = start = 0
    while num_commas <= limit and num_texts <= max_texts:
        begin = plain.find(b'"', start)
        num_commas += plain.count(b",", start, begin if begin >= 0 else len(plain))
        if begin < 0 or (end := plain.find(b'"', begin + 1)) < 0:
            break
        num_texts += 1
        start = end + 1
    if num_commas > limit or num_texts > max_texts:
        message = f"the body holds more than {limit} values: send long prompts as text, or fewer in one request"
        raise HttpError(400, message, code="invalid_argument")
