"""The native stack: layers x program x wiring, run by one executor."""
