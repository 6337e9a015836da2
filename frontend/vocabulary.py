"""The text or bytes of each id, looked up once: knowing them makes incremental decoding exact and linear."""

from tokenizers import Tokenizer

from octavo.wire.vocabulary import DecoderRules


class BytePieces:
    """The bytes of each id, read from the tokenizer when first asked for; shared by all streams of one event loop.

    Args:
        tokenizer: the tokenizer.
        rules: how its decoder reads tokens.
        special_ids: ids of special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, rules: DecoderRules, special_ids: frozenset[int]) -> None:
        self.rules = rules
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._shown: tuple[dict[int, str | bytes], dict[int, str | bytes]] = ({}, {})

    def table(self, skip_special_tokens: bool) -> dict[int, str | bytes]:
        """Return the table of pieces read so far; `look_up` fills it. At most one entry an id of the embedding."""
        return self._shown[skip_special_tokens]

    def look_up(self, token_id: int, skip_special_tokens: bool) -> str | bytes:
        """Return an id's piece: text if it is whole characters, else bytes; '' for ids without a token."""
        skipped = skip_special_tokens and token_id in self._special_ids
        data = b"" if skipped else self.read_bytes(token_id)
        try:
            piece: str | bytes = data.decode()
        except UnicodeDecodeError:
            piece = data
        self._shown[skip_special_tokens][token_id] = piece
        return piece

    def first_text(self, token_id: int) -> str:
        """Return the text of an id that comes first, for decoders that treat the first token differently."""
        token = self._tokenizer.id_to_token(token_id) or ""
        token = token.replace(self.rules.drop_in_first, "")
        for old, new in self.rules.replacements:
            token = token.replace(old, new)
        return token

    def read_bytes(self, token_id: int) -> bytes:
        """Return an id's exact bytes inside a text; none for ids without a token."""
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self.rules.bytes_of(token)
