"""What a tokenizer makes of some texts; as a program, in a process that needs no model: `DIRECTORY` -> JSON."""

import json
import sys
from pathlib import Path
from typing import Any

TEXTS = ["12+34=?", "", " two  spaces\n", "<bos>1<eos> <|im_end|>", "größer 中 \U0001f642", "What is 6 x 7?"]
CHAT = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "What is 6 x 7?"}]


def made_of(directory: Path) -> list[Any]:
    """[class, special tokens, ids of each text, ids of the chat, the text of each of these], as JSON values."""
    from tasks.preparing.tools import open_tokenizer  # noqa: PLC0415 - not before the process has said what it needs
    from tasks.prompts.decode import open_decoder  # noqa: PLC0415

    tokenizer: Any = open_tokenizer(directory)
    ids = [list(tokenizer(text)["input_ids"]) for text in TEXTS]
    chat = list(tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False))
    decode = open_decoder(directory)
    return [type(tokenizer).__name__, dict(tokenizer.special_tokens_map), ids, chat, [decode(r) for r in [*ids, chat]]]


def main() -> None:
    from tasks.prompts.auto_tokenizer import forgo_models  # noqa: PLC0415

    forgo_models()
    sys.stdout.write(json.dumps([made_of(Path(sys.argv[1])), "torch" in sys.modules]))


if __name__ == "__main__":
    main()
