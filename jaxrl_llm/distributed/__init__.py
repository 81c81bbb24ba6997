"""Devices and processes: the mesh, targets by name, compiled programs, values between processes, joining, preemption, XLA's flags."""
