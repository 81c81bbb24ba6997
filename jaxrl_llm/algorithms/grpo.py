"""GRPO: advantages are relative to the other responses to the same prompt, with PPO's clipped surrogate and no critic.

    A_i = (r_i - mean_G r) / (std_G r + 1e-6)        L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))

DeepSeekMath, https://arxiv.org/abs/2402.03300. Dr. GRPO (https://arxiv.org/abs/2503.20783) is the case std=False with
aggregation="constant"; DAPO (https://arxiv.org/abs/2503.14476) is the case clip_high > clip_low with
aggregation="token-mean" and an over-long penalty. The standard deviation uses n - 1. Unlike the first
paper, the defaults average over tokens, clip higher above 1 than below it, and use no reference policy; gin/algorithms has
each paper's own settings.
"""

from dataclasses import dataclass

from jaxrl_llm.algorithms.policy_gradient import Clipped, GroupRelative


@dataclass(frozen=True, kw_only=True)
class GRPO(GroupRelative, Clipped):
    """Group-relative policy optimisation."""

    clip_high: float = 0.28
