"""From scored groups to an update: packing, token stats, gradients, the optimizer."""
