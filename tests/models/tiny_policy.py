"""A tiny random Qwen2 directory with a character tokenizer, tied or untied, for tests of the real stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>")


def make_policy(path: Path, *, tied: bool, seed: int = 0, dtype: str = "float32", layers: int = 2) -> Any:
    """Writes model and tokenizer to `path`; returns the model."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    vocabulary = [*SPECIAL, "\n", *(chr(code) for code in range(32, 127))]
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype=dtype,
    )
    model = Qwen2ForCausalLM(config)
    perturb(model, 0.08, seed)
    model = model.to(getattr(torch, dtype)).eval()
    model.save_pretrained(path)
    make_tokenizer(vocabulary).save_pretrained(path)
    return model


def make_tokenizer(vocabulary: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
    )


def perturb(model: Any, scale: float, seed: int) -> None:
    """Add normal noise to every parameter, norms included, as training would change them all."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.add_(noise.to(parameter.dtype))


def score(model: Any, sequences: Any) -> list[list[float]]:
    """log p(token t | tokens before t) by transformers in float32 log-softmax."""
    import torch

    rows = []
    with torch.no_grad():
        for sequence in sequences:
            ids = torch.tensor([list(sequence)])
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
            rows.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return rows


class ModelSource:
    """A whole model in this process as a `flowrl.weights.publish.Source`."""

    rank = 0

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vocab_size = int(model.config.vocab_size)

    def buckets(self, max_bytes: int) -> Any:
        for name, parameter in self.model.named_parameters():
            yield (name,), (parameter.detach(),)

    def score(self, sequences: Any) -> list[list[float]]:
        return score(self.model, sequences)
