"""Rewards as users of TRL write them, for `reward_funcs=[correct, short]`."""


def correct(prompts, completions, answer, **kwargs):
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [1.0 if text.strip() == truth else 0.0 for text, truth in zip(texts, answer, strict=True)]


def short(completions, **kwargs):
    return [None if not one else 1.0 / (1 + len(one)) for one in completions]
