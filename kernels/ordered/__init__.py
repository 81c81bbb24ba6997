"""Arithmetic whose result for a row has the same bits in every program, whatever other rows are computed with it."""
