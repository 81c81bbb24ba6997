"""The gated delta rule over packed rows, a recurrence with a matrix for a state in each head."""
