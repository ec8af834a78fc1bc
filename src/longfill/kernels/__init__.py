"""Kernels: one interface, the torch reference that defines it, and the backends that are held to it."""
