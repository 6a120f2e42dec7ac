"""The losses of distillation, with gradients, beside plain torch computations, finite differences and TRL."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.teacher import TeacherConfig
from tasks.learning.batching import collate
from tasks.learning.distillation import Taught, TokenScores, head_divergence, joined, score_tokens
from tasks.learning.step import accumulate
from tasks.learning.token_objective import HeadTerm, token_objective
from tests.tasks.learning.test_token_objective import surrogate
from tests.tasks.learning.tiny_model import VOCABULARY

TRL = "1.16.0"
KINDS = {"forward": 0.0, "jsd": 0.5, "reverse": 1.0}
TOLERANCE = 1e-6
WEIGHT = 0.7


def two_distributions(tokens=7, seed=0):
    """Logits of a student, with gradient, and of a teacher, [tokens, VOCABULARY] float64."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (3 * torch.randn(tokens, VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2))
    return student.requires_grad_(), teacher


def heads(student, teacher, top_k):
    """Log-probs of both at the teacher's likeliest tokens."""
    ids = teacher.topk(top_k, dim=1).indices
    return [torch.log_softmax(each, dim=1).gather(1, ids) for each in (student, teacher)]


def bucketed(student, teacher, top_k, kl):
    """The divergences over the head and the rest, from whole distributions, by the definition of each."""
    ids = teacher.topk(top_k, dim=1).indices
    p, q = (torch.softmax(each, dim=1) for each in (student, teacher))
    p, q = (torch.cat([each.gather(1, ids), 1 - each.gather(1, ids).sum(1, keepdim=True)], dim=1) for each in (p, q))
    if kl == "jsd":
        mean = (p + q) / 2
        return ((q * (q / mean).log()).sum(1) + (p * (p / mean).log()).sum(1)) / 2
    above, below = (q, p) if kl == "forward" else (p, q)
    return (above * (above / below).log()).sum(1)


@pytest.mark.parametrize("kl", KINDS)
@pytest.mark.parametrize("top_k", [1, 5, 20])
def test_divergences_and_gradients_are_those_of_the_definitions(kl, top_k):
    student, teacher = two_distributions()
    ours, theirs = head_divergence(*heads(student, teacher, top_k), kl), bucketed(student, teacher, top_k, kl)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(each.sum(), student)[0] for each in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kl", KINDS)
def test_over_the_whole_vocabulary_the_rest_adds_nothing(kl):
    student, teacher = two_distributions()
    p, q = (torch.log_softmax(each, dim=1) for each in (student, teacher))
    mean = ((p.exp() + q.exp()) / 2).log()
    expected = {
        "forward": (q.exp() * (q - p)).sum(1),
        "reverse": (p.exp() * (p - q)).sum(1),
        "jsd": ((q.exp() * (q - mean)).sum(1) + (p.exp() * (p - mean)).sum(1)) / 2,
    }[kl]
    torch.testing.assert_close(head_divergence(*heads(student, teacher, VOCABULARY), kl), expected)


@pytest.mark.parametrize("kl", KINDS)
def test_equal_distributions_have_no_divergence_and_no_gradient(kl):
    student, _ = two_distributions()
    found = head_divergence(*heads(student, student.detach(), 4), kl)
    assert found.abs().max() < 1e-12
    assert torch.autograd.grad(found.sum(), student)[0].abs().max() < 1e-12


@pytest.mark.parametrize("kl", KINDS)
@pytest.mark.parametrize("logits_per_chunk", [1, 9 * 4, None])
@pytest.mark.parametrize("together", [False, True])
def test_the_objective_has_the_gradient_of_plain_logprobs(kl, logits_per_chunk, together):
    (hidden, weight, bias, targets), loss = surrogate()
    generator = torch.Generator().manual_seed(8)
    vocabulary, tokens = weight.shape[0], len(hidden)
    teacher = torch.log_softmax(torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64), dim=1)
    head, ids = teacher.topk(3, dim=1)
    weights = torch.rand(tokens, generator=generator, dtype=torch.float64)
    plain = torch.log_softmax((hidden @ weight.T + bias) / 0.7, dim=1)
    divergences = head_divergence(plain.gather(1, ids), head, kl)
    sampled = plain.gather(1, targets[:, None])[:, 0]
    expected = loss(sampled, slice(None)).sum() + (weights * divergences).sum()
    term = HeadTerm(
        ids, lambda logprobs, rows: head_divergence(logprobs, head[rows], kl), weights, torch.zeros_like(weights)
    )
    lengths = [tokens - 2, 2] if together else ()
    found, logprobs, _ = token_objective(
        hidden,
        weight,
        bias,
        targets,
        loss,
        together=lengths,
        temperature=0.7,
        logits_per_chunk=logits_per_chunk,
        term=term,
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(logprobs, sampled.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(term.measured, divergences.detach(), rtol=0, atol=1e-12)
    inputs = [hidden, weight, bias]
    gradients = zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True)
    for ours, theirs in gradients:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kl", KINDS)
def test_the_gradient_of_a_head_is_that_of_finite_differences(kl):
    student, teacher = two_distributions(tokens=3, seed=2)
    direction = torch.randn(student.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(moved):
        return head_divergence(*heads(moved, teacher, 4), kl).sum()

    step = 1e-5
    expected = (loss(student + step * direction) - loss(student - step * direction)) / (2 * step)
    (gradient,) = torch.autograd.grad(loss(student), student)
    torch.testing.assert_close((gradient * direction).sum(), expected.detach(), rtol=1e-7, atol=1e-9)


def test_scores_are_those_of_whole_distributions():
    (hidden, weight, bias, targets), _ = surrogate()
    plain = torch.log_softmax((hidden @ weight.T + bias) / 0.7, dim=1).detach()
    found = score_tokens(hidden, weight, bias, targets, temperature=0.7, top_k=4)
    head, ids = plain.topk(4, dim=1)
    torch.testing.assert_close(found.logprobs, plain.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found.head_logprobs, head, rtol=0, atol=1e-12)
    assert torch.equal(found.head_ids, ids)
    assert torch.equal(found.agrees, ids[:, 0] == targets)
    alone = score_tokens(hidden, weight, bias, targets, temperature=0.7, top_k=0)
    assert alone.head_ids.shape == alone.head_logprobs.shape == (len(targets), 0)
    assert torch.equal(alone.agrees, found.agrees)


@pytest.fixture
def rows():
    """Four responses, with prompts of 1 to 6 tokens, and observations in two of them."""
    generator = torch.Generator().manual_seed(5)

    def draw(length):
        return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()

    prompts, completions = [draw(length) for length in (3, 1, 6, 4)], [draw(length) for length in (7, 1, 11, 9)]
    return prompts, completions, [(7,), (1,), (3, 5, 3), (2, 1, 3, 2, 1)]


def batch_of(prompts, completions, origins):
    logprobs = [[0.0] * sum(stretches[::2]) for stretches in origins]
    return collate(range(len(prompts)), prompts, completions, logprobs, origins)


def own_logits(module, prompts, completions, origins):
    """Logits before each token that the policy sampled, by one forward pass for each response, and the tokens."""
    logits, targets = [], []
    for prompt, completion, stretches in zip(prompts, completions, origins, strict=True):
        kept = [number % 2 == 0 for number, length in enumerate(stretches) for _ in range(length)]
        found = module(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        logits.append(found[torch.tensor(kept)])
        targets += [token for token, own in zip(completion, kept, strict=True) if own]
    return torch.cat(logits), torch.tensor(targets)


def scores_of(teacher, targets, top_k):
    plain = torch.log_softmax(teacher, dim=1).detach()
    head, ids = plain.topk(max(1, top_k), dim=1)
    own = plain.gather(1, targets[:, None])[:, 0]
    return TokenScores(own, ids[:, 0] == targets, ids[:, :top_k], head[:, :top_k])


def taught_step(policy, batch, taught, advantages=None, **fields):
    """Loss, gradients and metrics of a step on a batch; without advantages, of distillation alone."""
    advantages = torch.zeros(len(batch.responses)) if advantages is None else advantages
    algorithm = AlgorithmConfig(**fields)
    totals = accumulate(policy, batch, advantages, algorithm, temperature=1.0, max_completion_length=12, taught=taught)
    divisor = totals.denominator(algorithm.loss_agg_mode)
    gradients = {name: each.grad / divisor for name, each in policy.parameters().items()}
    return totals.loss / divisor, gradients, totals.metrics(algorithm.loss_agg_mode)


def teacher_logits(module, rows, seed=9):
    """Logits of another model for the sampled tokens: the policy's own, moved at random."""
    logits, targets = own_logits(module, *rows)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed), dtype=logits.dtype)
    return (logits + 2 * noise).detach(), targets


@pytest.mark.parametrize("kl", KINDS)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_step_on_heads_has_loss_and_gradient_of_the_sampled_tokens_alone(build, rows, kl, mode):
    policy = build(double=True)
    teacher, targets = teacher_logits(policy.module, rows)
    taught = Taught(TeacherConfig(path="t", kl=kl, top_k=5, weight=WEIGHT), scores_of(teacher, targets, 5))
    batch = batch_of(*rows)
    loss, gradients, metrics = taught_step(policy, batch, taught, loss_agg_mode=mode)
    student, _ = own_logits(policy.module, *rows)
    each = head_divergence(*heads(student, teacher, 5), kl)
    lengths = list(batch.trained_lengths)
    if mode == "token-mean":
        expected = WEIGHT * each.mean()
    else:
        expected = WEIGHT * sum(part.mean() for part in each.split(lengths)) / len(lengths)
    names = list(policy.parameters())
    plain = torch.autograd.grad(expected, [policy.parameters()[name] for name in names])
    assert loss == pytest.approx(expected.item(), abs=TOLERANCE)
    for name, gradient in zip(names, plain, strict=True):
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=TOLERANCE)
    assert metrics["teacher/divergence"] == pytest.approx(each.mean().item(), abs=TOLERANCE)


def reverse_gradient(policy, rows, teacher, targets, advantages, weight=WEIGHT):
    """The policy gradient of rewards and the reverse KL, whose advantages have no gradient, by plain torch."""
    student, _ = own_logits(policy.module, *rows)
    own = torch.log_softmax(student, dim=1).gather(1, targets[:, None])[:, 0]
    gap = own.detach() - torch.log_softmax(teacher, dim=1).gather(1, targets[:, None])[:, 0]
    expected = -((advantages - weight * gap) * own).mean()
    names = list(policy.parameters())
    return dict(zip(names, torch.autograd.grad(expected, [policy.parameters()[n] for n in names]), strict=True)), gap


@pytest.mark.parametrize("policy_loss", ["clip", "reinforce", "cispo", "tests.own_losses:clipped"])
@pytest.mark.parametrize("with_reward", [False, True])
def test_a_step_on_sampled_tokens_has_the_policy_gradient_of_the_reverse_kl(build, rows, policy_loss, with_reward):
    policy = build(double=True)
    teacher, targets = teacher_logits(policy.module, rows)
    taught = Taught(TeacherConfig(path="t", weight=WEIGHT), scores_of(teacher, targets, 0))
    batch = batch_of(*rows)
    advantages = torch.tensor([0.5, -1.0, 0.25, 2.0]) * with_reward
    _, gradients, metrics = taught_step(policy, batch, taught, advantages, policy_loss=policy_loss)
    by_token = advantages.double().repeat_interleave(torch.tensor(batch.trained_lengths))
    expected, gap = reverse_gradient(policy, rows, teacher, targets, by_token)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=TOLERANCE)
    assert metrics["teacher/kl"] == pytest.approx(gap.mean().item(), abs=TOLERANCE)
    agreement = (teacher.argmax(1) == targets).double().mean().item()
    assert metrics["teacher/agreement"] == pytest.approx(agreement)
    assert "teacher/divergence" not in metrics


def shifted_by_one(rows, scores):
    return rows, TokenScores(*(each.roll(1, dims=0) for each in vars(scores).values()))


def prompt_token_in_the_loss(rows, scores):
    prompts, completions, origins = rows
    moved = [prompts[0][:-1], *prompts[1:]]
    longer = [[prompts[0][-1], *completions[0]], *completions[1:]]
    first = TokenScores(*(each[:1] for each in vars(scores).values()))
    return (moved, longer, [(1 + origins[0][0],), *origins[1:]]), joined([first, scores])


def observation_in_the_loss(rows, scores):
    prompts, completions, origins = rows
    kept = sum(sum(each[::2]) for each in origins[:2]) + origins[2][0]
    before, after = (
        TokenScores(*(e[part] for e in vars(scores).values())) for part in (slice(kept), slice(kept, None))
    )
    seen = TokenScores(*(each[: origins[2][1]] for each in vars(scores).values()))
    return (prompts, completions, [*origins[:2], (sum(origins[2]),), origins[3]]), joined([before, seen, after])


@pytest.mark.parametrize("bug", [shifted_by_one, prompt_token_in_the_loss, observation_in_the_loss])
@pytest.mark.parametrize("top_k", [None, 5])
def test_a_planted_bug_is_found_by_the_comparison_with_torch(build, rows, bug, top_k):
    policy = build(double=True)
    teacher, targets = teacher_logits(policy.module, rows)
    scores = scores_of(teacher, targets, top_k or 0)
    taught = Taught(TeacherConfig(path="t", weight=WEIGHT, top_k=top_k), scores)
    right = taught_step(policy, batch_of(*rows), taught)[1]
    policy.drop_gradient()
    spoilt_rows, spoilt = bug(rows, scores)
    wrong = taught_step(policy, batch_of(*spoilt_rows), replace(taught, scores=spoilt))[1]
    assert max(float((wrong[name] - right[name]).abs().max()) for name in right) > 1e-3


@pytest.fixture
def trl(monkeypatch):
    """TRL in the release whose functions are called, part of which is experimental."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        found = version("trl")
    except PackageNotFoundError:
        found = "none"
    if found != TRL:
        pytest.skip(f"needs trl {TRL} (found: {found})")


@pytest.mark.peers
@pytest.mark.parametrize("kl", KINDS)
@pytest.mark.parametrize("top_k", [1, 5, VOCABULARY - 1])
def test_trls_loss_over_a_head_and_the_rest_has_the_same_value_and_gradient(trl, kl, top_k):
    from trl.experimental.server_distillation import server_distillation_trainer as theirs_of  # noqa: PLC0415

    student, teacher = two_distributions()
    ours, theirs = heads(student, teacher, top_k)
    mask = torch.ones_like(theirs, dtype=torch.bool)
    (rest, further), (their_rest, _) = (theirs_of._add_tail_bucket(each, mask) for each in (ours, theirs))
    expected = theirs_of._jsd_divergence(rest, their_rest, KINDS[kl], further).sum(-1)
    found = head_divergence(ours, theirs, kl)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(each.sum(), student, retain_graph=True)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.peers
@pytest.mark.parametrize("kl", KINDS)
def test_gkds_loss_over_the_vocabulary_has_the_same_value_and_gradient_with_its_mask(trl, build, rows, kl):
    from trl.experimental.gkd import GKDTrainer  # noqa: PLC0415

    policy = build(double=True)
    teacher, targets = teacher_logits(policy.module, rows)
    taught = Taught(TeacherConfig(path="t", kl=kl, top_k=VOCABULARY), scores_of(teacher, targets, VOCABULARY))
    loss, gradients, _ = taught_step(policy, batch_of(*rows), taught)
    # All positions of all responses, with those in the labels that a completion's own tokens have.
    student, labels, theirs = [], [], []
    scored = iter(teacher)
    for prompt, completion, stretches in zip(*rows, strict=True):
        kept = [number % 2 == 0 for number, length in enumerate(stretches) for _ in range(length)]
        logits = policy.module(torch.tensor([[*prompt, *completion]])).logits[0, :-1]
        own = [*[False] * (len(prompt) - 1), *kept]
        student.append(logits)
        labels += [token if is_own else -100 for token, is_own in zip([*prompt, *completion][1:], own, strict=True)]
        theirs += [next(scored) if is_own else torch.zeros(VOCABULARY, dtype=torch.float64) for is_own in own]
    expected = GKDTrainer.generalized_jsd_loss(
        torch.cat(student)[None], torch.stack(theirs)[None], labels=torch.tensor(labels)[None], beta=KINDS[kl]
    )
    assert loss == pytest.approx(expected.item(), abs=TOLERANCE)
    names = list(policy.parameters())
    plain = torch.autograd.grad(expected, [policy.parameters()[name] for name in names])
    for name, gradient in zip(names, plain, strict=True):
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=TOLERANCE)
