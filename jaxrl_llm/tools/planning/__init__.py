"""Parts of plans: the chips by name, the plan of a run, and tables of fleets."""
