"""The child process of template_trial.py: renders short conversations with little memory.

The program saves seconds by not importing transformers; templates get equal functions, filters and tags.
"""

import json
import resource
import time
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from resources.user_process import serve_parent

# A short conversation takes a thousandth of both.
MEMORY_BYTES_MAX = 1 << 30
CHARACTERS_MAX = 1 << 22

Conversation = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]
_USER = {"role": "user", "content": "Hello."}
_SYSTEM = {"role": "system", "content": "Be brief."}
_ANSWER = {"role": "assistant", "content": "Yes."}
_CALL = {"type": "function", "function": {"name": "look", "arguments": {"key": "value"}}}
_RESULT = {"role": "tool", "name": "look", "content": "found"}
_SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": _SCHEMA}}
_CONVERSATIONS: tuple[Conversation, ...] = (
    ([_USER], None),
    ([_SYSTEM, _USER], None),
    ([_USER, _ANSWER, _USER], None),
    ([_SYSTEM, _USER, {**_ANSWER, "content": "", "tool_calls": [_CALL]}, _RESULT], [_TOOL]),
)


class _GenerationTag(jinja2.ext.Extension):
    """The block `generation`, which marks the assistant's text for training and renders its content."""

    tags = {"generation"}  # noqa: RUF012 - as in its base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def main() -> None:
    """Answer a message twice: at the beginning of the trial, and with the result."""
    inbox, replies = serve_parent()
    message = inbox.get()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    replies.send({"begins": True})
    replies.send({"problem": problem(message["templates"], message["tokens"])})


def problem(templates: list[str], tokens: dict[str, str]) -> str | None:
    """The problem with the size of the templates' results, as the end of a sentence; None without a problem."""
    found = (_problem_of(template, tokens, each) for template in templates for each in _CONVERSATIONS)
    return next((each for each in found if each is not None), None)


def _problem_of(template: str, tokens: dict[str, str], conversation: Conversation) -> str | None:
    messages, tools = conversation
    size = 0
    try:
        for piece in _compiled(template).generate(messages=messages, tools=tools, add_generation_prompt=True, **tokens):
            size += len(piece)
            if size > CHARACTERS_MAX:
                return f"makes more than {CHARACTERS_MAX:,} characters of a short conversation"
    except MemoryError:
        return f"needs more than {MEMORY_BYTES_MAX:,} bytes of memory for a short conversation"
    except Exception:  # noqa: BLE001 - a template may refuse a conversation, by any exception
        return None
    return None


def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _json_text
    environment.globals |= {"raise_exception": _refuse, "strftime_now": time.strftime}
    return environment.from_string(template)


def _json_text(value: Any, **how: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **how})


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)


if __name__ == "__main__":
    main()
