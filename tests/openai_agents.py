"""Agents that speak through OpenAI's own client, as a user would write them; child processes import this by name."""

import json
from typing import Any

from openai import AsyncOpenAI, BadRequestError, OpenAI

from tests.agent_functions import ADD, note


def adds(base_url: str, api_key: str, prompt: list[Any]) -> float:
    """Makes the calls of the tool `add` until there are none; the reward is the number of calls."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    assert [model.id for model in client.models.list()] == ["policy"]
    messages, calls = list(prompt), 0
    while True:
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[ADD], logprobs=True)
        message = answer.choices[0].message
        note([answer.choices[0].finish_reason, [each.logprob for each in answer.choices[0].logprobs.content]])
        messages.append(message)
        if not message.tool_calls:
            return float(calls)
        for call in message.tool_calls:
            calls += 1
            given = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})


async def streams(base_url: str, api_key: str, prompt: list[Any]) -> float:
    """Reads streams until it is refused."""
    client, messages, read = AsyncOpenAI(base_url=base_url, api_key=api_key), list(prompt), 0
    while True:
        try:
            stream = await client.chat.completions.create(
                model="policy", messages=messages, stream=True, stream_options={"include_usage": True}
            )
        except BadRequestError as error:
            note([error.code, error.message])
            return float(read)
        text = ""
        async for chunk in stream:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            tokens = chunk.usage.completion_tokens if chunk.usage else None
        read += 1
        note([text, tokens])
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
