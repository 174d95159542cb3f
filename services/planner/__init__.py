"""What to buy, what would happen: papers' results, calculators, planners.

``core`` computes and reads nothing; its siblings read files. The command line is
``services/cli/plan``.
"""
