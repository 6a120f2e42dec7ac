"""The trial of a chat template in a child process, before this process renders anything with it.

A template is a program: an endless template, or a template that fills the memory, would take this process down. The
trial does not judge the rendered text: many templates refuse some of the short conversations.
"""

import time
from collections.abc import Mapping
from typing import Any

from resources import user_process
from resources.wire import PeerGone, receive, send
from tasks.prompts.prompt import PromptError

TIME_LIMIT_S = 10.0
_START_LIMIT_S = 120.0


def try_templates(tokenizer: Any, time_limit_s: float = TIME_LIMIT_S) -> int:
    """Try the chat templates of a tokenizer of transformers, and return their number.

    Raises PromptError for a template without bounds on time, memory or text.
    """
    found = getattr(tokenizer, "chat_template", None)
    templates = [str(each) for each in found.values()] if isinstance(found, Mapping) else [str(found)] if found else []
    if not templates:
        return 0
    tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    problem = _tried({"templates": templates, "tokens": tokens}, time_limit_s)
    if problem is not None:
        raise PromptError(
            f"policy.path: the chat template {problem}; allowed: a template that ends, and whose text fits"
        )
    return len(templates)


def _tried(message: dict[str, Any], time_limit_s: float) -> str | None:
    """The problem with the templates, as the end of a sentence; None without a problem."""
    process = user_process.start("tasks.prompts.template_program")
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("a child process without pipes")
    limit_s = _START_LIMIT_S
    try:
        send(process.stdin.fileno(), message, time.monotonic() + limit_s)
        receive(process.stdout.fileno(), time.monotonic() + limit_s)
        limit_s = time_limit_s
        problem: str | None = receive(process.stdout.fileno(), time.monotonic() + limit_s)["problem"]
    except TimeoutError:
        return f"renders one of four short conversations for more than {limit_s:g} s"
    except PeerGone:
        return "ends the process that renders a short conversation"
    finally:
        user_process.end(process)
        process.stdin.close()
        process.stdout.close()
    return problem
