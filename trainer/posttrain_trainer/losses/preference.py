"""Losses of pairs of answers, from the log-probabilities that the model and its reference give them.

With log-ratios r = log pi(y|x) - log ref(y|x) of the chosen (w) and the rejected answer (l), and beta:

| loss type | loss of a pair | source |
|---|---|---|
| sigmoid | -(1 - e) log s(beta (r_w - r_l)) - e log s(-beta (r_w - r_l)) | DPO, Rafailov et al. 2023, arXiv:2305.18290, eq. 7; e (label smoothing): Mitchell 2023, "A note on DPO with noisy preferences" |
| hinge | max(0, 1 - beta (r_w - r_l)) | SLiC-HF, Zhao et al. 2023, arXiv:2305.10425, with the reference as in RSO, Liu et al. 2023, arXiv:2309.06657 |
| ipo | (r_w - r_l - 1 / (2 beta))^2 with log-probabilities per token | IPO, Azar et al. 2023, arXiv:2310.12036, eq. 17; averaged over tokens as its authors advise for language models |
| kto_pair | ((1 - s(beta (r_w - z_l))) + (1 - s(beta (z_w - r_l)))) / 2 | KTO, Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8, on pairs |

s is the logistic function. z_w and z_l stand for KTO's KL term: max(0, mean of r_w), max(0, mean of r_l) over the whole
global batch, without gradient. The reward of an answer is beta r.

Shapes: P pairs; in the last axis of 2, chosen stands before rejected.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from posttrain_trainer.contract.methods import DpoMethod
from posttrain_trainer.losses.cross_entropy import MicroLoss

METRICS = ("rewards_chosen", "rewards_rejected", "rewards_margin")
"""What `extra` of the result sums up."""


def preference_loss(policy_P2: Tensor, reference_P2: Tensor, method: DpoMethod, kl_2: Tensor | None = None) -> MicroLoss:
    """Loss summed over the pairs, and how many of them have the higher reward on the chosen answer.

    Args:
        policy_P2: fp32 log-probabilities under the model, summed over an answer's tokens (ipo: their mean).
        reference_P2: The same under the reference; zeros when there is none.
        method: Loss type, beta and label smoothing.
        kl_2: kto_pair: z_w and z_l.

    Returns:
        `extra` holds the sums of the rewards of chosen, of rejected, and of their differences.
    """
    beta = method.beta
    ratio_P2 = policy_P2 - reference_P2
    margin_P = ratio_P2[:, 0] - ratio_P2[:, 1]
    match method.loss_type:
        case "sigmoid":
            smooth = method.label_smoothing
            losses_P = -(1 - smooth) * functional.logsigmoid(beta * margin_P) - smooth * functional.logsigmoid(-beta * margin_P)
        case "hinge":
            losses_P = torch.relu(1 - beta * margin_P)
        case "ipo":
            losses_P = (margin_P - 1 / (2 * beta)) ** 2
        case "kto_pair":
            assert kl_2 is not None
            chosen_P = 1 - torch.sigmoid(beta * (ratio_P2[:, 0] - kl_2[1]))
            rejected_P = 1 - torch.sigmoid(beta * (kl_2[0] - ratio_P2[:, 1]))
            losses_P = (chosen_P + rejected_P) / 2
    rewards_2 = beta * ratio_P2.detach().sum(0)
    return MicroLoss(losses_P.sum(), (margin_P > 0).sum(), torch.stack([*rewards_2, rewards_2[0] - rewards_2[1]]))
