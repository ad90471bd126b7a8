"""Proof that decoding keeps the target's law: sampled rows against exact enumeration, rules in fractions.

`subjects` (what is tested) and `sampling` (tokens and their exact laws) meet in `certificate`, which judges
by `statistics` and is shown by `report`. `rational_rules` are the rules in fractions, on instances of
`rational`; `reference` finds a rule's.
"""
