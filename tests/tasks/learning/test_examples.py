"""The loss of examples, with its gradient, beside a plain torch computation, finite differences and TRL's trainer."""

import json

import pytest
import torch
from torch.nn import functional

from storage.records.prompt_table import PromptRow
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.data import DataConfig
from tasks.learning.advantage import advantages_of
from tasks.learning.batching import collate
from tasks.learning.policy_losses import likelihood_loss
from tasks.learning.step import accumulate
from tasks.learning.token_objective import token_objective
from tasks.prompts.examples import completions_of
from tasks.prompts.loading import load_prompts
from tasks.prompts.tokenise import tokenise
from tests.chat_tokenizers import CHATML, chat_tokenizer
from tests.tasks.learning.beside_trl import ARGUMENTS, needs_trl, policy_of
from tests.tasks.learning.tiny_model import VOCABULARY
from tests.tiny_model import tiny_config, tiny_model

# The norms of the model compute in float32, and round otherwise in another batch.
TOLERANCE = 1e-6
GENERATION = CHATML.replace(
    "{{ m.content }}<|im_end|>\n",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}",
)


@pytest.fixture
def rows():
    """Five examples, with prompts of 1 to 6 tokens, completions of 1 to 11, and turns in two of them."""
    generator = torch.Generator().manual_seed(5)

    def draw(length):
        return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()

    prompts, completions = [draw(length) for length in (3, 1, 6, 2, 4)], [draw(length) for length in (7, 1, 11, 4, 9)]
    origins = [(7,), (1,), (3, 5, 3), (4,), (2, 1, 3, 2, 1)]
    return prompts, completions, origins


def batch_of(prompts, completions, origins):
    logprobs = [[0.0] * sum(stretches[::2]) for stretches in origins]
    return collate(range(len(prompts)), prompts, completions, logprobs, origins)


def ours(policy, batch, algorithm):
    """Loss and gradients of a step on a batch."""
    lengths = torch.tensor(batch.trained_lengths)
    advantages, _ = advantages_of(torch.zeros(len(lengths), dtype=torch.float64), lengths, 1, algorithm)
    totals = accumulate(policy, batch, torch.stack(advantages), algorithm, temperature=1.0, max_completion_length=12)
    divisor = totals.denominator(algorithm.loss_agg_mode)
    return totals.loss / divisor, {name: each.grad / divisor for name, each in policy.parameters().items()}


def plain_loss(module, prompts, completions, origins, algorithm):
    """The loss by torch's own cross entropy, with one forward pass for each example, and labels of -100."""
    losses = []
    for prompt, completion, stretches in zip(prompts, completions, origins, strict=True):
        kept = [number % 2 == 0 for number, length in enumerate(stretches) for _ in range(length)]
        labels = [-100] * len(prompt) + [token if own else -100 for token, own in zip(completion, kept, strict=True)]
        logits = module(torch.tensor([[*prompt, *completion]])).logits[0, :-1]
        given = {"ignore_index": -100, "label_smoothing": algorithm.label_smoothing, "reduction": "sum"}
        losses.append((functional.cross_entropy(logits, torch.tensor(labels[1:]), **given), sum(kept)))
    if algorithm.loss_agg_mode == "token-mean":
        return sum(loss for loss, _ in losses) / sum(count for _, count in losses)
    return sum(loss / count for loss, count in losses) / len(losses)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_are_those_of_torchs_cross_entropy_on_the_learned_tokens(build, rows, mode, smoothing):
    algorithm = AlgorithmConfig(kind="sft", loss_agg_mode=mode, label_smoothing=smoothing)
    policy = build(double=True)
    loss, gradients = ours(policy, batch_of(*rows), algorithm)
    expected = plain_loss(policy.module, *rows, algorithm)
    names = list(policy.parameters())
    plain = torch.autograd.grad(expected, [policy.parameters()[name] for name in names])
    assert loss == pytest.approx(expected.item(), abs=TOLERANCE)
    for name, gradient in zip(names, plain, strict=True):
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("logits_per_chunk", [VOCABULARY, None])
def test_the_gradient_of_the_head_is_that_of_finite_differences(smoothing, logits_per_chunk):
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 5), (VOCABULARY, 5), (VOCABULARY,)]
    given = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    targets = torch.tensor([4, 0, VOCABULARY - 1])

    def loss(hidden, weight, bias):
        return token_objective(
            hidden,
            weight,
            bias,
            targets,
            lambda logprobs, _: likelihood_loss(logprobs, logprobs.detach()).loss,
            label_smoothing=smoothing,
            logits_per_chunk=logits_per_chunk,
        )[0]

    gradients, step = torch.autograd.grad(loss(*given), given), 1e-5
    for place, gradient in enumerate(gradients):
        direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        moved = [
            [each + sign * step * direction if number == place else each for number, each in enumerate(given)]
            for sign in (1, -1)
        ]
        expected = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        torch.testing.assert_close((gradient * direction).sum(), expected.detach(), rtol=1e-7, atol=1e-8)


def prompt_token_in_the_loss(prompts, completions, origins):
    moved = [
        (prompt[:-1], [prompt[-1], *rest]) if len(prompt) > 1 else (prompt, rest)
        for prompt, rest in _of(prompts, completions)
    ]
    longer = [(1 + each[0], *each[1:]) if len(prompt) > 1 else each for prompt, each in _of(prompts, origins)]
    return [prompt for prompt, _ in moved], [rest for _, rest in moved], longer


def shifted_labels(prompts, completions, origins):
    return prompts, [[*each[1:], each[0]] for each in completions], origins


def observation_in_the_loss(prompts, completions, origins):
    return prompts, completions, [(sum(each),) for each in origins]


def _of(left, right):
    return list(zip(left, right, strict=True))


@pytest.mark.parametrize("bug", [prompt_token_in_the_loss, shifted_labels, observation_in_the_loss])
def test_a_planted_bug_is_found_by_the_comparison_with_torch(build, rows, bug):
    algorithm = AlgorithmConfig(kind="sft")
    policy = build(double=True)
    loss, _ = ours(policy, batch_of(*bug(*rows)), algorithm)
    assert abs(loss - plain_loss(policy.module, *rows, algorithm).item()) > 1e-3


def test_any_division_into_passes_gives_the_same_mean_over_tokens(build, rows):
    algorithm, batch = AlgorithmConfig(kind="sft"), batch_of(*rows)
    alone = [ours(build(double=True), batch_of(*([each[k]] for each in rows)), algorithm)[0] for k in range(5)]
    summed = sum(loss * length for loss, length in _of(alone, batch.trained_lengths))
    whole = ours(build(double=True), batch, algorithm)[0]
    assert whole == pytest.approx(summed / sum(batch.trained_lengths), abs=TOLERANCE)


USER = {"role": "user", "content": "1+1?"}
TEXTS = [{"prompt": "name the tool", "completion": " of a call"}, {"prompt": "the name", "completion": " and more"}]
PAIRS = [
    {"prompt": [USER], "completion": [{"role": "assistant", "content": "it is 2"}]},
    {
        "prompt": [{"role": "system", "content": "be brief"}, USER],
        "completion": [{"role": "assistant", "content": "2"}],
    },
]
TALKS = [
    {"messages": [*PAIRS[0]["prompt"], *PAIRS[0]["completion"], USER, {"role": "assistant", "content": "still 2"}]}
]


@pytest.mark.peers
# TRL means to leave label smoothing out one day.
@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("examples", [TEXTS, PAIRS, TALKS], ids=["text", "pairs", "conversation"])
def test_trls_trainer_gives_the_same_loss_and_gradient(tmp_path, examples, smoothing):
    needs_trl()
    tokenizer, talks = chat_tokenizer(GENERATION), examples is TALKS
    model = tiny_model(tiny_config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)).double()
    expected, theirs = trls(tmp_path, model, tokenizer, examples, smoothing, assistant_only=talks)
    policy = policy_of(tmp_path / "model", model)
    columns = {"prompt_column": "messages", "completion_column": None} if talks else {}
    loss, gradients = ours(
        policy,
        our_batch(tmp_path, tokenizer, examples, columns),
        AlgorithmConfig(kind="sft", label_smoothing=smoothing),
    )
    assert loss == pytest.approx(expected, abs=TOLERANCE)
    assert gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=TOLERANCE)


def trls(folder, model, tokenizer, examples, smoothing, *, assistant_only):
    """Loss and gradients of TRL's trainer for all examples as one batch."""
    from datasets import Dataset  # noqa: PLC0415 - seconds, and only here
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415

    arguments = SFTConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=len(examples),
        label_smoothing_factor=smoothing,
        assistant_only_loss=assistant_only,
        **ARGUMENTS,
    )
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_list(examples), processing_class=tokenizer
    )
    [batch] = list(trainer.get_train_dataloader())
    model.zero_grad()
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    return loss.item(), {name: each.grad.clone() for name, each in model.named_parameters()}


def our_batch(folder, tokenizer, examples, columns):
    file = folder / "examples.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in examples))
    data = DataConfig(source=str(file), **columns)
    prompts, completions, origins = [], [], []
    for prompt in load_prompts(data, kind="sft"):
        ids = tokenise(prompt, tokenizer, data, 1 << 20, 1)
        row = PromptRow(prompt.id, ids, prompt.text_or_messages, prompt.columns)
        [[completion]] = completions_of([row], tokenizer, data, 1000)
        stretches = [stretch.token_ids for stretch in completion]
        prompts.append(ids)
        completions.append([token for stretch in stretches for token in stretch])
        origins.append(tuple(map(len, stretches)))
    return batch_of(prompts, completions, origins)
