"""Devices and processes: the mesh, values between processes, joining, preemption, XLA's flags."""
