"""A reward as users of OpenRLHF write it, for `--remote_rm_url openrlhf_reward.py`."""

import re

import torch


def reward_func(queries, prompts, labels, **kwargs):
    rewards, lengths = [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        answer = re.sub(r"<\|.*?\|>", "", query[len(prompt) :]).strip()
        rewards.append(float(answer == label))
        lengths.append(len(answer))
    rewards = torch.tensor(rewards)
    return {
        "rewards": rewards,
        "scores": rewards.clone(),
        "extra_logs": {"answer_length": torch.tensor(lengths).float(), "batch": torch.tensor(float(len(queries)))},
    }
