"""Reports that verify this project: runs of all algorithms and systems, with their tables and figures."""
