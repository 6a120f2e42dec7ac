"""The section `algorithm`: how rewards and a loss become an update.

The section has names, ranges, defaults, and values that exclude each other. Every value is checked here, before
anything is created.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from tasks.configuration.estimators import ALIKE, DEFAULT, OPTIONS, PAIRED, Estimator, Scope, estimator_of
from tasks.configuration.losses import DEFAULT_LOSS, LIKELIHOOD, LOSS_OPTIONS, PREFERENCE, Loss, loss_of
from tasks.configuration.presets import with_preset

STRICT = ConfigDict(extra="forbid", strict=True)

Kind = Literal["rl", "sft", "dpo"]
RewardScale = Literal["group", "batch", "none"]
ImportanceSampling = Literal["none", "token", "sequence-mask", "auto"]
LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k1", "k2", "k3"]


# Fields that take effect with some choices only: field -> (the field of the choice, the choices that use it).
# Those of advantage estimators and of losses are in their tables.
READ_WITH: dict[str, tuple[str, set[str]]] = {
    "importance_sampling_cap": ("importance_sampling", {"token", "sequence-mask", "auto"}),
    "label_smoothing": ("kind", {"sft", "dpo"}),
    "beta": ("kind", {"dpo"}),
    "rpo_alpha": ("kind", {"dpo"}),
}
# All fields that have an effect with each kind that learns examples, and the estimator and the loss of the kind.
READ_BY: dict[str, set[str]] = {
    "sft": {"kind", "label_smoothing", "loss_agg_mode", "num_mini_batches", "num_epochs"},
    "dpo": {"kind", "label_smoothing", "beta", "rpo_alpha", "num_mini_batches", "num_epochs"},
}
_OF_EXAMPLES = {"sft": (ALIKE, LIKELIHOOD), "dpo": (PAIRED, PREFERENCE)}
# From 1/2 on, the loss of a pair would have no lower bound.
_SMOOTHING_OF_PAIRS = 0.5
# Fields that are younger than runs that go on, with their defaults, at which they say what such a run does.
YOUNG: dict[str, object] = {"kind": "rl", "label_smoothing": 0.0, "beta": 0.1, "rpo_alpha": 0.0}


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """The loss, and the policy-gradient estimator; docs/guide/algorithms.md lists the choices of each paper.

    In a document, `preset` names a paper whose values replace the defaults below; given fields override them
    (`tasks.configuration.presets`). Values that contradict each other or have no effect raise ValueError.

    Attributes:
        kind: "rl" learns from the policy's own responses and their rewards, "sft" from the examples of a data set, by
            likelihood, "dpo" from pairs of a chosen and a rejected example. READ_BY has the fields that these two read.
        label_smoothing: With kind "sft", the share of each token's target that all tokens of the vocabulary have alike.
            With "dpo", the probability that a pair is the wrong way round.
        beta: With kind "dpo", how strongly the reference holds the policy.
        rpo_alpha: With kind "dpo", the weight of the negative log-likelihood of the chosen tokens in the loss.
        advantage_estimator: A name in `tasks.configuration.estimators.ESTIMATORS`, or "package.module:function".
        advantage_scope: For a function of the user's own, whether one call sees a "group", or the whole step ("batch").
        scale_rewards: Divides advantages by the standard deviation of the "group", of the whole "batch", or by nothing.
        advantage_eps: Added to the standard deviation.
        gamma: The discount per token.
        gae_lambda: 0 trusts the critic, 1 the rewards.
        policy_loss: A name in `tasks.configuration.losses.LOSSES`, or "package.module:function".
        clip_ratio_low: The probability ratio is clipped below at 1 - clip_ratio_low.
        clip_ratio_high: The probability ratio is clipped above at 1 + clip_ratio_high.
        clip_ratio_c: For "clip", the dual clip: bounds the ratio of negative advantages; None sets no bound.
        value_clip: How far a value may move from the old one in the critic's loss; None sets no bound.
        loss_agg_mode: How token losses become one number; see `tasks.learning.loss.token_weights`.
        kl_coef: The weight of the KL to the reference policy; with 0, no reference policy is needed.
        kl_estimator: See `tasks.learning.loss.kl_penalty`.
        kl_in: "loss" adds the KL to the loss, "reward" subtracts it from every token's reward; estimators with a number
            per response take the sum.
        overlong_buffer_length: The reward falls by 1 over this many tokens before max_completion_length; None: no fall.
        mask_truncated: Responses that were cut off at max_completion_length are not trained.
        filter_groups: Groups whose rewards are all equal, before any penalty, are not trained, and others are sampled
            instead (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2).
        filter_groups_budget: With filter_groups, an iteration samples at most num_prompts_per_step times this many
            groups, rounded up, and trains on the groups it has found by then.
        filter_groups_reward: With filter_groups, the name of the reward function whose values must not all be equal;
            None looks at the weighted sum. verl's DAPO looks at "acc" alone.
        importance_sampling: Weights that correct for a sampler that differs from the trainer's policy; see
            `tasks.learning.importance`. "auto" is "none" if the ratio of the loss already corrects (old_logprobs
            "sampler"), or if tokens come from the trainer's own weights (max_staleness 0) and the engine is known to
            compute as the trainer does; else it is "token".
        importance_sampling_cap: The largest weight.
        old_logprobs: The denominator of the ratio: "trainer" is the policy before the iteration's first optimizer step
            (in that step the ratio is 1), "sampler" takes the log-probs that the engine recorded.
        num_mini_batches: The number of optimizer steps among which an iteration's groups are divided.
        num_epochs: How often an iteration trains on its groups (TRL's num_iterations, verl's ppo_epochs).
        max_staleness: The most versions by which the weights that sampled a token may be older than the trainer's at
            the beginning of the iteration. So many iterations are rolled out ahead of training.
        micro_batch_order: "plan" trains groups in the order of the plan, "arrival" as they finish.
            "auto" is "plan" where the engine repeats a response exactly, and with filter_groups; else "arrival".
    """

    __pydantic_config__ = STRICT
    kind: Kind = "rl"
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    rpo_alpha: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    advantage_estimator: str = DEFAULT
    advantage_scope: Scope = "group"
    scale_rewards: RewardScale = "group"
    advantage_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    policy_loss: str = DEFAULT_LOSS
    clip_ratio_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    clip_ratio_high: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.28
    clip_ratio_c: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    value_clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    loss_agg_mode: LossAggregation = "token-mean"
    kl_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    overlong_buffer_length: Annotated[int, Field(ge=1)] | None = None
    mask_truncated: bool = False
    filter_groups: bool = False
    filter_groups_budget: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    filter_groups_reward: Annotated[str, Field(min_length=1)] | None = None
    importance_sampling: ImportanceSampling = "auto"
    importance_sampling_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 3.0
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    num_mini_batches: Annotated[int, Field(ge=1)] = 1
    num_epochs: Annotated[int, Field(ge=1)] = 1
    max_staleness: Annotated[int, Field(ge=0, le=8)] = 0
    micro_batch_order: Literal["auto", "plan", "arrival"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, document: Any) -> Any:
        return with_preset(document) if isinstance(document, dict) else document

    @property
    def learns_examples(self) -> bool:
        """Whether a data set has the responses, so that no policy samples and no reward function grades."""
        return self.kind in READ_BY

    @property
    def learns_pairs(self) -> bool:
        """Whether the two responses of a group are a chosen and a rejected example."""
        return self.kind == "dpo"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with the run's first weights."""
        return self.learns_pairs or self.kl_coef > 0

    @property
    def estimator(self) -> Estimator:
        """What `advantage_estimator` names, or what stands for it in a run on examples."""
        if self.learns_examples:
            return _OF_EXAMPLES[self.kind][0]
        return estimator_of(self.advantage_estimator, self.advantage_scope)

    @property
    def loss(self) -> Loss:
        """What `policy_loss` names, or the loss of a run on examples."""
        return _OF_EXAMPLES[self.kind][1] if self.learns_examples else loss_of(self.policy_loss)

    @property
    def aggregation(self) -> LossAggregation:
        """The loss_agg_mode in force: each response of a pair has the loss of the pair, and the mean is over pairs."""
        return "seq-mean-token-sum" if self.learns_pairs else self.loss_agg_mode

    @property
    def needs_whole_batch(self) -> bool:
        """Whether advantages depend on all responses of the step, not only on their own group."""
        return self.estimator.scope == "batch" or self.scale_rewards == "batch"

    @property
    def streams(self) -> bool:
        """Whether gradients can be accumulated while other responses are still being generated."""
        return self.num_mini_batches * self.num_epochs == 1 and not self.needs_whole_batch

    @property
    def corrects_for_sampler(self) -> bool:
        """Whether the loss corrects for an engine that computes otherwise than the trainer: by its ratio or by weights.

        With importance_sampling "auto" there are weights wherever engine and trainer may differ.
        """
        return self.old_logprobs == "sampler" or self.importance_sampling != "none"

    def in_plan_order(self, *, exact_engine: bool) -> bool:
        """Whether groups are trained in the order of the plan.

        exact_engine: whether responses come from our own engine in float32, and training computes in it, too. Then
        no member's decoding matters, unless the update reads the sampler's log-probs.
        """
        if self.learns_examples:
            return True
        if self.micro_batch_order != "auto":
            return self.micro_batch_order == "plan"
        unread = self.importance_sampling == "none" or (self.importance_sampling == "auto" and not self.max_staleness)
        return self.filter_groups or (exact_engine and self.old_logprobs == "trainer" and unread)

    def __post_init__(self) -> None:
        unfit = _not_of_examples(self) if self.learns_examples else (*_impossible(self), *_without_effect(self))
        problems = list(unfit)
        if problems:
            raise ValueError("\n".join(problems))


def _impossible(config: AlgorithmConfig) -> Iterator[str]:
    modes = config.loss.modes
    if modes is not None and config.loss_agg_mode not in modes:
        yield (
            f"loss_agg_mode: value {config.loss_agg_mode!r}; allowed with policy_loss {config.policy_loss!r}: "
            f"{', '.join(map(repr, sorted(modes)))}, because its objective is a mean over responses"
        )
    if config.kl_in == "reward" and config.kl_coef == 0:
        yield "kl_in: value 'reward'; allowed with kl_coef 0: 'loss'"
    if config.filter_groups and not config.estimator.group_baseline:
        yield (
            f"filter_groups: value true; allowed with advantage_estimator {config.advantage_estimator!r}: false, "
            "because a group of equal rewards teaches it something"
        )
    if config.filter_groups and config.micro_batch_order == "arrival":
        yield (
            "micro_batch_order: value 'arrival'; allowed with filter_groups: 'auto' or 'plan', because taking the "
            "groups that are finished first would favour short responses"
        )
    if config.filter_groups and config.max_staleness:
        yield (
            f"filter_groups: value true; allowed with max_staleness {config.max_staleness}: false, because the next "
            "iteration's prompts would be known only when this one has ended"
        )
    if config.old_logprobs == "sampler" and config.importance_sampling in ("token", "sequence-mask"):
        yield (
            f"importance_sampling: value {config.importance_sampling!r}; allowed with old_logprobs 'sampler': 'none' "
            "or 'auto', because the ratio of the loss is then to the sampler already"
        )


def _not_of_examples(config: AlgorithmConfig) -> Iterator[str]:
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name not in READ_BY[config.kind] and value != item.default:
            yield (
                f"{item.name}: value {_shown(value)}; allowed with kind {config.kind!r}: {_shown(item.default)}, "
                "because nothing reads it"
            )
    if config.learns_pairs and config.label_smoothing >= _SMOOTHING_OF_PAIRS:
        given = config.label_smoothing
        yield f"label_smoothing: value {given}; allowed with kind 'dpo': less than {_SMOOTHING_OF_PAIRS}"


def _without_effect(config: AlgorithmConfig) -> Iterator[str]:
    defaults = {item.name: item.default for item in fields(config)}
    choosers = {
        name: chooser for name, (chooser, choices) in READ_WITH.items() if getattr(config, chooser) not in choices
    }
    choosers |= dict.fromkeys(sorted(OPTIONS - config.estimator.reads), "advantage_estimator")
    choosers |= dict.fromkeys(sorted(LOSS_OPTIONS - config.loss.reads), "policy_loss")
    for name, chooser in choosers.items():
        chosen, value = getattr(config, chooser), getattr(config, name)
        if value != defaults[name]:
            yield (
                f"{name}: value {_shown(value)}; allowed with {chooser} {chosen!r}: {_shown(defaults[name])}, "
                f"because nothing reads it{'; did you mean kl_coef?' * (name == 'beta')}"
            )
    switched_off = {
        "filter_groups_budget": ("filter_groups", not config.filter_groups),
        "filter_groups_reward": ("filter_groups", not config.filter_groups),
    }
    for name, (switch, is_off) in switched_off.items():
        value = getattr(config, name)
        if is_off and value != defaults[name]:
            yield (
                f"{name}: value {_shown(value)}; allowed without {switch}: "
                f"{_shown(defaults[name])}, because nothing reads it"
            )


def _shown(value: object) -> str:
    """A value as it is written in a configuration."""
    return repr(value) if isinstance(value, str) else json.dumps(value)
