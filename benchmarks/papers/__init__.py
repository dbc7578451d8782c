"""What papers say of their systems, beside what the simulator says of our policies on the papers' machines.

shapes  GPT-shaped models by layers and width, and one policy's plan for one of them
claims  the claims: each makes its plans and says what came of it
record  what is kept of a run
run     all claims, or some
table   the table in ``benchmarks/README.md`` and ``docs/policies.md``
"""
