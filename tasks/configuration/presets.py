"""Presets: the values of a paper's algorithm, under the paper's name.

Given fields override those of a preset. `tasks.configuration.algorithm` has the ranges of values.
"""

from collections.abc import Mapping
from typing import Any

# If a paper gives no number, the customary one is used; docs/guide/algorithms.md marks these.
PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 2402.03300: equations 3 and 4, section 4.2 (coefficient of the KL).
    "grpo": {
        "advantage_estimator": "grpo",
        "scale_rewards": "group",
        "policy_loss": "clip",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "loss_agg_mode": "seq-mean-token-mean",
        "kl_coef": 0.04,
        "kl_estimator": "k3",
        "kl_in": "loss",
    },
    # arXiv 2503.20783: section 3.2.
    "dr_grpo": {
        "advantage_estimator": "grpo",
        "scale_rewards": "none",
        "policy_loss": "clip",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "kl_coef": 0.0,
    },
    # arXiv 2503.14476: sections 2.3 (no KL), 3.1 to 3.4, 4.1 (numbers).
    "dapo": {
        "advantage_estimator": "grpo",
        "scale_rewards": "group",
        "policy_loss": "clip",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "loss_agg_mode": "token-mean",
        "kl_coef": 0.0,
        "overlong_buffer_length": 4096,
        "filter_groups": True,
    },
    # arXiv 2402.14740: the whole response is one action, without ratio or clip; KL in the reward.
    "rloo": {
        "advantage_estimator": "rloo",
        "policy_loss": "reinforce",
        "loss_agg_mode": "seq-mean-token-sum",
        "kl_coef": 0.03,
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
    # arXiv 2501.03262.
    "reinforce_plus_plus": {
        "advantage_estimator": "reinforce_plus_plus",
        "gamma": 1.0,
        "policy_loss": "clip",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "loss_agg_mode": "token-mean",
        "kl_coef": 0.001,
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
    # arXiv 2507.18071: equations 5 to 7, section 5.1 (clip ranges).
    "gspo": {
        "advantage_estimator": "grpo",
        "scale_rewards": "group",
        "policy_loss": "gspo",
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
        "loss_agg_mode": "seq-mean-token-mean",
        "kl_coef": 0.0,
    },
    # arXiv 2506.13585: equations 4 and 5, no lower bound. The upper one, a ratio of 5, is ScaleRL's (arXiv 2510.13786).
    "cispo": {
        "advantage_estimator": "grpo",
        "scale_rewards": "group",
        "policy_loss": "cispo",
        "clip_ratio_low": 1.0,
        "clip_ratio_high": 4.0,
        "loss_agg_mode": "token-mean",
        "kl_coef": 0.0,
    },
    # arXiv 1707.06347 as it is used on language models (arXiv 2203.02155, 2403.17031).
    "ppo": {
        "advantage_estimator": "gae",
        "gamma": 1.0,
        "gae_lambda": 0.95,
        "policy_loss": "clip",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "value_clip": 0.2,
        "loss_agg_mode": "token-mean",
        "kl_coef": 0.05,
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
}


def with_preset(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an algorithm: the given fields over the fields of the `preset`, if any.

    The result has no `preset`, so a preset and the same fields written out are the same configuration.

    Raises:
        ValueError: The preset does not exist.
    """
    given = {name: value for name, value in document.items() if name != "preset"}
    if "preset" not in document:
        return given
    preset = document["preset"]
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(f"preset: value {preset!r}; allowed: {', '.join(PRESETS)}")
    return PRESETS[preset] | given
