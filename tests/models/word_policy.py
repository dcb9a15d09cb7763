"""A random causal language model of a dozen words, with a real tokenizer, as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import torch

WORDS = 12
EOS = WORDS


def make_policy(path: Path, *, pad: str | None) -> Path:
    """Written to `path`; its pad token is `pad`: "<pad>", "<eos>" or none."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {**{f"w{n}": n for n in range(WORDS)}, "<eos>": EOS}
    if pad == "<pad>":
        vocabulary["<pad>"] = EOS + 1
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token=pad)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        attention_dropout=0.1,
        eos_token_id=EOS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
