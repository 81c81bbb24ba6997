"""Reports that verify this project: runs of all algorithms and systems, their tables and figures."""
