"""What a gated delta rule takes of its layer's projection: a causal convolution, its nonlinearity, and queries and keys of length 1."""
