"""``auto`` beside every published policy for model states, simulated on machines of the catalogue.

record  what is kept of a run
run     which models, machines and budgets; the plans
table   the table in ``benchmarks/README.md``
"""
