"""TRL's own GRPOTrainer with a run's members: kills of TRL's process and of members change no bit of the weights.

python -m pytest -m peers tests/tasks/external/test_trl_itself.py
"""

from importlib.util import find_spec

import pytest

from benchmarks.external_trainer import train

pytestmark = [pytest.mark.peers, pytest.mark.slow]


def test_a_killed_trl_ends_with_the_rewards_and_the_weights_of_an_undisturbed_one(tmp_path, model):
    if find_spec("trl") is None:
        pytest.skip("needs trl 1.16")
    ends = []
    for name, deaths in (("undisturbed", ()), ("killed", (1, 2))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model").symlink_to(model)
        ends.append(train(folder, 3, deaths))
    assert (ends[0].rewards, ends[0].digest) == (ends[1].rewards, ends[1].digest)
    assert ends[1].members_killed
