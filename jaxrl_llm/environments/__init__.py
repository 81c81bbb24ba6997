"""Who answers the policy between its turns."""
