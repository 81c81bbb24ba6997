"""Relays of published weights: sampler hosts fetch a version once and pass it on to each other."""
