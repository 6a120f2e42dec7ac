"""The loss of pairs, with its gradient, beside a plain torch computation, finite differences and TRL's trainer."""

import copy
import json

import pytest
import torch
from torch.nn import functional

from storage.records.prompt_table import PromptRow
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.data import DataConfig
from tasks.learning.advantage import advantages_of
from tasks.learning.batching import collate
from tasks.learning.pass_loss import PassLoss
from tasks.learning.policy_losses import preference_loss
from tasks.learning.step import accumulate
from tasks.learning.token_objective import token_objective
from tasks.prompts.examples import completions_of
from tasks.prompts.loading import load_prompts
from tasks.prompts.tokenise import tokenise
from tests.chat_tokenizers import CHATML, chat_tokenizer
from tests.tasks.learning.beside_trl import ARGUMENTS, needs_trl, policy_of
from tests.tasks.learning.tiny_model import VOCABULARY
from tests.tiny_model import tiny_config, tiny_model

# The norms of the model compute in float32, and round otherwise in another batch. The loss has sums of log-probs.
TOLERANCE = 1e-5
# TRL computes log-probs in float32, too.
TRLS_TOLERANCE = 5e-5
LOSSES = [
    {},
    {"beta": 0.5},
    {"beta": 1.0, "label_smoothing": 0.1},
    {"rpo_alpha": 0.7},
    {"beta": 0.3, "label_smoothing": 0.2, "rpo_alpha": 1.5},
]


@pytest.fixture
def rows():
    """Three pairs, with prompts of 1 to 6 tokens, completions of 1 to 11, and turns in one of them."""
    generator = torch.Generator().manual_seed(5)

    def draw(length):
        return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()

    prompts = [each for each in map(draw, (3, 1, 6)) for _ in range(2)]
    return prompts, list(map(draw, (7, 2, 1, 11, 9, 4))), [(7,), (2,), (1,), (3, 5, 3), (9,), (4,)]


def batch_of(prompts, completions, origins):
    logprobs = [[0.0] * sum(stretches[::2]) for stretches in origins]
    return collate(range(len(prompts)), prompts, completions, logprobs, origins)


def ours(policy, reference, batch, algorithm):
    """Loss, gradients and metrics of a step on a batch."""
    lengths = torch.tensor(batch.trained_lengths)
    advantages, _ = advantages_of(torch.zeros(len(lengths), dtype=torch.float64), lengths, 2, algorithm)
    totals = accumulate(
        policy,
        batch,
        torch.stack(advantages),
        algorithm,
        temperature=1.0,
        max_completion_length=12,
        reference=reference,
    )
    divisor = totals.denominator(algorithm.aggregation)
    gradients = {name: each.grad / divisor for name, each in policy.parameters().items()}
    return totals.loss / divisor, gradients, totals.pair_metrics()


def plain_logprobs(module, prompts, completions, origins):
    """The sum of the log-probs of each response's own tokens, with one forward pass for each."""
    found = []
    for prompt, completion, stretches in zip(prompts, completions, origins, strict=True):
        kept = torch.tensor([number % 2 == 0 for number, length in enumerate(stretches) for _ in range(length)])
        logits = module(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        taken = logits.log_softmax(-1)[range(len(completion)), completion]
        found.append(taken[kept].sum())
    return torch.stack(found).view(-1, 2).unbind(1)


def plain_loss(module, reference, rows, algorithm):
    """TRL's formulas, written down again."""
    chosen, rejected = plain_logprobs(module, *rows)
    with torch.no_grad():
        chosen_before, rejected_before = plain_logprobs(reference, *rows)
    delta = algorithm.beta * ((chosen - chosen_before) - (rejected - rejected_before))
    e = algorithm.label_smoothing
    clean, flipped = -(1 - e) * functional.logsigmoid(delta), -e * functional.logsigmoid(-delta)
    tokens = sum(sum(stretches[::2]) for stretches in rows[2][::2])
    return ((clean - flipped) / (1 - 2 * e)).mean() + algorithm.rpo_alpha * -chosen.sum() / tokens


@pytest.fixture
def models(build):
    """A policy, and a reference that differs from it."""
    policy, reference = build(double=True), build(double=True)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in reference.parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.05)
    return policy, reference


@pytest.mark.parametrize("settings", LOSSES)
def test_loss_and_gradient_are_those_of_the_formulas(models, rows, settings):
    (policy, reference), algorithm = models, AlgorithmConfig(kind="dpo", **settings)
    loss, gradients, metrics = ours(policy, reference, batch_of(*rows), algorithm)
    expected = plain_loss(policy.module, reference.module, rows, algorithm)
    names = list(policy.parameters())
    plain = torch.autograd.grad(expected, [policy.parameters()[name] for name in names])
    assert loss == pytest.approx(expected.item(), abs=TOLERANCE)
    for name, gradient in zip(names, plain, strict=True):
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=TOLERANCE)
    chosen, rejected = plain_logprobs(policy.module, *rows)
    assert metrics["logps/chosen"] == pytest.approx(chosen.mean().item(), abs=1e-5)
    assert metrics["logps/rejected"] == pytest.approx(rejected.mean().item(), abs=1e-5)
    assert metrics["rewards/margins"] == pytest.approx(metrics["rewards/chosen"] - metrics["rewards/rejected"])


def test_an_untrained_policy_has_the_loss_of_a_coin_and_no_margin(build, rows):
    loss, _, metrics = ours(build(double=True), build(double=True), batch_of(*rows), AlgorithmConfig(kind="dpo"))
    assert loss == pytest.approx(torch.tensor(2.0).log().item())
    assert (metrics["rewards/margins"], metrics["rewards/accuracies"]) == (0, 0)


@pytest.mark.parametrize("settings", LOSSES)
def test_the_gradient_is_that_of_finite_differences(settings):
    generator = torch.Generator().manual_seed(1)
    logprobs, old = (-torch.rand(4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    logprobs.requires_grad_()
    mask = torch.arange(5) < torch.tensor([3, 5, 1, 4])[:, None]
    given = {"beta": 0.1, "label_smoothing": 0.0, "rpo_alpha": 0.0} | settings

    def loss(values):
        return preference_loss(values, old, torch.tensor([0.5, 0.0] * 2), mask, **given).loss.sum()

    (gradient,) = torch.autograd.grad(loss(logprobs), logprobs)
    assert not gradient[~mask].any()
    step = 1e-6
    for place in mask.nonzero().tolist():
        moved = [logprobs.detach().clone() for _ in range(2)]
        for sign, values in zip((1, -1), moved, strict=True):
            values[tuple(place)] += sign * step
        expected = (loss(moved[0]) - loss(moved[1])) / (2 * step)
        torch.testing.assert_close(gradient[tuple(place)], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("logits_per_chunk", [VOCABULARY, 8 * VOCABULARY, None])
def test_the_head_takes_pairs_whole_whatever_a_chunk_holds(rows, logits_per_chunk):
    generator = torch.Generator().manual_seed(4)
    batch, algorithm = batch_of(*rows), AlgorithmConfig(kind="dpo", beta=0.5, label_smoothing=0.1, rpo_alpha=0.3)
    hidden, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((len(batch.trained), 5), (VOCABULARY, 5))
    )
    targets = batch.completion_ids.flatten()[batch.trained]
    loss = PassLoss(
        algorithm=algorithm,
        mode=None,
        weights=torch.ones(6, 1),
        advantages=torch.tensor([0.1, 0.0] * 3),
        response_mask=batch.response_mask,
        sampler_logprobs=batch.sampler_logprobs,
        first_logprobs=None,
        reference_logprobs=-torch.rand(batch.response_mask.shape, generator=generator, dtype=torch.float64),
    )
    of_tokens, together = loss.of_tokens(batch)
    assert sum(together) == len(batch.trained)
    assert len(together) == 3
    found = token_objective(
        hidden, weight, None, targets, of_tokens, together=together, logits_per_chunk=logits_per_chunk
    )[0]
    logprobs = (hidden @ weight.T).log_softmax(-1)[range(len(targets)), targets]
    spread = torch.zeros(batch.response_mask.numel(), dtype=torch.float64).scatter(0, batch.trained, logprobs)
    expected = loss.weighted(spread.view(batch.response_mask.shape)).sum()
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(*(torch.autograd.grad(each, (hidden, weight)) for each in (found, expected)), strict=True):
        torch.testing.assert_close(mine, theirs)


def swapped(prompts, completions, origins):
    def each(rows):
        return [rows[number + 1 - 2 * (number % 2)] for number in range(len(rows))]

    return prompts, each(completions), each(origins)


def prompt_token_in_the_loss(prompts, completions, origins):
    moved = [(prompt[:-1], [prompt[-1], *rest]) for prompt, rest in zip(prompts, completions, strict=True)]
    kept = [len(prompt) > 1 for prompt in prompts]
    return (
        [new if is_long else old for (new, _), old, is_long in zip(moved, prompts, kept, strict=True)],
        [new if is_long else old for (_, new), old, is_long in zip(moved, completions, kept, strict=True)],
        [(1 + old[0], *old[1:]) if is_long else old for old, is_long in zip(origins, kept, strict=True)],
    )


@pytest.mark.parametrize("bug", [swapped, prompt_token_in_the_loss])
def test_a_planted_bug_is_found_by_the_comparison_with_the_formulas(models, rows, bug):
    (policy, reference), algorithm = models, AlgorithmConfig(kind="dpo", beta=0.5, rpo_alpha=0.5)
    loss, *_ = ours(policy, reference, batch_of(*bug(*rows)), algorithm)
    assert abs(loss - plain_loss(policy.module, reference.module, rows, algorithm).item()) > 1e-3


def test_a_loss_of_pairs_needs_a_reference(build, rows):
    with pytest.raises(ValueError, match=r"^kind: value 'dpo'; allowed: others without a reference policy"):
        ours(build(), None, batch_of(*rows), AlgorithmConfig(kind="dpo"))


USER = {"role": "user", "content": "1+1?"}
TEXTS = [
    {"prompt": "name the tool", "chosen": " of a call", "rejected": " no"},
    {"prompt": "the name", "chosen": " and more", "rejected": " and more and more"},
]
TALKS = [
    {
        "prompt": [USER],
        "chosen": [{"role": "assistant", "content": "it is 2"}],
        "rejected": [{"role": "assistant", "content": "3"}],
    },
    {
        "prompt": [{"role": "system", "content": "be brief"}, USER],
        "chosen": [{"role": "assistant", "content": "2"}],
        "rejected": [{"role": "assistant", "content": "that would be two"}],
    },
]


@pytest.mark.peers
@pytest.mark.parametrize("settings", LOSSES)
@pytest.mark.parametrize("examples", [TEXTS, TALKS], ids=["text", "messages"])
def test_trls_trainer_gives_the_same_loss_gradient_and_metrics(tmp_path, examples, settings):
    needs_trl()
    tokenizer, algorithm = chat_tokenizer(CHATML), AlgorithmConfig(kind="dpo", **settings)
    model = tiny_model(tiny_config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)).double()
    before, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in before.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.05)
    expected, theirs, logged = trls(tmp_path, model, before, tokenizer, examples, algorithm)
    reference = policy_of(tmp_path / "reference", before, trainable=False)
    batch = our_batch(tmp_path, tokenizer, examples)
    loss, gradients, metrics = ours(policy_of(tmp_path / "model", model), reference, batch, algorithm)
    assert loss == pytest.approx(expected, abs=TRLS_TOLERANCE)
    assert gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=TRLS_TOLERANCE)
    assert metrics == pytest.approx({name: logged[name] for name in metrics}, abs=1e-5)


def trls(folder, model, reference, tokenizer, examples, algorithm):
    """Loss, gradients and metrics of TRL's trainer for all examples as one batch."""
    from datasets import Dataset  # noqa: PLC0415 - seconds, and only here
    from trl import DPOConfig, DPOTrainer  # noqa: PLC0415

    sft = ["sft"] if algorithm.rpo_alpha else []
    arguments = DPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=len(examples),
        beta=algorithm.beta,
        label_smoothing=algorithm.label_smoothing,
        loss_type=["robust" if algorithm.label_smoothing else "sigmoid", *sft],
        loss_weights=[1.0, *([algorithm.rpo_alpha] if sft else [])],
        **ARGUMENTS,
    )
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=arguments,
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer,
    )
    [batch] = list(trainer.get_train_dataloader())
    model.zero_grad()
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    logged = {name: values[0] for kept in trainer._metrics.values() for name, values in kept.items()}
    return loss.item(), {name: each.grad.clone() for name, each in model.named_parameters()}, logged


def our_batch(folder, tokenizer, examples):
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in examples))
    data = DataConfig(source=str(file))
    prompts, completions, origins = [], [], []
    for prompt in load_prompts(data, kind="dpo"):
        ids = tokenise(prompt, tokenizer, data, 1 << 20, 1)
        row = PromptRow(prompt.id, ids, prompt.text_or_messages, prompt.columns)
        [pair] = completions_of([row], tokenizer, data, 1000, ("chosen", "rejected"))
        for completion in pair:
            stretches = [stretch.token_ids for stretch in completion]
            prompts.append(ids)
            completions.append([token for stretch in stretches for token in stretch])
            origins.append(tuple(map(len, stretches)))
    return batch_of(prompts, completions, origins)
