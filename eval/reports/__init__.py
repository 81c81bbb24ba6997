"""How this project proves itself: runs of all algorithms and systems, their tables and figures."""
