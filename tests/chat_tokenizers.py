"""Byte-level tokenizers with chat templates of several families' manners, made in memory: nothing is downloaded."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}{{ '# Tools' }}"
    "{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- elif m.tool_calls %}{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{%- for call in m.tool_calls %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ (call.function.arguments | tojson) + '}\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif not (tools and loop.first and m.role == 'system') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A call is answered within the model's turn, and the token that opens the answer is a stop token.
GEMMA = (
    "{%- if tools %}{{ '<|turn>system' }}"
    "{%- for tool in tools %}{{ '\ndeclaration:' + tool.function.name }}{% endfor %}{{ '<turn|>\n' }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}{{ '<|tool_response>response:' + m.name + '{value:<|\"|>' + m.content }}"
    "{{ '<|\"|>}<tool_response|>' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|turn>model\n' }}{% endif %}"
    "{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ '<|tool_call>call:' + call.function.name + '{' }}"
    "{%- for key, value in call.function.arguments.items() %}{{ key + ':<|\"|>' + value + '<|\"|>' }}{% endfor %}"
    "{{ '}<tool_call|>' }}{% endfor %}"
    "{%- if not m.tool_calls %}{{ '<turn|>\n' }}{% endif %}"
    "{%- else %}{{ '<|turn>' + m.role + '\n' + m.content + '<turn|>\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>model\n' }}{% endif %}"
)
# It says of an assistant's turn whether it is the last one, so what stands before changes with what follows.
FORGETFUL = QWEN.replace("{{ '<|im_start|>assistant' }}", "{{ '<|im_start|>assistant' + loop.last | string }}")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>", '<|"|>']


def chat_tokenizer(template: str | None, *, eos_token: str = "<|im_end|>", response_template: Any = None) -> Any:
    """A tokenizer with the markup of all families, and one chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    core.train_from_iterator(["the name and the arguments of a call, and the response of the tool"], trainer)
    core.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKUP])
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos_token, pad_token="<|endoftext|>", additional_special_tokens=SPECIAL
    )
    tokenizer.chat_template = template
    tokenizer.response_template = response_template
    return tokenizer


def written(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text as the policy would write it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
