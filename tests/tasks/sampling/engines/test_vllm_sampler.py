"""Keyed sampling in the hands of vLLM's two model runners, played here with vLLM's own messages on CPU tensors.

A history of requests that come, leave, move and return is played at random; whatever its batch, every request must get
the tokens and log-probs that `keyed_noise.sample` gives it alone. What a runner does with the answer is done here, too:
it takes the largest logit, and returns the number that stands there.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from storage.records.records import SamplingParams
from tasks.configuration.rollout import VllmConfig
from tasks.sampling.engines.keyed_noise import sample, signed64
from tasks.sampling.engines.vllm_names import resolve
from tasks.sampling.engines.vllm_settings import prepare_environment
from tests.vllm_engines import MISSING, WHY_NOT

# vLLM and its libraries warn while they are imported.
pytestmark = [pytest.mark.skipif(MISSING, reason=WHY_NOT), pytest.mark.filterwarnings("default")]
CPU = torch.device("cpu")
VOCAB_SIZE = 61
SLOTS = 12
STEPS = 40
SEEDS = range(12)


@pytest.fixture(scope="module")
def vllm_sampler():
    """The module, which imports vLLM."""
    prepare_environment(VllmConfig(process="same"))
    from tasks.sampling.engines import vllm_sampler  # noqa: PLC0415 - there may be no vLLM

    return vllm_sampler


@dataclass
class Asked:
    """A request as vLLM knows it. `origin`: tokens of the prompt proper; generated ones may stand behind them."""

    key: int
    origin: int
    prompt: list[int]
    sampling: SamplingParams
    output: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the next token, counted from the end of the prompt proper."""
        return len(self.prompt) + len(self.output) - self.origin

    def resumed(self):
        """The same response, asked anew: what it has goes into the prompt."""
        return Asked(self.key, self.origin, [*self.prompt, *self.output], self.sampling)

    def params(self, vllm_sampler):
        """What vLLM is told."""
        extra = vllm_sampler.encode_draw(self.key, self.origin, self.sampling)
        return resolve("SamplingParams")(temperature=0.0, logprobs=0, extra_args=extra)

    def alone(self, logits, position=None):
        """Token and log-prob by the definition of keyed sampling, in a batch of one."""
        token, logprob = sample(
            logits.unsqueeze(0),
            torch.tensor([signed64(self.key)]),
            torch.tensor([self.position if position is None else position]),
            torch.tensor([self.sampling.temperature]),
            torch.tensor([self.sampling.top_p]),
            torch.tensor([self.sampling.top_k]),
        )
        return token.item(), logprob.item()


def random_request(rnd):
    """A fresh one, or one resumed from elsewhere, with any kind of sampling."""
    sampling = SamplingParams(
        max_completion_length=1000,
        temperature=rnd.choice([0.0, 0.4, 1.0, 1.0, 1.6]),
        top_p=rnd.choice([1.0, 1.0, 0.7]),
        top_k=rnd.choice([0, 0, 5]),
    )
    origin = rnd.randrange(1, 30)
    prompt = [rnd.randrange(VOCAB_SIZE) for _ in range(origin + rnd.choice([0, 0, 17]))]
    return Asked(rnd.getrandbits(64), origin, prompt, sampling)


def random_logits(rows, rnd):
    return 4 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(rnd.getrandbits(60)))


def read_back(processed):
    """Tokens and log-probs as vLLM takes them: greedily, and by `processed_logits`."""
    token_ids = processed.argmax(dim=-1)
    return list(zip(token_ids.tolist(), processed.gather(1, token_ids.unsqueeze(1)).squeeze(1).tolist(), strict=True))


def assert_drawn(found, wanted):
    assert [token for token, _ in found] == [token for token, _ in wanted]
    assert [logprob for _, logprob in found] == pytest.approx([logprob for _, logprob in wanted], abs=1e-6)


class Requests:
    """Where a runner's requests come from, and where those go that leave it unfinished."""

    def __init__(self, rnd):
        self._rnd = rnd
        self._left: list[Asked] = []

    def leave(self, item):
        self._left.append(item)

    def next(self):
        """One that vLLM preempted, as it was; one that is resumed; or a new one."""
        if self._left and self._rnd.random() < 0.5:
            item = self._left.pop(self._rnd.randrange(len(self._left)))
            return item if self._rnd.random() < 0.5 else item.resumed()
        return random_request(self._rnd)


class RunnerV1:
    """The batch of model runner V1: rows without holes, and the messages that say how they changed."""

    def __init__(self, vllm_sampler, rnd):
        self.rows: list[Asked] = []
        self.happened = Counter()
        self.processor = vllm_sampler.KeyedBatchRows(None, CPU, False)
        self._module = vllm_sampler
        self._rnd = rnd
        self._requests = Requests(rnd)

    def change(self):
        """Let requests leave, come and move, in vLLM's order, and tell the processor."""
        from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality  # noqa: PLC0415

        rnd, rows = self._rnd, self.rows
        leaving = rnd.randrange(len(rows) + 1) if rnd.random() < 0.4 else 0
        holes = sorted(rnd.sample(range(len(rows)), leaving))
        for row in holes:
            self._requests.leave(rows[row])
        coming = rnd.randrange(5) if rnd.random() < 0.4 or not rows else 0
        added = [self._add(holes) for _ in range(min(coming, SLOTS - len(rows) + len(holes)))]
        moved = [(first, second, MoveDirectionality.UNIDIRECTIONAL) for first, second in self._condense(holes)]
        # vLLM may leave it at the move that replaces a request.
        replaced = {second for _, second, _ in moved} if rnd.random() < 0.5 else set()
        removed = [row for row in reversed(holes) if row not in replaced]
        while len(rows) > 1 and rnd.random() < 0.2:
            first, second = rnd.sample(range(len(rows)), 2)
            rows[first], rows[second] = rows[second], rows[first]
            moved.append((first, second, MoveDirectionality.SWAP))
        self.happened += Counter({"removed": len(removed), "added": len(added)})
        self.happened += Counter(direction.name for _, _, direction in moved)
        changed = removed or added or moved
        self.processor.update_state(BatchUpdate(len(rows), removed, added, moved) if changed else None)
        assert len(self.processor._draws) == len(rows), "those that left are kept"

    def add(self, item, row):
        """Put a request into a row; vLLM's message of it."""
        self.rows[row : row + 1] = [item]
        return (row, item.params(self._module), item.prompt, item.output)

    def step(self, grows=lambda: True):
        """Draw for all rows. A row that does not grow is still within its prompt: what was drawn for it is dropped."""
        logits = random_logits(len(self.rows), self._rnd)
        wanted = [item.alone(row) for item, row in zip(self.rows, logits, strict=True)]
        found = read_back(self.processor.apply(logits))
        assert_drawn(found, wanted)
        for item, (token, _) in zip(self.rows, found, strict=True):
            if grows():
                item.output.append(token)
            else:
                self.happened["dropped"] += 1

    def _add(self, holes):
        """A request into the lowest hole, or behind the last row."""
        return self.add(self._requests.next(), holes.pop(0) if holes else len(self.rows))

    def _condense(self, holes):
        """Fill the holes from the end, lowest first: (from, to)."""
        for hole in holes:
            while len(self.rows) - 1 in holes and len(self.rows) > hole:
                self.rows.pop()
            if hole < len(self.rows):
                self.rows[hole] = self.rows.pop()
                yield len(self.rows), hole


class RunnerV2:
    """The slots of model runner V2: for a request's life, while its row may be another one in every step."""

    def __init__(self, vllm_sampler, rnd):
        from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcRequestState  # noqa: PLC0415

        self.slots: dict[int, Asked] = {}
        state = LogitsProcRequestState(CPU, SLOTS, VOCAB_SIZE, None, None, None, None)
        self.processor = vllm_sampler.KeyedSlots(None, state)
        self._module = vllm_sampler
        self._rnd = rnd
        self._requests = Requests(rnd)

    def change(self):
        """Let requests leave and come; slots are used again."""
        rnd = self._rnd
        for slot in [slot for slot in self.slots if rnd.random() < 0.1]:
            self._requests.leave(self.slots.pop(slot))
        free = [slot for slot in range(SLOTS) if slot not in self.slots]
        rnd.shuffle(free)
        for slot in free[: rnd.randrange(1, 5) if rnd.random() < 0.4 or not self.slots else 0]:
            item = self.slots[slot] = self._requests.next()
            assert self.processor.add_request(slot, item.params(self._module))
        self.processor.apply_staged_writes()

    def step(self, rows_each=1):
        """Draw for some of the requests, in any order; with drafts, for several tokens of each at once."""
        batch = self._rnd.sample(sorted(self.slots), self._rnd.randrange(1, len(self.slots) + 1))
        # A prompt in pieces is drawn for at the end of each, and what was drawn before the last is dropped.
        short = {slot: self._rnd.randrange(4) if self._rnd.random() < 0.3 else 0 for slot in batch}
        rows = [(slot, offset) for slot in batch for offset in range(rows_each)]
        places = [self.slots[slot].position + offset - short[slot] for slot, offset in rows]
        logits = random_logits(len(rows), self._rnd)
        wanted = [
            self.slots[slot].alone(row, place) for (slot, _), row, place in zip(rows, logits, places, strict=True)
        ]
        found = read_back(self.processor.apply(logits, self._context(batch, rows, places)))
        assert_drawn(found, wanted)
        for (slot, offset), (token, _) in zip(rows, found, strict=True):
            if short[slot] == offset == 0:
                self.slots[slot].output.append(token)

    def _context(self, batch, rows, places):
        from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext  # noqa: PLC0415

        # Where the token stands that is fed, counted from the first of the prompt.
        fed = [self.slots[slot].origin + place - 1 for (slot, _), place in zip(rows, places, strict=True)]
        return LogitsContext(
            expanded_idx_mapping=torch.tensor([slot for slot, _ in rows], dtype=torch.int32),
            idx_mapping=torch.tensor(batch, dtype=torch.int32),
            idx_mapping_np=np.array(batch, dtype=np.int32),
            expanded_local_pos=torch.tensor([offset for _, offset in rows], dtype=torch.int32),
            input_ids=torch.zeros(len(rows), dtype=torch.int32),
            pos=torch.tensor(fed, dtype=torch.int64),
            seq_lens_upper_bound_np=np.array(fed[: len(batch)]) + 1,
        )


def test_rows_of_runner_v1_draw_as_if_alone(vllm_sampler):
    happened = Counter()
    for seed in SEEDS:
        rnd = random.Random(seed)
        runner = RunnerV1(vllm_sampler, rnd)
        for _ in range(STEPS):
            runner.change()
            in_pieces = rnd.random() < 0.3
            runner.step(lambda rnd=rnd, in_pieces=in_pieces: not in_pieces or rnd.random() < 0.5)
        happened += runner.happened
    assert min(happened[what] for what in ("removed", "added", "UNIDIRECTIONAL", "SWAP", "dropped")) > 50


@pytest.mark.parametrize("rows_each", [1, 3])
def test_slots_of_runner_v2_draw_as_if_alone(vllm_sampler, rows_each):
    for seed in SEEDS:
        runner = RunnerV2(vllm_sampler, random.Random(seed))
        for _ in range(STEPS):
            runner.change()
            runner.step(rows_each)


def test_an_empty_batch_is_no_error(vllm_sampler):
    runner = RunnerV1(vllm_sampler, random.Random(0))
    runner.processor.update_state(None)
    runner.step()


def test_positions_stay_on_the_device_while_every_row_grows_and_are_sent_anew_when_one_does_not(vllm_sampler):
    """Positions that were moved there show in what is drawn, as long as nobody sends others."""
    runner = RunnerV1(vllm_sampler, random.Random(0))
    plain = SamplingParams(max_completion_length=1000)
    from vllm.v1.sample.logits_processor import BatchUpdate  # noqa: PLC0415

    added = [runner.add(Asked(row, 3, [1, 2, 3], plain), row) for row in range(4)]
    runner.processor.update_state(BatchUpdate(4, [], added, []))
    runner.step()
    runner.processor._positions += 1000
    for step in (1, 2):
        runner.processor.update_state(None)
        logits = random_logits(4, random.Random(step))
        moved = [item.alone(row, 1000 + step) for item, row in zip(runner.rows, logits, strict=True)]
        assert_drawn(read_back(runner.processor.apply(logits)), moved)
        for item in runner.rows[step - 1 :]:
            item.output.append(0)
    # The first row did not grow in the second step.
    runner.step()


@pytest.mark.parametrize("kind", ["KeyedBatchRows", "KeyedSlots"])
@pytest.mark.parametrize("extra", [None, {}, {"another": [1]}])
def test_requests_that_are_not_ours_are_refused(vllm_sampler, kind, extra):
    validate = getattr(vllm_sampler, kind).validate_params
    with pytest.raises(ValueError, match=r"extra_args has no 'gleaner': this engine samples with keyed noise only"):
        validate(resolve("SamplingParams")(extra_args=extra))
    validate(random_request(random.Random(0)).params(vllm_sampler))


def test_runner_v1_is_told_that_the_largest_logit_changes(vllm_sampler):
    """Else it would skip the processor for greedy requests, and all of ours are."""
    assert not vllm_sampler.KeyedBatchRows(None, CPU, False).is_argmax_invariant()


def test_runner_v2_may_warm_its_kernels_up_with_requests_of_its_own_and_their_slots_are_ours_afterwards(vllm_sampler):
    runner = RunnerV2(vllm_sampler, random.Random(0))
    warmup = resolve("SamplingParams").for_sampler_warmup()
    assert [runner.processor.add_request(slot, warmup) for slot in range(4)] == [False] * 4
    runner.processor.apply_staged_writes()
    mine = random_request(random.Random(1)).params(vllm_sampler)
    assert runner.processor.add_request(2, mine)
    assert runner.processor._draws[2] == vllm_sampler.decode_draw(mine)
