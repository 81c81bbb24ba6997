"""What the policy acts in: environments of the project's own, and adapters of others', one file each."""
