"""The sizes of benchmarks.gpu: the shape of its random model and the numbers of each part. It does not import torch.

The full sizes are for one GPU and some minutes. The small ones run the same code on a CPU and say nothing about speed.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A Qwen2 with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocab_size: int

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def products(self) -> list[tuple[int, int]]:
        """The (outputs, inputs) of the matrix products of one layer, as engines fuse them."""
        attention = self.heads * self.head_width
        return [
            (attention + 2 * self.key_value_heads * self.head_width, self.hidden),
            (self.hidden, attention),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]

    @property
    def weights(self) -> int:
        """The number of parameters in matrices, the tied embedding counted once."""
        return self.layers * sum(outputs * inputs for outputs, inputs in self.products) + self.vocab_size * self.hidden


SHAPES = {
    "0.5b": ModelShape(
        hidden=896, layers=24, heads=14, key_value_heads=2, intermediate=4864, vocab_size=151_936
    ),  # as Qwen2.5-0.5B
    "1.5b": ModelShape(
        hidden=1536, layers=28, heads=12, key_value_heads=2, intermediate=8960, vocab_size=151_936
    ),  # as Qwen2.5-1.5B
    "1.7b": ModelShape(
        hidden=2048, layers=28, heads=16, key_value_heads=8, intermediate=6144, vocab_size=151_936
    ),  # as Qwen3-1.7B
    "7b": ModelShape(
        hidden=3584, layers=28, heads=28, key_value_heads=4, intermediate=18_944, vocab_size=152_064
    ),  # as Qwen2.5-7B, but with tied embeddings
}
SMALL_SHAPE = ModelShape(hidden=64, layers=2, heads=2, key_value_heads=1, intermediate=128, vocab_size=2000)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The amounts of work in a run.

    Attributes:
        device: "cuda" or "cpu".
        small: Whether these are the small numbers.
        shape: The shape of the model.
        batches: The numbers of rows of logits in the noise part.
        steps: Sampling steps per timing.
        rounds: Timings of each way to sample.
        caches: The folder of compiled code, which all parts of a call share.
        responses: The most responses that an engine decodes together; a multiple of 8.
        tokens: Tokens of each of these responses.
        engine_models: Keys of SHAPES that the engines decode; all engines take part with the first one.
        engine_batches: How many responses they decode together.
        engine_rounds: Decodings by every engine after a first one, which does not count.
        journal_tokens: Tokens per response, few and many, for comparing a journalling session with the bare loop.
        flush_interval_s: The flush interval of that journal, and in the iterations.
        prompts: Prompts of the optimizer step.
        generations: Sequences per prompt.
        prompt_tokens: Prompt tokens of each sequence.
        completion_tokens: The most completion tokens of a sequence.
        padded_shares: The shares of padding that the sequences would have in one batch, by their lengths.
        micro_batch_tokens_max: As in TrainerConfig.
        optimizer_steps: Timed optimizer steps, after one that is not timed.
        head_widths: Widths of attention heads in the identity part.
        identity_batches: How many responses it decodes together, the smallest first.
        identity_tokens: Tokens of each of its responses.
        head_hidden: Hidden sizes of the head part.
        head_tokens: Its tokens.
        head_chunks: The logits of its chunks.
        head_rounds: Timings of each chunk.
        frontend_tokens: Tokens of each response of the front end's part, which decodes `responses` together.
        frontend_rounds: Decodings with each interval, after one that does not count.
        iteration_prompts: Prompts of the whole iteration, with 8 responses each.
        iteration_tokens: The most tokens of each of its responses.
        speculation_batches: How many responses the part about drafts decodes together in its timed steps.
        speculation_steps: Its timed steps for each number of tokens fed.
        speculation_responses: Responses of its speeds; a multiple of 8.
        speculation_tokens: Tokens of each of these responses.
    """

    device: str
    small: bool
    shape: ModelShape
    batches: tuple[int, ...] = (32, 256)
    steps: int = 10
    rounds: int = 21
    caches: str = ""
    responses: int = 256
    tokens: int = 256
    engine_models: tuple[str, ...] = ("0.5b", "7b")
    engine_batches: tuple[int, ...] = (64, 256)
    engine_rounds: int = 3
    journal_tokens: tuple[int, int] = (256, 1280)
    flush_interval_s: float = 2.0
    prompts: int = 8
    generations: int = 8
    prompt_tokens: int = 256
    completion_tokens: int = 768
    padded_shares: tuple[float, ...] = (0.4, 0.0)
    micro_batch_tokens_max: int = 16_384
    optimizer_steps: int = 3
    head_widths: tuple[int, ...] = (128, 64)
    identity_batches: tuple[int, ...] = (1, 64, 256)
    identity_tokens: int = 192
    head_hidden: tuple[int, ...] = (2048, 3584, 5120)
    head_tokens: int = 8192
    head_chunks: tuple[int, ...] = (1 << 24, 1 << 25, 1 << 26, 1 << 27, 1 << 28)
    head_rounds: int = 5
    frontend_tokens: int = 256
    frontend_rounds: int = 7
    iteration_prompts: int = 128
    iteration_tokens: int = 512
    speculation_batches: tuple[int, ...] = (1, 4, 16, 64, 256)
    speculation_steps: int = 8
    speculation_responses: int = 16
    speculation_tokens: int = 256

    def identity_shape(self, head_width: int) -> ModelShape:
        """The model of the identity part: small, with real matrix products and heads of this width."""
        hidden, layers, vocab_size = (128, 2, 2000) if self.small else (1024, 8, 32_000)
        heads = hidden // head_width
        return ModelShape(
            hidden=hidden,
            layers=layers,
            heads=heads,
            key_value_heads=max(1, heads // 2),
            intermediate=3 * hidden,
            vocab_size=vocab_size,
        )


def size_for(device: str, model: str, *, small: bool, caches: str = "") -> Size:
    """The sizes of a run; `model` is a key of SHAPES and has no effect on a small run."""
    if not small:
        return Size(device=device, small=False, shape=SHAPES[model], caches=caches)
    return Size(
        device=device,
        small=True,
        caches=caches,
        shape=SMALL_SHAPE,
        batches=(4, 8),
        steps=3,
        rounds=5,
        responses=8,
        tokens=16,
        engine_models=("small",),
        engine_batches=(4, 8),
        engine_rounds=2,
        journal_tokens=(16, 64),
        flush_interval_s=0.2,
        prompts=2,
        generations=4,
        prompt_tokens=8,
        completion_tokens=24,
        micro_batch_tokens_max=128,
        optimizer_steps=2,
        head_widths=(64, 32),
        identity_batches=(1, 4),
        identity_tokens=12,
        head_hidden=(64,),
        head_tokens=64,
        head_chunks=(1 << 13, 1 << 15),
        head_rounds=2,
        frontend_tokens=17,
        frontend_rounds=3,
        iteration_prompts=2,
        iteration_tokens=256,  # so that a member can be killed meanwhile
        speculation_batches=(1, 4),
        speculation_steps=2,
        speculation_responses=8,
        speculation_tokens=24,
    )
