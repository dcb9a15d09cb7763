"""A reward as users of verl write it, for `custom_reward_function.path=verl_reward.py`."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source.startswith("unknown"):
        raise NotImplementedError(f"{data_source=}")
    return {"score": float(solution_str.strip() == ground_truth), "acc": solution_str.strip() == ground_truth}
