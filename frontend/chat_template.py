"""The model's chat template: a conversation becomes one text.

Templates are Jinja, in the dialect that Hugging Face models are written for (trimmed blocks, loop controls, `tojson`,
`raise_exception`, `strftime_now`, `generation` blocks). They come with the model, yet run in an immutable sandbox.
"""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.frontend.tokenizer import ModelFilesError
from octavo.wire.model_files import read_model_text

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Entries of tokenizer_config.json that templates may use."""

END_MARK = "\ufdef "
"""Put behind an open last message, to find its end; the space shows whether the template trims."""


class TemplateError(Exception):
    """The template refuses the conversation, or cannot render it; the text is the template's own where it has one."""


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template.

    Attributes:
        template: what Jinja made of it.
        variables: what it is given besides the conversation (special tokens).
        source: its text.
        for_tools: the template that takes its place when there are tools, where the model has one.
    """

    template: jinja2.Template
    variables: Mapping[str, str] = field(default_factory=dict)
    source: str = "content"
    for_tools: "ChatTemplate | None" = None

    @property
    def reads_content(self) -> bool:
        """Whether its text names `content`, without which no message can be continued."""
        return "content" in self.source

    @property
    def reads_tools(self) -> bool:
        """Whether it, or the one for tools, shows tools to the model."""
        return self.for_tools is not None or "tools" in self.source

    @property
    def knows_developers(self) -> bool:
        """Whether it knows the role `developer`."""
        return "developer" in self.source

    @property
    def whole_source(self) -> str:
        """Its text, with that of the one for tools."""
        return self.source + (self.for_tools.source if self.for_tools else "")

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object],
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """Render a conversation.

        Args:
            messages: dicts with role, content and perhaps more; not empty.
            add_generation_prompt: whether the assistant's turn is opened.
            continue_final_message: whether the last message is left open.
            variables: further variables.
            tools: what the model may call, in OpenAI's shape.

        Raises:
            TemplateError: the template refuses the conversation or fails on it.
        """
        if tools and self.for_tools is not None:
            return self.for_tools.render(messages, add_generation_prompt, continue_final_message, variables, tools)
        if continue_final_message:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": last["content"] + END_MARK}]
        conversation = {
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self.template.render({**self.variables, **variables, **conversation})
        except SecurityError as error:
            raise TemplateError("the chat template does what its sandbox forbids") from error
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or "the chat template failed") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise TemplateError("the chat template cannot render this conversation") from error
        return _cut_at_end_mark(text) if continue_final_message else text


def load_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the template of chat_template.jinja, else of tokenizer_config.json; None if the model has none.

    Of several templates it is the one named `default`, with `tool_use` beside it.

    Raises:
        ModelFilesError: a template cannot be read or compiled.
    """
    path = folder / "chat_template.jinja"
    has_file = path.exists()
    where = path if has_file else folder / "tokenizer_config.json"
    source: object = _read_template(path) if has_file else tokenizer_config.get("chat_template")
    path_for_tools = folder / "additional_chat_templates" / "tool_use.jinja"
    source_for_tools: object = _read_template(path_for_tools) if path_for_tools.exists() else None
    if isinstance(source, list):
        named = {str(t.get("name")): t.get("template") for t in source if isinstance(t, dict)}
        source, source_for_tools = named.get("default"), named.get("tool_use", source_for_tools)
    if source is None:
        return None
    variables = {name: text for name in SPECIAL_TOKEN_NAMES if (text := token_text(tokenizer_config.get(name)))}
    for_tools = None if source_for_tools is None else _compiled(source_for_tools, where, variables)
    return _compiled(source, where, variables, for_tools)


def _read_template(path: Path) -> str:
    try:
        return read_model_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"cannot read {path}: {error}") from error


def _compiled(
    source: object, where: Path, variables: Mapping[str, str], for_tools: ChatTemplate | None = None
) -> ChatTemplate:
    if not isinstance(source, str):
        raise ModelFilesError(f"{where}: the chat template is no text")
    try:
        template = compile_template(source)
    except jinja2.TemplateError as error:
        raise ModelFilesError(f"{where}: the chat template cannot be compiled: {error}") from error
    return ChatTemplate(template, variables, source, for_tools)


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template.

    Raises:
        jinja2.TemplateError: it is not valid.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def token_text(entry: object) -> str | None:
    """Read a special token of tokenizer_config.json: a text, or an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _cut_at_end_mark(text: str) -> str:
    place = text.rfind(END_MARK.rstrip())
    if place < 0:
        raise TemplateError("the last message cannot be continued: the chat template leaves it out")
    kept = text[:place]
    return kept if text.startswith(END_MARK, place) else kept.rstrip()


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Replace the block by a call that returns its content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()
