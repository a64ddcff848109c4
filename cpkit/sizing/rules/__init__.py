"""What each engine supports and refuses.

for refusal in refusals(deployment):
    refusal.rule.id, refusal.sentence, refusal.rule.source, refusal.change
"""
