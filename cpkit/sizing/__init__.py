"""Which deployment: what engines support, what memory holds, what steps cost."""
