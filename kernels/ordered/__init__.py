"""Arithmetic whose result for a row is the same bits in every program, whatever rows it is computed with."""
