"""prime-rl's side of the contract, by the files that its trainer reads and writes; its own code from a checkout.

prime-rl is not on PyPI. With PRIME_RL=/path/to/prime-rl at version 0.8.0, and msgspec, loguru and beartype installed:

python -m pytest -m peers tests/tasks/external/test_prime_rl.py
"""

import hashlib
import os
import shutil
import sys
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import ModuleType

import msgpack
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import gleaner
from storage.clock import ManualClock
from tasks.external import prime_rl
from tasks.external.prime_rl import PrimeMisfit, feed
from tasks.external.rollouts import Rollouts
from tests.external_program import arrays, settings, versions
from tests.small_run import memory_store, roll_out

STEPS, RANKS, SEQ_LEN = 2, 2, 128
KEPT = {"retention": {"keep_weights": 9}}


class Dies(BaseException):
    """SIGKILL of the feeding process."""


class Trainer(ManualClock):
    """prime-rl's trainer, which works while the feeder waits; `feeder_dies` at those of the feeder's looks."""

    def __init__(self, folder, url, feeder_dies=()):
        super().__init__()
        self.folder, self.url, self.seen, self.looks, self.feeder_dies = folder, url, {}, 0, set(feeder_dies)

    def sleep(self, seconds):
        self.looks += 1
        if self.looks in self.feeder_dies:
            raise Dies
        self.train()
        super().sleep(seconds)
        if -self.looks in self.feeder_dies:
            raise Dies

    def train(self):
        step = 1 + max((int(each.name[5:]) for each in (self.folder / "broadcasts").glob("step_*")), default=0)
        read = [(self.folder / "rollouts" / f"step_{step}" / f"rank_{rank}.bin").read_bytes() for rank in range(RANKS)]
        assert self.seen.setdefault(step, read) == read
        number = int(hashlib.sha256(b"".join(read)).hexdigest()[:8], 16) % 97 - 48
        place = self.folder / "broadcasts" / f"step_{step}"
        place.mkdir(parents=True)
        weights = arrays(self.url, step - 1)
        save_file(
            {name: torch.tensor(array + np.float32(number * 1e-4)) for name, array in weights.items()},
            place / "model.safetensors",
        )
        (place / "STABLE").touch()


class Rolled(Rollouts):
    """Rollouts whose members have generated before the groups are asked for."""

    def next(self, step):
        groups = super().next(step)
        roll_out(self.url, step)
        return groups


@pytest.fixture(autouse=True)
def members(monkeypatch):
    monkeypatch.setattr(prime_rl, "rollouts", Rolled)


def fed(name, model, folder, deaths=()):
    memory_store(name)
    given = settings(f"memory://{name}", model, **KEPT)
    trainer = Trainer(folder / name, given.run.url, deaths)
    while True:
        try:
            feed(given, folder / name, steps=STEPS, ranks=RANKS, seq_len=SEQ_LEN, clock=trainer)
        except Dies:
            continue
        return trainer, versions(given.run.url)


def test_each_step_is_what_the_run_has(tmp_path, model):
    trainer, published = fed("prime-rl", model, tmp_path)
    run = gleaner.open("memory://prime-rl")
    assert (list(run.iterations), len(published)) == ([0, 1], STEPS + 1)
    for step, read in trainer.seen.items():
        ranks = [msgpack.unpackb(each) for each in read]
        assert len({len(micro_batches) for micro_batches in ranks}) == 1
        rows = {tuple(row["token_ids"]): row for row in run.responses(step - 1).to_pylist()}
        found = {}
        for ids, mask, advantages, logprobs, positions, lengths, temperatures, names, again in chain(*ranks):
            assert len(ids) <= SEQ_LEN
            assert lengths == again
            assert positions == [place for length in lengths for place in range(length)]
            assert (set(temperatures), set(names), len(names)) == ({1.0}, {"gleaner"}, len(ids))
            for end, length in zip(np.cumsum(lengths), lengths, strict=True):
                part = slice(end - length, end)
                own = [at for at in range(end - length, end) if mask[at]]
                if own:
                    response = tuple(ids[at] for at in own)
                    found[response] = advantages[own[0]]
                    assert set(advantages[part]) == {advantages[own[0]]}
                    assert [logprobs[at] for at in own] == rows[response]["logprobs"]
        assert found.keys() == rows.keys()
        for group in range(4):
            rewards = {ids: row["reward"] for ids, row in rows.items() if row["group"] == group}
            mean = np.mean([*rewards.values()])
            assert [found[ids] for ids in rewards] == pytest.approx([each - mean for each in rewards.values()])


@pytest.mark.parametrize("deaths", [(1,), (-1,), (2,), (-2,), (1, -2)])
def test_a_feeder_that_dies_before_or_after_a_step_of_the_trainer_goes_on_the_same(tmp_path, model, deaths):
    undisturbed, published = fed("prime-rl-undisturbed", model, tmp_path)
    disturbed, again = fed("prime-rl-dying", model, tmp_path, deaths)
    assert (disturbed.seen, again) == (undisturbed.seen, published)
    assert disturbed.looks > STEPS or min(deaths) < 0


@pytest.mark.parametrize("deleted", [(2,), (1, 2)])
def test_a_trainer_that_goes_back_gets_the_same_steps_again(tmp_path, model, deleted):
    class Returning(Trainer):
        def train(self):
            super().train()
            if self.looks == 2:  # prime-rl starts again, and deletes what follows its checkpoint
                for step in deleted:
                    shutil.rmtree(self.folder / "broadcasts" / f"step_{step}")
                    shutil.rmtree(self.folder / "rollouts" / f"step_{step}")

    memory_store("prime-rl-back")
    given = settings("memory://prime-rl-back", model, **KEPT)
    trainer = Returning(tmp_path, given.run.url)
    feed(given, tmp_path, steps=STEPS, ranks=RANKS, seq_len=SEQ_LEN, clock=trainer)
    assert trainer.looks == STEPS + len(deleted)
    assert len(versions(given.run.url)) == STEPS + 1


def test_what_cannot_be_is_refused_in_one_line(tmp_path, model):
    memory_store("prime-rl-refused")
    given = settings("memory://prime-rl-refused", model, **KEPT)
    with pytest.raises(PrimeMisfit, match="seq_len: value 8; allowed here: at least"):
        feed(given, tmp_path, steps=1, ranks=1, seq_len=8, clock=ManualClock())
    with pytest.raises(PrimeMisfit, match="ranks: value 0; allowed: at least 1"):
        feed(given, tmp_path, steps=1, ranks=0, seq_len=SEQ_LEN)
    with pytest.raises(PrimeMisfit, match=r"rewards: value \[\]; allowed with prime-rl: at least one"):
        feed(settings("memory://prime-rl-refused", model, rewards=[]), tmp_path, steps=1, ranks=1, seq_len=SEQ_LEN)
    filtered = settings("memory://prime-rl-refused", model, algorithm={"filter_groups": True})
    with pytest.raises(PrimeMisfit, match=r"algorithm\.filter_groups: value true; allowed with prime-rl: false"):
        feed(filtered, tmp_path, steps=1, ranks=1, seq_len=SEQ_LEN, clock=ManualClock())
    with pytest.raises(PrimeMisfit, match="has written no weights after version 0"):
        feed(given, tmp_path, steps=1, ranks=1, seq_len=SEQ_LEN, limit_s=5.0, clock=ManualClock())


@pytest.mark.peers
@pytest.mark.slow
def test_prime_rl_s_own_receiver_reads_the_micro_batches(tmp_path, model, monkeypatch):
    checkout = os.environ.get("PRIME_RL")
    if checkout is None:
        pytest.skip("needs a checkout of prime-rl 0.8.0 in PRIME_RL; this file says how")
    for name in ("prime_rl", "prime_rl.transports", "prime_rl.transports.rollouts", "prime_rl.utils"):
        # Packages without their __init__, which imports vLLM's world.
        package = ModuleType(name)
        package.__path__ = [str(Path(checkout, "src", *name.split(".")))]
        monkeypatch.setitem(sys.modules, name, package)
    receiver_class = import_module("prime_rl.transports.rollouts.filesystem").FileSystemMicroBatchReceiver
    aligned = import_module("prime_rl.trainer.batch")._assert_token_arrays_aligned
    trainer, _ = fed("prime-rl-itself", model, tmp_path)
    for rank in range(RANKS):
        receiver = receiver_class(tmp_path / "prime-rl-itself", rank, 1)
        for step in (1, 2):
            assert receiver.can_receive()
            received = receiver.receive()
            for micro_batch, sent in zip(received, msgpack.unpackb(trainer.seen[step][rank]), strict=True):
                aligned(micro_batch)
                fields = [getattr(micro_batch, name) for name in type(micro_batch).__struct_fields__[: len(sent)]]
                assert fields == sent
