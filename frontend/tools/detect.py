"""Which parsers read a model's text: named by a flag, or told by the chat template, which shows the model's forms."""

from octavo.frontend.tools.parser import HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC, TOOL_DIALECTS, ToolDialect
from octavo.frontend.tools.reasoning import BEGIN, END, Start

AUTO, NONE = "auto", "none"
LEAVES_OUT_BEGIN = "deepseek_r1"
"""Models whose text is thought from its first character on, whether or not the template has opened it."""

TOOL_PARSERS = (AUTO, *TOOL_DIALECTS, NONE)
REASONING_PARSERS = (AUTO, LEAVES_OUT_BEGIN, "qwen3", NONE)


def find_dialect(name: str, template: str) -> ToolDialect | None:
    """Return how calls are written; None if that is not known, or is not wanted.

    Args:
        name: one of TOOL_PARSERS.
        template: text of the chat template, '' if there is none.
    """
    if name != AUTO:
        return TOOL_DIALECTS.get(name)
    if "<tool_call>" in template:
        # Others put something else than JSON between these markers.
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|python_tag|>" in template or '"parameters": dictionary of argument name' in template:
        return LLAMA3_JSON
    if "[func_name1(" in template:
        return PYTHONIC
    return None


def find_reasoning(name: str, template: str) -> str | None:
    """Return the parser of what is thought: deepseek_r1, qwen3 or None.

    Args:
        name: one of REASONING_PARSERS.
        template: text of the chat template, '' if there is none.
    """
    if name != AUTO:
        return None if name == NONE else name
    return "qwen3" if END in template else None


def find_start(reasoning: str | None, rendered: str, continued: str | None) -> Start | None:
    """Return where the text begins that follows a prompt; None if nothing is thought.

    Args:
        reasoning: what `find_reasoning` returned.
        rendered: the prompt.
        continued: the message that is continued, None if a new one begins. Only there and at the prompt's end a marker
            is the assistant's.
    """
    if reasoning is None:
        return None
    if continued:
        begin, end = continued.rfind(BEGIN), continued.rfind(END)
        return Start.INSIDE if begin > end else Start.BEHIND
    tail = rendered[-256:].rstrip()
    if tail.endswith(BEGIN):
        return Start.INSIDE
    if tail.endswith(END):
        return Start.BEHIND
    return Start.INSIDE if reasoning == LEAVES_OUT_BEGIN else Start.OUTSIDE
