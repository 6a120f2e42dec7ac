"""SiblingSpeculator: vLLM's drafts from responses to an equal prompt, in the place of its n-gram speculator.

VLLM's model runner V2 holds the tokens of all its slots on the device. A ring beside them holds earlier responses:
those that ended here, copied on the device when their slot is needed, and those that the session hands over. The host
keeps books when a request comes (sibling_rows.py), and a step is two kernels, so vLLM's scheduling stays asynchronous.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tasks.sampling.engines.sibling_rows import SiblingRows
from tasks.sampling.engines.suffix_match_triton import Rows, propose
from tasks.sampling.engines.vllm_names import resolve

# The ring's memory, at 4 bytes a token and the model's context a row, and its most rows.
_RING_BYTES, _RING_ROWS_MAX = 64 << 20, 4096
# Rows in which a response is looked up: groups of usual size, and as many earlier responses.
_CANDIDATES = 32


class SiblingSpeculator(resolve("BaseSpeculator")):  # type: ignore[misc]
    """A speculator of vLLM's model runner V2, which has been given n-gram settings and has started."""

    # What the model runner reads.
    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, states: Any, most: int, *, ring_bytes: int = _RING_BYTES) -> None:
        """Make one without rows.

        Args:
            states: the RequestState of the model runner.
            most: the most drafts of a response in a step.
            ring_bytes: the most bytes of the ring, which has one row at least.
        """
        slots, length = states.all_token_ids.gpu.shape
        device = states.all_token_ids.gpu.device
        ring = min(max(1, ring_bytes // (4 * length)), _RING_ROWS_MAX)
        self.books = SiblingRows(slots, ring, _CANDIDATES)
        self._rows = Rows(
            flying=states.all_token_ids.gpu,
            flying_lengths=states.total_len.gpu,
            ring=torch.zeros(ring, length, dtype=torch.int32, device=device),
            ring_lengths=torch.zeros(ring, dtype=torch.int32, device=device),
        )
        self._candidates = torch.full((slots, _CANDIDATES), -1, dtype=torch.int32, device=device)
        self._columns = 1
        self._scores = torch.zeros(slots, _CANDIDATES, dtype=torch.int64, device=device)
        self._drafts = torch.zeros(slots, most, dtype=torch.int64, device=device)

    def occupy(self, slot: int, scope: int) -> None:
        """A request of a scope takes a slot; its tokens are not on the device yet, and the old ones are."""
        saved = self.books.occupy(slot, scope)
        if saved is not None:
            self._rows.ring[saved].copy_(self._rows.flying[slot])
            self._rows.ring_lengths[saved].copy_(self._rows.flying_lengths[slot])

    def remember(self, scope: int, responses: Sequence[Sequence[int]]) -> None:
        """Take earlier responses into the ring; tokens beyond the model's context are left out."""
        for response in responses:
            tokens = torch.tensor(response[: self._rows.ring.shape[1]], dtype=torch.int32)
            saved = self.books.remember(scope)
            self._send(tokens, self._rows.ring[saved, : len(tokens)])
            self._rows.ring_lengths[saved].fill_(len(tokens))

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """See vLLM; there is no graph."""

    def capture(self) -> None:
        """See vLLM; there is no graph."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,  # noqa: ARG002
        slot_mappings: Any,  # noqa: ARG002
        last_hidden_states: Tensor,  # noqa: ARG002
        aux_hidden_states: Any,  # noqa: ARG002
        num_sampled: Tensor,
        num_rejected: Tensor,  # noqa: ARG002
        last_sampled: Tensor,
        *_: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **__: Any,
    ) -> Tensor:
        """Return int64 [requests of the batch, most drafts]; see `suffix_match_triton.propose`."""
        drafts = self._drafts[: input_batch.num_reqs]
        if dummy_run or num_speculative_tokens == 0:
            return drafts
        if self.books.is_changed:
            self._send(torch.from_numpy(self.books.candidates.copy()), self._candidates)
            self._columns = max(1, int((self.books.candidates >= 0).sum(axis=1).max()))
            self.books.is_changed = False
        requests = input_batch.idx_mapping[: input_batch.num_reqs]
        last = last_sampled.view(-1)
        propose(self._rows, requests, self._candidates, self._columns, num_sampled, last, self._scores, self._drafts)
        return drafts

    def _send(self, values: Tensor, to: Tensor) -> None:
        """Copy from the host without waiting for the device."""
        to.copy_(values.pin_memory() if to.device.type == "cuda" else values, non_blocking=True)


def install(runner: Any, sampler_type: type) -> None:
    """Let a model runner draft from siblings; it must have started with n-gram settings, and take no requests yet.

    sampler_type: the class of the runner's logits processor with a hook `occupy`.
    """
    speculator = SiblingSpeculator(runner.req_states, runner.num_speculative_steps)
    for processor in runner.sampler.logits_processors:
        if isinstance(processor, sampler_type):
            processor.occupy = speculator.occupy  # type: ignore[attr-defined]
            runner.speculator = speculator
            return
    raise RuntimeError("vLLM's sampler has no keyed noise")
