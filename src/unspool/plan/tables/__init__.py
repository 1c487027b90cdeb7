"""The tables of pairs about a call: what can't stand together, why, and what to use instead.

Whoever adds a method that does not go with another adds a line here; a plug-in brings tables of its own in its entry.
What a config alone can decide is in `unspool.config.conflicts`.
"""
