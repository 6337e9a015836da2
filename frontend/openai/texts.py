"""Tokens and numbers as OpenAI's JSON has them."""

LEAST_LOGPROB = -9999.0
"""What takes the place of minus infinity, for which JSON has no number; as OpenAI has it."""


def legacy_text(raw: bytes) -> str:
    """Return a token's text; parts of characters are written as OpenAI's completions write them."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
