"""The model of a served run, as far as the server needs it: prompts to tokens, and tokens to text and calls."""

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.records.run import holds_run
from storage.stores.connect import connect
from tasks.configuration.run_config import RunConfig
from tasks.grading.run_rewards import held_models
from tasks.preparing.checks import draw
from tasks.preparing.first_weights import model_directory_of_run, origin_of, with_local_inputs
from tasks.preparing.local_inputs import open_local_inputs
from tasks.preparing.stop_tokens import stop_ids_of_run
from tasks.preparing.tools import model_tokenizer, prompt_tokenizer
from tasks.prompts.decode import open_decoder
from tasks.prompts.prompt import Message, PromptError
from tasks.prompts.submitted import PROMPT, TOKENS, SubmittedPrompts
from tasks.prompts.tokenise import Tokenizer
from tasks.turns.agent_language import AgentLanguage, Spoken
from tasks.turns.chat_request import Refusal
from tasks.turns.tool_schemas import Schema


class ServedModel:
    """The tokenizer of a run, for any number of threads."""

    def __init__(self, config: RunConfig, folder: Path, tokenizer: Tokenizer, stops: Collection[int]) -> None:
        """folder: has the model's configuration and tokenizer. stops: ids of the tokens that end a turn."""
        self._config, self._folder, self._tokenizer = config, folder, tokenizer
        self._decode = open_decoder(folder, special_tokens=not config.sampling.skip_special_tokens)
        self._decode_all = open_decoder(folder, special_tokens=True)
        skips = config.sampling.skip_special_tokens
        self._language = AgentLanguage(model_tokenizer(tokenizer), stops, skip_special_tokens=skips)
        self._lock = threading.Lock()

    def prompt(self, given: str | tuple[int, ...] | list[Message], tools: Sequence[Schema] = ()) -> dict[str, Any]:
        """A prompt to submit, with its tokens: of text, token ids or chat messages, which may have tools.

        Raises PromptError for a misfit, and Refusal for tools that the run cannot show.
        """
        with self._lock:
            submitted: Any = given
            if tools and isinstance(given, list):
                submitted = {PROMPT: given, TOKENS: self._with_tools(given, tools)}
            if isinstance(given, tuple):
                # People read the text of the tokens; a prompt is never empty.
                submitted = {PROMPT: self._decode_all(given) or repr(given), TOKENS: list(given)}
            prompts = SubmittedPrompts([submitted])
            [row] = draw(self._config, prompts, self._tokenizer, self._folder, first=0, count=1)
        return {PROMPT: row.prompt, TOKENS: list(row.token_ids)}

    def stop_tokens(self) -> dict[int, str]:
        """The run's stop tokens with their texts; a first window with a chat may add one. Raises StorageError."""
        store = connect(self._config.run.url)
        with self._lock:
            ids = stop_ids_of_run(store, self._folder, self._tokenizer, (), with_turns=False)
        return dict(zip(ids, self.pieces(ids), strict=True))

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a response, as rewards would read it."""
        with self._lock:
            return self._decode(token_ids)

    def spoken(self, token_ids: Sequence[int], tools: Sequence[Schema]) -> Spoken:
        """A response as a turn with calls of tools, as agents read it."""
        with self._lock:
            return self._language.spoken(token_ids, tools)

    def pieces(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """The text of each token alone, special tokens included."""
        with self._lock:
            return tuple(self._decode_all([token]) for token in token_ids)

    def _with_tools(self, messages: list[Message], tools: Sequence[Schema]) -> list[int]:
        for name, allowed in (("chat_template_kwargs", {}), ("continue_final_message", False)):
            if getattr(self._config.data, name) != allowed:
                raise Refusal(f"tools: {len(tools)} given; allowed with the run's data.{name}: none", param="tools")
        try:
            return list(self._language.prompt_ids(messages, tools))
        except Exception as error:  # a template is a program of the model's author and may raise anything
            reason = " ".join(str(error).split())[:300]
            raise PromptError(f"the chat template refused the messages with these tools: {reason}") from error


@contextmanager
def opened_model(config: RunConfig) -> Iterator[ServedModel]:
    """The model of a run, from the run's directory or, for a new run, from where the configuration says.

    Raises ModelError, PromptError, HubError and OriginError, as the run's first plan does.
    """
    store = connect(config.run.url)
    is_new = not holds_run(store)
    with open_local_inputs(None if is_new else store) as inputs:
        held, origin = held_models(store, config.rewards), origin_of(store, config)
        local = with_local_inputs(store, config, inputs, held, origin)
        folder = model_directory_of_run(store, local, inputs.folder)
        tokenizer = prompt_tokenizer(config, folder, is_new=is_new)
        stops = stop_ids_of_run(store, folder, model_tokenizer(tokenizer), (), with_turns=True)
        yield ServedModel(config, folder, tokenizer, stops)
