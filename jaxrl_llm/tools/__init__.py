"""Commands beside a run, `python -m jaxrl_llm.tools.NAME`: plan, doctor, bench, chat, export, migrate."""
