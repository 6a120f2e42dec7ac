"""Cases: a finished response as reward functions see the response, with the conversation in a run with turns."""

from collections.abc import Callable, Sequence

from storage.journal.assembly import Assembled
from storage.journal.responses import Response
from storage.journal.turns import decode_turn
from storage.records.prompt_table import PromptRow
from tasks.grading.reward import GradedConversation, GradingCase
from tasks.turns.reading import ReadMessages


def grading_case(
    response: Assembled | Response,
    prompt: PromptRow,
    decode: Callable[[Sequence[int]], str],
    read_messages: ReadMessages | None,
) -> GradingCase:
    """The case of a finished response.

    Args:
        response: The response, from the journal or from a stored part.
        prompt: The response's prompt.
        decode: Makes text from token ids.
        read_messages: Reads the messages of a response in a run with turns, where the completion is the text of the
            policy's last turn; None in a run without turns.

    Raises:
        ValueError: A response has turns in a run without turns, or an event is damaged.
    """
    ids = tuple(int(token) for token in response.token_ids)
    if read_messages is None:
        if response.events or len(response.origins) > 1:
            raise ValueError(f"response {response.response} has turns; allowed: none, in a run without the section")
        return GradingCase(response.response, prompt.prompt, decode(ids), ids, prompt.columns)
    asked, followed = read_messages(prompt, ids, response.origins, response.events)
    said = [message for message in followed if message["role"] == "assistant"]
    conversation = GradedConversation(
        messages=[*asked, *followed],
        num_prompt_messages=len(asked),
        policy_length=response.policy_length,
        reward=decode_turn(response.events[-1]).reward if response.events else None,
    )
    text = (said[-1].get("content") or "") if said else ""
    return GradingCase(response.response, prompt.prompt, text, ids, prompt.columns, conversation)
