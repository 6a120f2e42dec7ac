"""Agents of tests, which child processes import by name; they speak to their address with the standard library."""

import http.client
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def note(line: object) -> None:
    """Append a line of JSON to the file that a test names."""
    with Path(os.environ["AGENT_NOTES"]).open("a") as notes:
        notes.write(json.dumps(line) + "\n")


def times(name: str) -> int:
    """How often a process has come here before in this test."""
    with Path(f"{os.environ['AGENT_NOTES']}.{name}").open("a") as file:
        before = file.tell()
        file.write("x")
    return before


def sent(base_url: str, api_key: str, body: Any, path: str = "/chat/completions", **headers: str) -> tuple[int, bytes]:
    """The status and the body of the answer to a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"} | headers
    request = urllib.request.Request(base_url + path, data, given)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def said(base_url: str, api_key: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The message of the policy; raises RuntimeError with the message of an error."""
    return chosen(base_url, api_key, messages, **fields)["message"]


def chosen(base_url: str, api_key: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The choice in an answer, as `said`."""
    status, body = sent(base_url, api_key, {"model": "policy", "messages": messages, **fields})
    answer = json.loads(body)
    if status != 200:
        raise RuntimeError(answer["error"]["message"])
    return answer["choices"][0]


def adds(base_url: str, api_key: str, prompt: list[dict[str, Any]], start: int, seed: int) -> float:
    """Makes the calls of the tool `add` until there are none; the reward is the number of calls."""
    note(["begins", start, seed])
    messages = [{"role": "system", "content": "Add."}, *prompt]
    calls = 0
    while True:
        message = said(base_url, api_key, messages, tools=[ADD])
        messages.append(message)
        if not message.get("tool_calls"):
            return float(calls)
        for call in message["tool_calls"]:
            calls += 1
            arguments = json.loads(call["function"]["arguments"])
            note([call["id"], arguments])
            text = str(start + arguments["a"] + arguments["b"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


async def chats(base_url: str, api_key: str, **_columns: Any) -> None:
    """Says `go on` until the policy says `done`."""
    messages = [{"role": "user", "content": "begin"}]
    while True:
        message = said(base_url, api_key, messages)
        note(message["content"])
        if message["content"] == "done":
            return
        messages += [message, {"role": "user", "content": [{"type": "text", "text": "go on"}]}]


def forgets(base_url: str, api_key: str, **_columns: Any) -> float:
    """Sends a history with its second request that is not its own."""
    said(base_url, api_key, [{"role": "user", "content": "begin"}])
    rewritten = [{"role": "user", "content": "begin"}, {"role": "assistant", "content": "what was not said"}]
    said(base_url, api_key, [*rewritten, {"role": "user", "content": "go on"}])
    return 1.0


def wavers(base_url: str, api_key: str, **_columns: Any) -> float:
    """Says something else whenever it runs again."""
    messages = [{"role": "user", "content": "begin"}]
    for _ in range(3):
        messages += [said(base_url, api_key, messages), {"role": "user", "content": f"life {times('life')}"}]
    return 1.0


def hurries(base_url: str, api_key: str, **_columns: Any) -> float:
    """Sends two requests at once after its first answer, and returns how many were refused."""
    found: list[str] = []
    messages = [{"role": "user", "content": "begin"}]
    messages += [said(base_url, api_key, messages), {"role": "user", "content": "go on"}]

    def ask() -> None:
        try:
            said(base_url, api_key, messages)
        except RuntimeError as error:
            found.append(str(error))
            note(str(error))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return float(len(found))


def impatient(base_url: str, api_key: str, **_columns: Any) -> float:
    """Hangs up twice while its second request waits, and sends it again."""
    messages = [{"role": "user", "content": "begin"}]
    messages += [said(base_url, api_key, messages), {"role": "user", "content": "go on"}]
    address = urllib.parse.urlsplit(base_url)
    for patience in range(2):
        connection = http.client.HTTPConnection(address.netloc)
        headers = {"Authorization": f"Bearer {api_key}"}
        body = json.dumps({"model": "policy", "messages": messages})
        connection.request("POST", f"{address.path}/chat/completions", body, headers)
        time.sleep(0.3)
        connection.close()
        time.sleep(0.3)
        note(f"hung up {patience}")
    said(base_url, api_key, messages)
    return 1.0


def raises(base_url: str, api_key: str, **_columns: Any) -> float:
    """Raises after its first answer."""
    said(base_url, api_key, [{"role": "user", "content": "begin"}])
    raise ValueError("no more")


def sleeps(base_url: str, api_key: str, **_columns: Any) -> float:
    """Does not go on after its first answer."""
    said(base_url, api_key, [{"role": "user", "content": "begin"}])
    time.sleep(1000)
    return 1.0


def dies_once(base_url: str, api_key: str, **_columns: Any) -> float:
    """Its process ends in its first life, after its first answer."""
    messages = [{"role": "user", "content": "begin"}]
    messages += [said(base_url, api_key, messages), {"role": "user", "content": "go on"}]
    if not times("death"):
        os._exit(5)
    said(base_url, api_key, messages)
    return 1.0


def silent(base_url: str, api_key: str, **_columns: Any) -> float:
    """Asks nothing."""
    return float(len(base_url) + len(api_key))


def leaves(base_url: str, api_key: str, **_columns: Any) -> float:
    """Raises SystemExit before it asks."""
    sys.exit(f"{len(base_url)} {len(api_key)}"[:0] or 3)


def endless(base_url: str, api_key: str, **_columns: Any) -> float:
    """Goes on until it is refused, and returns how often it was answered."""
    messages, answered = [{"role": "user", "content": "begin"}], 0
    while True:
        try:
            message = said(base_url, api_key, messages)
        except RuntimeError as error:
            note(str(error))
            return float(answered)
        answered += 1
        messages += [message, {"role": "user", "content": "go on, " * 3}]


def stubborn(base_url: str, api_key: str, **_columns: Any) -> float:
    """Goes on until it is refused, and raises then."""
    messages = [{"role": "user", "content": "begin"}]
    while True:
        messages += [said(base_url, api_key, messages), {"role": "user", "content": "go on"}]


def probes(base_url: str, api_key: str, bodies: list[list[Any]], **_columns: Any) -> float:
    """Sends what a test wants, then a good request; notes the answers to the former."""
    for path, headers, body in bodies:
        data = body.encode() if isinstance(body, str) else b"x" * body if isinstance(body, int) else body
        try:
            status, answer = sent(base_url, headers.pop("key", api_key), data, path, **headers)
        except (urllib.error.URLError, ConnectionError) as error:
            note([0, str(error)])
            continue
        note([status, json.loads(answer)])
    said(base_url, api_key, [{"role": "user", "content": "begin"}])
    return 1.0


def streams(base_url: str, api_key: str, fields: dict[str, Any], **_columns: Any) -> float:
    """Notes the bytes of an answer."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "begin"}], "tools": [ADD], **fields}
    status, answer = sent(base_url, api_key, body)
    note([status, answer.decode()])
    return 1.0


def roams(base_url: str, api_key: str, prompt: list[dict[str, Any]], size: int, **_columns: Any) -> float:
    """Answers with length and log-prob of what it reads, until three divides the length; the reward is its sum."""
    messages, total = list(prompt), 0
    while True:
        choice = chosen(base_url, api_key, messages, tools=[ADD] * (size % 2), logprobs=True)
        message, tokens = choice["message"], choice["logprobs"]["content"]
        length = len(message["content"] or "")
        note([size, length])
        total += length
        if length % 3 == 0:
            return float(total)
        messages += [message, {"role": "user", "content": f"{length} {sum(token['logprob'] for token in tokens):.4f}"}]
