"""Objectives, one file each: pure functions of sequences and micro-batches."""
