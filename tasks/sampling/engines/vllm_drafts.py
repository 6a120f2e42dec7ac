"""Drafts in vLLM: the settings of vLLM's speculators, of which vllm_siblings.py may replace the n-gram one by ours.

VLLM's model runner V2 gives logits of all fed positions to the sampler, with the position of each. Our requests have
temperature 0 and one finite logit in each row, at the keyed token. So vLLM's rule of acceptance, "the draft is the
largest logit", keeps exactly the tokens that decoding without drafts would draw.
"""

from typing import Any

from storage.records.draft_totals import DraftTotals
from tasks.configuration.rollout import DRAFTS_MAX, SpeculationConfig
from tasks.sampling.engines.drafter import WIDTHS
from tasks.sampling.engines.engine import EngineError
from tasks.sampling.engines.vllm_names import installed_version

# So many tokens take about the time of reading the weights: computed for a 7B in bfloat16 on an H100.
FED_TOKENS_MAX = 160
# Suffixes of a response by which vLLM finds an earlier place in the response, in tokens.
SHORTEST, LONGEST = 2, 6


def speculative_config(speculation: SpeculationConfig) -> dict[str, Any] | None:
    """VLLM's settings of speculation; None without drafts."""
    if speculation.drafts == 0:
        return None
    # "ngram_gpu", unlike "ngram", leaves vLLM's asynchronous scheduling on.
    given: dict[str, Any] = {"method": "ngram_gpu", "prompt_lookup_min": SHORTEST, "prompt_lookup_max": LONGEST}
    if speculation.draft_model is not None:
        # The drafts are the model's most likely tokens. The model begins with random weights, as the policy does.
        given = {"method": "draft_model", "model": speculation.draft_model, "draft_sample_method": "greedy"}
    given["num_speculative_tokens"] = DRAFTS_MAX if speculation.drafts == "auto" else speculation.drafts
    if speculation.drafts == "auto":
        given["num_speculative_tokens_per_batch_size"] = drafts_by_responses()
    # Other rules than the standard one accept drafts that our sampler did not draw.
    return {**given, "rejection_sample_method": "standard"}


def drafts_by_responses() -> list[tuple[int, int, int]]:
    """The drafts of a response by the number of responses in a step: (first, last, drafts), the ends included.

    A step feeds at most FED_TOKENS_MAX tokens; the last entry holds for all larger numbers.
    """
    found, first = [], 1
    for width in sorted(WIDTHS, reverse=True):
        last = FED_TOKENS_MAX // width if width > 1 else first
        found.append((first, last, width - 1))
        first = last + 1
    return found


def ended_totals(metrics: Any, tokens: int) -> DraftTotals:
    """What drafts were worth to a response that has ended.

    Of its steps vLLM tells those with drafts, and one computed the prompt. Further steps without drafts follow from the
    tokens; a few may be missing, because vLLM counts right drafts behind the end, too. Seconds are None: vLLM takes no
    plain step of few responses, with which a step with drafts could be compared.

    Args:
        metrics: vLLM's RequestSpecDecodeMetrics of the response.
        tokens: the number of tokens that vLLM generated for it.
    """
    right = sum(number * steps for number, steps in enumerate(metrics.histogram))
    steps = max(sum(metrics.histogram) + 1, tokens - right)
    return DraftTotals(steps=steps, tokens=tokens, drafted=metrics.num_draft_tokens, accepted=tokens - steps)


def check_runner(speculation: SpeculationConfig, *, v2: bool) -> None:
    """Raise EngineError if there are drafts and vLLM takes another model runner than V2."""
    if speculation.drafts != 0 and not v2:
        raise EngineError(
            f"rollout.speculation.drafts: value {speculation.drafts}; allowed: 0, because vLLM {installed_version()} "
            "takes its model runner V1 for this model and machine, which verifies no drafts with keyed noise"
        )
