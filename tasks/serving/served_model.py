"""The model of a served run, as far as the server needs it: prompts to tokens, and tokens to text."""

import threading
from collections.abc import Iterator, Sequence
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
from tasks.preparing.tools import prompt_tokenizer
from tasks.prompts.decode import open_decoder
from tasks.prompts.prompt import Message
from tasks.prompts.submitted import PROMPT, TOKENS, SubmittedPrompts
from tasks.prompts.tokenise import Tokenizer


class ServedModel:
    """The tokenizer of a run, for any number of threads."""

    def __init__(self, config: RunConfig, folder: Path, tokenizer: Tokenizer) -> None:
        """folder: has the model's configuration and tokenizer."""
        self._config, self._folder, self._tokenizer = config, folder, tokenizer
        self._decode = open_decoder(folder, special_tokens=not config.sampling.skip_special_tokens)
        self._decode_all = open_decoder(folder, special_tokens=True)
        self._lock = threading.Lock()

    def prompt(self, given: str | tuple[int, ...] | list[Message]) -> dict[str, Any]:
        """A prompt to submit, with its tokens: of text, token ids or chat messages. Raises PromptError for a misfit."""
        with self._lock:
            submitted: Any = given
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

    def pieces(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """The text of each token alone, special tokens included."""
        with self._lock:
            return tuple(self._decode_all([token]) for token in token_ids)


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
        yield ServedModel(config, folder, prompt_tokenizer(config, folder, is_new=is_new))
