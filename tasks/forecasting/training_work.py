"""The operations per token that the configured algorithm asks of the trainer."""

from tasks.configuration.run_config import RunConfig


def flops_per_parameter(config: RunConfig) -> float:
    """Operations per parameter and token of an iteration's training: 2 for a forward pass, 4 for a backward one.

    Recomputed activations add 2, frozen weights (LoRA) save 2. A KL term adds a forward pass, and so do the log-probs
    before several optimizer steps. A critic of the policy's size adds as much as the policy, and a forward pass for its
    values.
    """
    algorithm = config.algorithm
    trained = 6.0 + 2.0 * config.trainer.gradient_checkpointing
    steps = algorithm.num_epochs * (trained - 2.0 * (config.lora is not None))
    passes = 2.0 * (algorithm.kl_coef > 0)
    several = algorithm.num_epochs > 1 or algorithm.num_mini_batches > 1
    passes += 2.0 * (several and algorithm.old_logprobs == "trainer")
    if algorithm.estimator.needs_critic:
        passes += algorithm.num_epochs * trained + 2.0
    return steps + passes
