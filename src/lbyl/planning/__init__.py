"""Which channels are pruned: ratios, criteria, budgets. Changes no model.

Importing this registers every criterion, `echo` too, which stands in a file of its own.
"""

from lbyl.planning import elimination as elimination
