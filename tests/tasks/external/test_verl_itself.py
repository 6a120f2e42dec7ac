"""verl's own classes around the adapter: its batch, and what RayPPOTrainer.fit does with the output, up to advantages.

No worker of verl starts, because each needs Ray and a GPU. Where verl 0.9.1 can be imported:

python -m pytest -m peers tests/tasks/external/test_verl_itself.py
"""

import inspect
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from tests.external_program import arrays, settings
from tests.tasks.external.test_verl import GIVEN, PROMPTS, Rolled, model, saved

# verl imports what Ray deprecates.
pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
__all__ = ["model"]
TEXTS = PROMPTS[0]


@pytest.fixture(autouse=True)
def with_verl() -> None:
    """Skip where verl is not installed."""
    if find_spec("verl") is None or find_spec("ray") is None:
        pytest.skip("needs verl 0.9.1 and what it imports")


def loaded(folder, given):
    """Both managers as RayPPOTrainer.init_workers makes them."""
    from omegaconf import OmegaConf  # noqa: PLC0415
    from verl.utils.import_utils import load_class_from_fqn  # noqa: PLC0415

    rollout = {"n": 3, "prompt_length": 24, "response_length": 40, "temperature": 1.0, "custom": {"gleaner": "my.yaml"}}
    trainer = {"save_freq": 1, "critic_warmup": 0, "default_local_dir": str(folder)}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "trainer": trainer})
    manager_class = load_class_from_fqn("tasks.external.verl.AgentLoopManager", "AgentLoopManager")
    inspect.getmodule(manager_class).rollouts = lambda path: Rolled(given) if path == "my.yaml" else None
    more = {"llm_client": None, "teacher_client": None, "reward_loop_worker_handles": None}
    manager = manager_class.create(config=config, **more)
    engine_class = load_class_from_fqn("tasks.external.verl.CheckpointEngineManager", "CheckpointEngineManager")
    return manager, engine_class(config=None, actor_wg=None, replicas=[])


def batch():
    """A batch of verl's data loader, with the ids that RayPPOTrainer.fit gives."""
    from verl import DataProto  # noqa: PLC0415

    objects = np.empty(len(TEXTS), dtype=object)
    objects[:] = [[{"role": "user", "content": text}] for text in TEXTS]
    rows = {
        "raw_prompt": objects,
        "data_source": np.array(["sums"] * len(TEXTS), dtype=object),
        "reward_model": np.array([{"ground_truth": text[0]} for text in TEXTS], dtype=object),
        "extra_info": np.array([{"index": at} for at in range(len(TEXTS))], dtype=object),
        "uid": np.array(TEXTS, dtype=object),
    }
    return DataProto.from_dict(tensors={"dummy": torch.zeros(len(TEXTS), 1)}, non_tensors=rows)


def test_a_step_of_verl_s_trainer_up_to_advantages(tmp_path, model, monkeypatch):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage  # noqa: PLC0415
    from verl.trainer.ppo.reward import extract_reward  # noqa: PLC0415

    given = settings(str(tmp_path / "run"), model, **GIVEN)
    monkeypatch.chdir(tmp_path)
    manager, engine = loaded(tmp_path / "checkpoints", given)
    for step in (1, 2):
        whole = batch()
        generated = RayPPOTrainer._get_gen_batch(None, whole)
        generated.meta_info["global_steps"] = step
        out = manager.generate_sequences(generated.repeat(repeat_times=3, interleave=True))
        out.meta_info.pop("timing")
        whole = whole.repeat(repeat_times=3, interleave=True).union(out.slice(0, 6))
        assert {tuple(turn["content"] for turn in messages) for messages in whole.non_tensor_batch["raw_prompt"]} == {
            (text,) for text in TEXTS
        }
        scores, extras = extract_reward(whole)
        assert extras == {}
        whole.batch["token_level_rewards"] = whole.batch["token_level_scores"] = scores
        trained = compute_advantage(whole, adv_estimator="grpo", num_repeat=3)
        rewards = scores.sum(-1).reshape(2, 3)
        expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        torch.testing.assert_close(trained.batch["advantages"][:, 0], expected.flatten())
        assert set(out.non_tensor_batch["max_global_steps"]) == {step - 1}
        saved(tmp_path / "checkpoints", step, arrays(given.run.url, step - 1))
        assert engine.update_weights(step) == {}
    manager.close()


def test_the_managers_take_what_verl_gives():
    from verl.checkpoint_engine import CheckpointEngineManager as Theirs  # noqa: PLC0415
    from verl.experimental.agent_loop import AgentLoopManager as TheirLoop  # noqa: PLC0415

    from tasks.external.verl import AgentLoopManager, CheckpointEngineManager  # noqa: PLC0415

    assert list(inspect.signature(CheckpointEngineManager).parameters) == list(inspect.signature(Theirs).parameters)
    for name in ("update_weights", "sleep_replicas"):
        ours, theirs = (inspect.signature(getattr(each, name)) for each in (CheckpointEngineManager, Theirs))
        assert list(ours.parameters) == list(theirs.parameters)
    ours, theirs = (inspect.signature(each.generate_sequences) for each in (AgentLoopManager, TheirLoop))
    assert list(ours.parameters) == list(theirs.parameters)
