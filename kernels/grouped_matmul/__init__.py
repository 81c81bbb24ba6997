"""Matrix products of rows that are sorted by expert, and the MLP of experts that consists of them."""
