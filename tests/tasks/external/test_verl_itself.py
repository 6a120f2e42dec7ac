"""verl's own classes around the adapter: its batch, and what RayPPOTrainer.fit does with the output, up to advantages.

No worker of verl starts, because each needs Ray and a GPU. Where verl 0.9.1 can be imported:

python -m pytest -m peers tests/tasks/external/test_verl_itself.py
"""

import inspect
import re
from importlib.util import find_spec
from pathlib import Path

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
    """Both managers as RayPPOTrainer.init_workers makes them, from verl's configuration and the guide's overrides."""
    import verl.trainer  # noqa: PLC0415
    from hydra import compose, initialize_config_dir  # noqa: PLC0415
    from verl.utils.import_utils import load_class_from_fqn  # noqa: PLC0415

    page = (Path(__file__).parents[3] / "docs/guide/your_trainer.md").read_text(encoding="utf-8")
    given_there = re.search(r"main_ppo (.+?) \.\.\.\n", page, re.DOTALL)[1].replace("'", "").split()
    more = ["n=3", "name=vllm", "prompt_length=24", "response_length=40"]
    overrides = [each for each in given_there if each != "\\"]
    overrides += [f"actor_rollout_ref.rollout.{each}" for each in more] + [f"trainer.default_local_dir={folder}"]
    with initialize_config_dir(f"{verl.trainer.__path__[0]}/config", version_base=None):
        config = compose("ppo_trainer", overrides)
    rollout = config.actor_rollout_ref.rollout
    manager_class = load_class_from_fqn(rollout.agent.agent_loop_manager_class, "AgentLoopManager")
    inspect.getmodule(manager_class).rollouts = lambda path: Rolled(given) if path == "my.yaml" else None
    unused = {"llm_client": None, "teacher_client": None, "reward_loop_worker_handles": None}
    manager = manager_class.create(config=config, **unused)
    engine_class = load_class_from_fqn(rollout.checkpoint_manager_class, "CheckpointEngineManager")
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
