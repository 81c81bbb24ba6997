"""RL post-training of language models in JAX.

Axis letters of every shape:

    B  rows of a packed micro-batch       T  tokens of a row, or of a sequence
    S  sequences of a step, or slots      N  prompts
    G  rollouts of one prompt             V  vocabulary entries
    D  width of the residual stream       F  width of the MLP
    H  query heads                        K  key/value heads
    C  width of a head                    L  layers
"""

__version__ = "0.1.0"
