"""How a program that nobody trusts is shut in, watched, and judged from outside of its process."""
