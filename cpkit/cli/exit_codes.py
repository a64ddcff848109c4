"""What the command's exit codes mean; 0 is done, with every promise kept, or yes."""

VIOLATED = 1
"""A promise was violated: a plan breaks one, a rank's values differ from the truth, or ranks disagree; or the answer
is no: an engine refuses a deployment, or a sweep finds none to take.
"""

USAGE_ERROR = 2
"""Bad usage or input, said on one line of stderr."""

INTERRUPTED = 130
"""Ctrl-C, after a report of the steps so far where there are any."""
