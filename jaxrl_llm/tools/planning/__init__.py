"""Parts of plans: the chips by name, what a run would do, and tables of fleets."""
