"""Which drafter to decode with, and whether: what was measured, what follows from it, and how to serve it."""
