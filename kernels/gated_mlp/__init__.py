"""The gradients of a gated MLP, in which gate and up are computed again: a Pallas kernel for TPUs, and XLA."""
