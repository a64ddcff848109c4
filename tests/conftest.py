"""Hypothesis without a clock: a shared machine may be slow, and slow is not wrong."""

from hypothesis import settings

settings.register_profile("cpkit", deadline=None, print_blob=True)
settings.load_profile("cpkit")
