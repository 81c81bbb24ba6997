"""Axis letters of every shape annotation, defined once.

B  rows of a packed batch             T  tokens of a row, or of a sequence
S  sequences of a global batch        N  prompts
G  rollouts of one prompt             V  vocabulary entries
D  width of the residual stream       F  width of the MLP
H  query heads                        K  key/value heads
C  width of a head                    L  layers
"""
