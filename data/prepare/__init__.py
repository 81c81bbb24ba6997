"""Preparation commands, which download a data set and convert it: python -m jaxrl_llm.data.prepare.NAME."""
