"""The generalized Jensen-Shannon divergence of a student's next-token distribution p and a teacher's q.

GKD (arXiv 2306.13649), with TRL's GKDTrainer's meaning of β:

    D_β = β · KL(q‖m) + (1 − β) · KL(p‖m),  m = β·q + (1 − β)·p      for 0 < β < 1
    D_0 = KL(q‖p), the forward KL: cross-entropy with the teacher's distribution, up to a constant
    D_1 = KL(p‖q), the reverse KL

The gradient by the student's logits is p·(g − Σ p·g), where g is the derivative by p: (1 − β)·log(p/m), since the terms
of m cancel; log(p/q) for β = 1; and for β = 0 it is p − q.

Axes: C places, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def divergence(log_p_CV: Tensor, log_q_CV: Tensor, beta: float) -> Tensor:
    """D_β at every place, [C]."""
    if beta == 0.0:
        return _kl(log_q_CV, log_p_CV)
    if beta == 1.0:
        return _kl(log_p_CV, log_q_CV)
    log_m_CV = _mixture(log_p_CV, log_q_CV, beta)
    return beta * _kl(log_q_CV, log_m_CV) + (1 - beta) * _kl(log_p_CV, log_m_CV)


def slope(log_p_CV: Tensor, log_q_CV: Tensor, beta: float) -> Tensor:
    """∂D_β/∂logits of the student, [C, V]."""
    p_CV = log_p_CV.exp()
    if beta == 0.0:
        return p_CV - log_q_CV.exp()
    g_CV = log_p_CV - (log_q_CV if beta == 1.0 else _mixture(log_p_CV, log_q_CV, beta))
    if beta != 1.0:
        g_CV *= 1 - beta
    mean_C: Tensor = torch.linalg.vecdot(p_CV, g_CV)
    return p_CV * (g_CV - mean_C[:, None])


def _mixture(log_p_CV: Tensor, log_q_CV: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_p_CV + math.log(1 - beta), log_q_CV + math.log(beta))


def _kl(log_a_CV: Tensor, log_b_CV: Tensor) -> Tensor:
    """KL(a‖b) at every place."""
    kl_C: Tensor = torch.linalg.vecdot(log_a_CV.exp(), log_a_CV - log_b_CV)
    return kl_C
