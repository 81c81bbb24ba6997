"""The gated delta rule over packed rows, a recurrence whose state in each head is a matrix."""
