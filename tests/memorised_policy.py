"""Policies that know conversations by heart, so that tests know what they will say."""

import math
from pathlib import Path

import torch

from examples.tools_warm_start import chat_tokenizer
from tests.chat_tokenizers import written
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model

STEPS_MAX = 400
LOSS_ABOVE_MAX = 1e-3


def memorised(folder: Path, *texts: str) -> Path:
    """A model directory whose policy continues the prompt `fh` by one of these texts, each as often as the others.

    They differ in the first token. The tokenizer is that of examples.tools_warm_start.
    """
    tokenizer = chat_tokenizer()
    model = tiny_model(tiny_config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "fh"}], add_generation_prompt=True, return_dict=False
    )
    rows = [[*prompt, *written(tokenizer, text)] for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.eos_token_id] * (longest - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
    # What is left because the first token of the text is a choice; the first of the prompt is not learned.
    choice = len(rows) * math.log(len(rows)) / sum(len(row) - 1 for row in rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS_MAX):
        loss = model(input_ids=ids, labels=labels).loss
        if loss < choice + LOSS_ABOVE_MAX:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < choice + LOSS_ABOVE_MAX
    save_tiny_model(folder, model.eval())
    tokenizer.save_pretrained(folder)
    return folder
