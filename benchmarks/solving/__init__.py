"""How long each planner for activations takes to decide.

record  what is kept of a run
run     the models; a plan by every policy
table   the table in ``docs/policies.md``
"""
