"""Isolates and watches a program that nobody trusts, and judges it from outside of its process."""
