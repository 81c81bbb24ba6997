"""Turns scored groups into an update: packing, token stats, gradients and the optimizer."""
