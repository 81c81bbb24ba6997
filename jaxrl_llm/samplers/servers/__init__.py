"""Servers of tokens of any kind: the fleet, its client, its updates, and the publication of weights to them."""
