"""Do ranks agree? Of plans, before anything runs; of any torch.distributed job, from what its ranks recorded.

agree      plans of all ranks, also of different batches: the fields that must be equal, and where they are not
record     log every collective that this process enters, in a program that need not know cpkit
mark_step  number the steps of a recorded program, for the report
"""

from cpkit.consistency.plans import Disagreement, agree
from cpkit.consistency.recorder import mark_step, record

__all__ = ["Disagreement", "agree", "mark_step", "record"]
