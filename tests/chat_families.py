"""Chat templates in the ways of known model families, in short: what each does to contents, roles and the question."""

_QWEN_TURN = "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}"

FAMILIES = {
    # A system prompt of its own where there is none.
    "qwen2.5": (
        "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
        "{%- endif %}{%- for m in messages %}{%- set content = m.content %}"
        + _QWEN_TURN
        + "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # Earlier reasoning is dropped, and an empty thought is the answer's beginning if thinking is switched off.
    "qwen3": (
        "{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}"
        "{%- if m.role == 'assistant' %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        + _QWEN_TURN
        + "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{%- endif %}"
    ),
    # Contents are trimmed, and results of tools are JSON in JSON.
    "llama3": (
        "{{- bos_token }}{%- for m in messages %}"
        "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{{- (m.content | tojson) if m.role == 'tool' else (m.content | trim) }}{{- '<|eot_id|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    # The system prompt stands in the user's turn.
    "gemma3": (
        "{{ bos_token }}{%- if messages[0].role == 'system' %}{%- set first = messages[0].content + '\n\n' %}"
        "{%- set rest = messages[1:] %}{% else %}{%- set first = '' %}{%- set rest = messages %}{% endif %}"
        "{%- for m in rest %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
        "{{ (first if loop.first else '') + m.content | trim }}{{ '<end_of_turn>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    # An answer begins where a question ends, so there is no generation prompt. The system prompt moves to the last one.
    "mistral": (
        "{{ bos_token }}{%- for m in messages %}"
        "{%- if m.role == 'user' %}{{ '[INST] ' }}"
        "{%- if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
        "{{ m.content + ' [/INST]' }}"
        "{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + '</s>' }}{% endif %}{%- endfor %}"
    ),
    "llama2": (
        "{%- for m in messages %}{%- if m.role == 'user' %}{{ '<s>[INST] ' }}"
        "{%- if loop.index0 == 1 and messages[0].role == 'system' %}"
        "{{ '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' }}{% endif %}"
        "{{ m.content.strip() + ' [/INST]' }}"
        "{%- elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' </s>' }}{% endif %}{%- endfor %}"
    ),
    "phi3": (
        "{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
    ),
    # Switches are read and removed, blanks at line ends, too, and the text is indented.
    "smollm3": (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ m.content.replace('/no_think', '').rstrip() | indent(2) | e }}{{ '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}
MARKUP = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
]
