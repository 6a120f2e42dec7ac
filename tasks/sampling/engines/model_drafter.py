"""ModelDrafter: drafts by a smaller model with the policy's vocabulary, in an engine of its own beside the policy's.

A draft is drawn with the noise of the token that it guesses: policy and draft model both take the argmax of log-probs
and the same noise, so equal distributions give equal tokens, whatever the temperature. An equal model is always right.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from storage.weights.tensor_sets import TensorBlock
from tasks.configuration.rollout import RolloutConfig
from tasks.sampling.engines.decoder import read_config
from tasks.sampling.engines.engine import EngineDied, EngineError, GenerationRequest
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.weight_tensors import tensors_of_folder


class ModelDrafter:
    """A `Drafter` that `Computes`.

    The engine's rows keep what was computed, so of a response only the tokens since its last draft are computed, and no
    right draft again.
    """

    def __init__(
        self,
        engine: TorchEngine,
        *,
        weights: Callable[[], Mapping[str, TensorBlock]],
        vocab_size: int,
        keyed: bool = True,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make one, and load the weights.

        Args:
            engine: an engine of the draft model with nothing in flight, with a row for each response in flight of the
                policy's engine, and with the same context length.
            weights: reads the draft model's weights, at each start of the engine.
            vocab_size: the draft model's; a response with a token beyond it gets no drafts.
            keyed: whether drafts are drawn with the noise of the tokens that they guess. False takes the most likely
                tokens, for measurements.
            now_s: the clock of `pass_s`.

        Raises:
            EngineError, EngineDied: as TorchEngine.load_weights.
        """
        self.pass_s: float | None = None
        self._engine = engine
        self._weights = weights
        self._vocab_size = vocab_size
        self._keyed = keyed
        self._now_s = now_s
        # By response in flight: its request, and prompt and response so far, to which the policy's engine appends.
        self._flying: dict[int, tuple[GenerationRequest, Sequence[int]]] = {}
        engine.load_weights(0, weights())

    def start(self, requests: Sequence[GenerationRequest], tokens: Sequence[Sequence[int]]) -> None:
        """See `Drafter`."""
        for request, so_far in zip(requests, tokens, strict=True):
            sampling = request.sampling if self._keyed else replace(request.sampling, temperature=0.0)
            self._flying[request.response] = replace(request, sampling=sampling), so_far

    def draft(self, responses: Sequence[int], most: int) -> list[Sequence[int]]:
        """See `Drafter`. A response gets fewer drafts where the draft model would end it.

        Raises EngineDied, and EngineError that names the draft model.
        """
        asked = [request for request in map(self._request, responses) if request is not None]
        drafts: dict[int, list[int]] = {response: [] for response in responses}
        try:
            self._engine.start(asked)
            began_s, passes = self._now_s(), 0
            while passes < most and (deltas := self._engine.step()):
                passes += 1
                for delta in deltas:
                    drafts[delta.response] += delta.token_ids
            if passes:
                # One pass more: catching up takes about one where the last drafts were right.
                self.pass_s = (self._now_s() - began_s) * (passes + 1) / passes**2
        except EngineDied:
            raise
        except EngineError as error:
            raise EngineError(f"rollout.speculation.draft_model: {error}") from error
        finally:
            self._engine.abort(responses)
        return [drafts[response] for response in responses]

    def leave(self, responses: Sequence[int]) -> None:
        """See `Drafter`."""
        for response in responses:
            del self._flying[response]

    def restart(self) -> None:
        """See `Computes`. A cache that was growing when memory ran out is whole in some layers only."""
        self._engine.restart()
        self._engine.load_weights(0, self._weights())

    def _request(self, response: int) -> GenerationRequest | None:
        """What the draft model continues; None if the response has a token that the draft model does not know."""
        request, tokens = self._flying[response]
        if max(tokens) >= self._vocab_size:
            return None
        return replace(request, generated_ids=tuple(tokens[len(request.prompt_ids) :]))


def model_drafter(config: RolloutConfig, folder: Path, *, context_length: int) -> ModelDrafter:
    """The drafter of the model in a folder, in the policy engine's dtype and on its device.

    Raises EngineError and EngineDied as TorchEngine.
    """
    engine = TorchEngine(
        folder,
        dtype=config.dtype,
        device=config.device,
        max_responses_in_flight=config.max_responses_in_flight,
        context_length=context_length,
    )
    vocab_size = read_config(folder, context_length).get_text_config().vocab_size
    return ModelDrafter(engine, weights=partial(tensors_of_folder, folder), vocab_size=vocab_size)
