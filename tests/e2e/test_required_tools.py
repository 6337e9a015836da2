"""Calls that must be made, by a real model that has never seen a tool: each is one, and its arguments are valid."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import openai

from tests.support.service import Service, free_port
from tests.support.tool_templates import THINKING

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
    },
    "paint": {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]},
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
ASK: Any = [{"role": "user", "content": "What is the weather like in Lyon?"}]


def model_with_tools(folder: Path, demo_model: Path) -> Path:
    """Return the demo model with a template that shows tools."""
    folder.mkdir()
    for path in demo_model.iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").unlink()
    template = THINKING.replace("<|start|>", "<|im_start|>").replace("<|end|>", "<|im_end|>")
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_required_calls(make_service: Callable[..., Service], demo_model: Path, tmp_path: Path) -> None:
    http_port = free_port()
    folder = model_with_tools(tmp_path / "model", demo_model)
    flags = ("--backend", "cpu", "--http-port", str(http_port))
    make_service().serve(str(folder), *flags).wait_until_ready()
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    base_url = f"http://127.0.0.1:{http_port}/v1"
    with contextlib.closing(openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)) as client:
        create: Any = client.chat.completions.create
        asking = {"model": "", "messages": ASK, "tools": TOOLS, "max_tokens": 200}
        choices: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}]
        for seed, tool_choice in enumerate(choices):
            answer = create(
                **asking, tool_choice=tool_choice, seed=seed, n=2, parallel_tool_calls=False, extra_body=off
            )
            for choice in answer.choices:
                assert choice.finish_reason == "tool_calls"
                assert choice.message.content is None
                (call,) = choice.message.tool_calls
                jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
                if tool_choice != "required":
                    assert call.function.name == tool_choice["function"]["name"]
